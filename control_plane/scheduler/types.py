"""What goes into the scheduler and what comes out: requests, results, plans. Plain data, no behaviour.

Read by the API (builds requests), the fleet (carries plans and results) and the scheduler itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from contract.v1.sampling import SamplingValues
from control_plane.scheduler.adapter_ref import AdapterRef as AdapterRef
from control_plane.scheduler.logprobs import PackedLogprobs as PackedLogprobs, TokenLogprobs as TokenLogprobs

Vector = npt.NDArray[np.float32]  # [hidden_width or num_labels] of a request with `pooling`

TOKEN_BYTES = 4  # of a token id as int32, packed to be hashed or sent

RequestId = NewType("RequestId", int)  # made by the fleet, never reused within one control plane process


def sample_seed(seed: int, index: int) -> int:
    """Seed of one sample of a request, 64-bit unsigned: the request's own for index 0, far apart for the others."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


class Combination(enum.Enum):
    """How several adapters of one request are combined, as PEFT's add_weighted_adapter calls it."""

    CAT = "cat"  # the sum of scale * product
    LINEAR = "linear"  # the product of the sums of A and of B


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter of a request that combines several, or scales one."""

    ref: AdapterRef
    scale: float = 1.0  # what the adapter's scaling is multiplied by


@dataclass(frozen=True, slots=True)
class Composition:
    """The adapters of a request that combines several, or scales one."""

    uses: tuple[AdapterUse, ...]  # each adapter once, in the order of the request
    combination: Combination = Combination.CAT


# Between the digests in the name of a set of adapters.
SET_SEPARATOR = "+"


def digests_of(name: str) -> list[str]:
    """The digests of a set of adapters, from its name (Request.adapters_name)."""
    return name.split(SET_SEPARATOR)


def has_adapter(name: str | None, other: str | None) -> bool:
    """Whether requests under this name have the adapter `other`, or exactly the set `other`."""
    return name == other or (name is not None and other in digests_of(name))


class SlotRef(NamedTuple):
    """What a slot held at one time."""

    slot_idx: int
    generation: int  # counts up with every load into the slot


class SlotUse(NamedTuple):
    """One of the adapters that a row combines."""

    slot_idx: int
    generation: int
    scale: float


class AdapterTier(enum.Enum):
    """How near an adapter is to a worker's use."""

    READY = "ready"  # in an open slot
    LOADING = "loading"  # on its way into one
    ABSENT = "absent"  # in no slot; there is room for it, or a slot without leases
    NO_ROOM = "no room"  # in no open slot, and other requests have to end first


@dataclass(frozen=True, slots=True)
class Sampling(SamplingValues):
    """How tokens are chosen; every value in effect, validated."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), by token id
    min_tokens: int = 0  # generated tokens before which no stop token is sampled


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search instead of sampling, as transformers' generate() does it."""

    width: int  # beams
    length_penalty: float = 1.0  # exponent of the length that a score is divided by, no unit
    early_stopping: bool = False  # end with `width` hypotheses, not when no running beam can beat them


class PoolingKind(enum.Enum):
    """Which last hidden state stands for an input."""

    LAST = "last"  # of its last token
    MEAN = "mean"  # the mean over all its tokens
    FIRST = "first"  # of its first token


@dataclass(frozen=True, slots=True)
class Pooling:
    """A vector instead of tokens."""

    kind: PoolingKind = PoolingKind.LAST
    num_labels: int = 0  # logits of the adapter's score head; 0: the pooled hidden state itself

    @property
    def reads_all(self) -> bool:
        """Whether tokens count whose states the prefix cache does not keep: none may come from it."""
        return self.kind is not PoolingKind.LAST


@dataclass(frozen=True, slots=True)
class Completion:
    """What one index of a request with several samples has so far."""

    token_ids: tuple[int, ...] = ()  # accepted tokens
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that grammars are made of."""

    digest: str  # of everything below
    tokenizer: str = field(repr=False)  # tokenizer.json
    num_tokens: int  # of the rows' logits
    end_token_ids: tuple[int, ...]  # that end a completion; at least one


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a completion must follow; checked."""

    digest: str  # of grammar and vocabulary
    grammar: str = field(repr=False)  # as llguidance reads it
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class LogIds:
    """How logs name a request; nothing is decided by it."""

    request_id: str = ""  # as the client knows it
    trace_id: str = ""  # of W3C Trace Context; empty: the client named none


@dataclass(frozen=True, slots=True)
class Request:
    """One user call to generate, or one input of a call that pools."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]  # at least one
    max_tokens: int  # tokens to generate in all, those of generated_token_ids included; 1 with `pooling`
    generated_token_ids: tuple[int, ...] = ()  # generated earlier (resume, migration); fewer than max_tokens
    adapter: AdapterRef | None = None  # None: the base model; of a composition, the first
    composition: Composition | None = None  # several adapters, or one with a scale
    active_from: int = 0  # tokens of the prompt before the first one that the adapter changes (activated LoRA)
    sampling: Sampling = Sampling()
    stop_token_ids: frozenset[int] = frozenset()  # end after one of these (end-of-sequence ids included)
    cache_salt: bytes = b""  # prefix-cache partition, inside the tenant's
    arrival_s: float = 0.0  # monotonic clock, seconds
    deadline_s: float | None = None  # monotonic clock, seconds
    tenant: str = "default"  # whose cached prompts it shares
    charged_to: str = ""  # the account that its use is charged to, where that is not its tenant's own
    priority: int = 0  # among the account's requests; higher runs first
    num_samples: int = 1  # completions to sample (best_of); sample i > 0 draws with sample_seed(seed, i)
    beam: BeamSearch | None = None  # beam search; num_samples is 1 then
    completions: tuple[Completion, ...] = ()  # of num_samples > 1: generated earlier (migration), by index; else empty
    pooling: Pooling | None = None  # what it returns with the end of its prefill; None: it generates
    constraint: Constraint | None = None  # what its completions follow; None: any text
    log_ids: LogIds = LogIds()

    @property
    def account(self) -> str:
        """The account that the request is charged to, and that shares the worker with other accounts."""
        return self.charged_to or self.tenant

    @property
    def adapters(self) -> tuple[AdapterRef, ...]:
        """Every adapter of the request; empty for the base model."""
        if self.composition is not None:
            return tuple(use.ref for use in self.composition.uses)
        return () if self.adapter is None else (self.adapter,)

    @property
    def adapters_name(self) -> str | None:
        """The adapter's digest, or the name of the set of several; None for the base model."""
        if self.composition is None:
            return None if self.adapter is None else self.adapter.digest
        return SET_SEPARATOR.join(sorted(use.ref.digest for use in self.composition.uses))

    @property
    def num_indices(self) -> int:
        """Completions that the request yields, each with its own index: samples, or beams."""
        return self.num_samples if self.beam is None else self.beam.width

    def without_index(self, index: int) -> Request:
        """A copy of the request without the completion `index`. A beam search is returned unchanged."""
        if self.beam is not None:
            return self
        completions = list(self.completions) or [Completion()] * self.num_samples
        completions[index] = replace(completions[index], is_ended=True)
        return replace(self, completions=tuple(completions))


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one worker can hold, from its Hello, and how it is to be used."""

    num_blocks: int  # KV blocks
    block_size: int  # tokens of one block
    max_rows: int  # requests on the worker at once
    max_step_tokens: int  # token budget of one step
    num_slots: int  # adapter slots
    arena_bytes: int  # adapter arena
    max_model_len: int  # longest context, tokens
    plan_depth: int = 2  # plans in flight at once
    num_host_blocks: int = 0  # KV blocks in host memory; 0: the worker does not swap
    hidden_width: int = 0  # values of a last hidden state; 0: the worker does not pool
    max_adapter_model_len: int = 0  # longest context of long-context adapters, tokens; 0: max_model_len

    def context_of(self, adapter: AdapterRef | None) -> int:
        """Longest context of a request with this adapter, tokens."""
        if adapter is None or not adapter.context_length:
            return self.max_model_len
        return min(adapter.context_length, max(self.max_model_len, self.max_adapter_model_len))


# ---- plans: scheduler -> worker ----


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that takes a row of the worker's state, for the first time or again after a preemption."""

    row: int
    request_id: RequestId
    prompt_token_ids: tuple[int, ...]  # one object for all rows of a request
    generated_token_ids: list[int]  # before; they follow the prompt
    num_computed_tokens: int  # leading tokens whose KV lies in block_ids already (prefix cache)
    block_ids: list[int]  # block table at the start of this step
    slot_idx: int | None  # None: no adapter
    slot_generation: int  # 0 where slot_idx is None
    sampling: Sampling
    banned_token_ids: tuple[int, ...] = ()  # before sampling.min_tokens generated tokens; empty without min_tokens
    is_host_fed: bool = False  # decodes only in steps that feed it a token
    adapters: tuple[SlotUse, ...] = ()  # several, or one with a scale; slot_idx is the first of them then
    is_linear: bool = False  # `adapters` are combined as Combination.LINEAR says
    active_from: int = 0  # tokens before the first one that its adapter changes
    vocab_size: int | None = None  # of its adapter; None: the base model's
    pooling: Pooling | None = None  # None: it samples and decodes
    constraint: Constraint | None = None  # what its completion follows, generated_token_ids included
    log_ids: LogIds = LogIds()

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Known tokens, in a list of their own."""
        return [*self.prompt_token_ids, *self.generated_token_ids]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Decoding rows come first, ascending by row; then prefills in scheduling order.

    A row samples in this step if it decodes, or if its prefill ends in it; with `pooling` it returns a vector then.
    """

    step_id: int  # counts up by one per scheduler, from 1
    decode_rows: list[int]  # one token each; plans share the list: not to be changed
    prefills: list[tuple[int, int]] = field(default_factory=list)  # (row, tokens), at least one token each
    new_rows: list[NewRow] = field(default_factory=list)
    appended_blocks: list[tuple[int, int]] = field(default_factory=list)  # (row, block id), table order; not new rows'
    freed_rows: list[int] = field(default_factory=list)  # rows whose request ended or was preempted
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) before the pass
    fed_tokens: list[tuple[int, int]] = field(default_factory=list)  # (row, token id) of host-fed rows that decode
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (block, host block), first of all block moves
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # (host block, block), before block_copies
    # That the plan stands for: this one, then steps in which the same rows decode on, ids counting up.
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class LoadSlot:
    """Fill an empty slot."""

    slot_idx: int
    generation: int  # counts up per slot, from 1
    digest: str
    arena_bytes: int = field(default=0, compare=False)  # what the adapter takes of the arena


@dataclass(frozen=True, slots=True)
class EvictSlot:
    """Empty a slot that no step in flight names."""

    slot_idx: int
    generation: int
    digest: str


SlotCommand = LoadSlot | EvictSlot


# ---- results and reports: worker -> scheduler ----


@dataclass(frozen=True, slots=True)
class SlotReady:
    """The worker loaded the adapter into the slot."""

    slot_idx: int
    generation: int
    load_time_us: int = 0  # microseconds; 0: unknown, and not used for cost estimates


@dataclass(frozen=True, slots=True)
class SlotEmptied:
    """The worker evicted the adapter from the slot."""

    slot_idx: int
    generation: int


@dataclass(frozen=True, slots=True)
class SlotLoadFailed:
    """The worker could not load the adapter, and the slot is empty."""

    slot_idx: int
    generation: int
    reason: str
    is_retryable: bool  # a later load may succeed
    is_mismatch: bool = False  # the adapter itself does not fit the model


SlotReport = SlotReady | SlotEmptied | SlotLoadFailed


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of one step."""

    step_id: int
    rows: list[int]  # rows that sampled or returned a vector, in the order of the step
    token_ids: list[int]  # as long as rows; 0 for a vector
    failed_rows: list[int] = field(default_factory=list)  # logits not finite, or the constraint failed
    step_time_us: int = 0  # on the worker, microseconds; 0: not measured
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # row -> its sampled token, where requested
    prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)  # row -> prompt tokens, in order
    num_moved_blocks: int = 0  # to and from host memory, by moves that ended since the result before
    move_time_us: int = 0  # of these moves, microseconds
    pooled: dict[int, Vector] = field(default_factory=dict)  # row -> its vector, for rows with `pooling`
    unconstrained_rows: frozenset[int] = frozenset()  # those of failed_rows whose constraint failed
    # Rows with a constraint whose next tokens were not known in time: they were to sample and did not, and their last
    # token counts as not computed.
    waiting_rows: frozenset[int] = frozenset()


class FinishReason(enum.Enum):
    """Why a request ended."""

    LENGTH = "length"  # max_tokens or the context was reached
    STOP_TOKEN = "stop_token"  # the last token is one of stop_token_ids
    POOLED = "pooled"  # it has its vector
    DEADLINE = "deadline"  # deadline_s passed
    ADAPTER_FAILED = "adapter_failed"  # its adapter could not be loaded here
    NOT_FINITE = "not_finite"  # its logits were not finite
    CONSTRAINT_FAILED = "constraint_failed"  # its constraint took too much to follow


@dataclass(slots=True)
class RequestOutput:
    """What one request gained from one call into the scheduler."""

    request_id: RequestId
    token_ids: list[int]  # new tokens, may be empty
    finish_reason: FinishReason | None = None  # set once, last
    # The next four are set with the request's first tokens from each worker, and with its end.
    num_cached_tokens: int = 0  # prompt tokens served by the prefix cache at the first admission
    first_scheduled_s: float | None = None  # monotonic time of the first plan that carried the request
    slot: SlotRef | None = None  # that its adapter was in when the request last took rows
    adapter_ready_s: float | None = None  # monotonic time at which the load of its adapter ended
    message: str = ""  # for ADAPTER_FAILED: why
    is_mismatch: bool = False  # for ADAPTER_FAILED: the adapter itself does not fit the worker's model
    is_crowded_out: bool = False  # for ADAPTER_FAILED: pinned adapters leave no room for the request's
    request: Request | None = None  # for ADAPTER_FAILED, NOT_FINITE: with every accepted token, to go on elsewhere
    index: int = 0  # which completion. Each ends by LENGTH or STOP_TOKEN; every other reason ends the whole request
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, where requested
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # all of the prompt's, once, with the first token of index 0
    score: float | None = None  # for beam search: what the completions are ranked by
    num_searched: int = 0  # for beam search, at its end of whatever kind: tokens computed over all beams
    pooled: Vector | None = None  # with POOLED: the vector


@dataclass(slots=True)
class Outputs:
    """What requests gained from one call into the scheduler, as an iterable of RequestOutput.

    Most gain a token and nothing else. Those are kept as pairs: an object for each would take longer to make than all
    the rest that is done about the token.
    """

    tokens: list[tuple[RequestId, int]] = field(default_factory=list)  # the next of index 0; they come before `others`
    others: list[RequestOutput] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.others)

    def __iter__(self) -> Iterator[RequestOutput]:
        for request_id, token_id in self.tokens:
            yield RequestOutput(request_id, [token_id])
        yield from self.others

"""Decoded step plans and what an engine is: the seam between the plan stream and the code that computes.

`data_plane.wire` builds these from protobuf, an engine (the real one, or the fake of the tests) executes them.
No torch here: the fake worker runs without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from contract.expert_names import of_expert
from contract.fingerprint import NOT_QUANTIZED
from contract.plan_stream.plan_bounds import MAX_ROW_ADAPTERS as MAX_ROW_ADAPTERS
from contract.v1.sampling import SamplingValues

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


def no_pairs() -> Int32Array:
    """An empty list of pairs, [0, 2]."""
    return np.zeros((0, 2), dtype=np.int32)


def no_rows() -> Int32Array:
    """An empty list of rows, [0]."""
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RowSampling(SamplingValues):
    """How one row's tokens are chosen."""

    biased_token_ids: Int32Array | None = None  # [n]; None: no bias
    biases: Float32Array | None = None  # [n] added to their logits
    min_tokens: int = 0  # generated tokens before which no banned token is sampled
    banned_token_ids: Int32Array | None = None  # [n]; set where min_tokens is


GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)  # always the most likely token


@dataclass(frozen=True, slots=True)
class RowAdapter:
    """One of the adapters that a row combines."""

    slot: int
    generation: int
    scale: float  # what the adapter's scaling is multiplied by


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of a row that has several, or one with a scale."""

    members: tuple[RowAdapter, ...]  # 1 to MAX_ROW_ADAPTERS, each slot at most once
    is_linear: bool = False  # A and B are summed each (PEFT's "linear"); else their products are (PEFT's "cat")


class PoolingKind(Enum):
    """Which last hidden state a row returns instead of tokens."""

    LAST = "last"  # of its last token
    MEAN = "mean"  # the mean over all its tokens
    FIRST = "first"  # of its first token


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar's text is made of: the tokens of a tokenizer."""

    digest: str  # of everything below
    tokenizer: str  # tokenizer.json
    num_tokens: int  # of the row's logits
    end_token_ids: tuple[int, ...]  # that end a completion; at least one


@dataclass(frozen=True, slots=True)
class RowConstraint:
    """What a row's completion must follow."""

    digest: str  # of grammar and vocabulary
    grammar: str  # as llguidance reads it
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that takes a row."""

    row: int
    token_ids: Int32Array  # [num_tokens] prompt, then what was generated before
    num_prompt_tokens: int
    num_computed_tokens: int  # leading tokens whose KV lies in block_ids already
    block_ids: Int32Array  # [num_blocks]
    slot: int | None  # None: no adapter
    slot_generation: int
    sampling: RowSampling
    is_host_fed: bool = False  # decodes only where fed_tokens names it
    adapters: RowAdapters | None = None  # several, or one with a scale; `slot` is the first of them then
    active_from: int = 0  # tokens of the row before the first one that the adapter changes
    pooling: PoolingKind | None = None  # what the row returns when its prefill ends; None: it samples and decodes
    num_labels: int = 0  # logits of its adapter's score head; 0: the pooled hidden state itself
    constraint: RowConstraint | None = None  # None: any text
    request_id: str = ""  # as the client knows it, for the log
    trace_id: str = ""  # for the log; empty: none


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, as it travelled: a difference to the state that the engine keeps (see plan.proto)."""

    step_id: int
    freed_rows: Int32Array = field(default_factory=no_rows)  # [n]
    new_rows: list[NewRow] = field(default_factory=list)
    appended_blocks: Int32Array = field(default_factory=no_pairs)  # [n, 2] (row, block id)
    paused_rows: Int32Array = field(default_factory=no_rows)  # [n]
    resumed_rows: Int32Array = field(default_factory=no_rows)  # [n]
    prefills: Int32Array = field(default_factory=no_pairs)  # [n, 2] (row, number of tokens)
    block_copies: Int32Array = field(default_factory=no_pairs)  # [n, 2] (source, destination)
    fed_tokens: Int32Array = field(default_factory=no_pairs)  # [n, 2] (row, token id) of host-fed rows that decode
    swap_outs: Int32Array = field(default_factory=no_pairs)  # [n, 2] (block, host block)
    swap_ins: Int32Array = field(default_factory=no_pairs)  # [n, 2] (host block, block)
    num_more: int = 0  # steps that follow in the same message, in which the same rows decode on


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of n consecutive tokens of one row, under the distribution that its settings name."""

    row: int
    first_position: int  # tokens of the row before the first of these
    token_ids: Int32Array  # [n]
    logprobs: Float32Array  # [n] natural logarithm
    ranks: Int32Array  # [n] tokens that were more likely, plus one
    top_token_ids: Int32Array  # [n, num_top] the most likely first, equal ones by token id
    top_logprobs: Float32Array  # [n, num_top]


@dataclass(frozen=True, slots=True)
class PooledRow:
    """The vector that a row with `pooling` returns."""

    row: int
    values: Float32Array  # [hidden_width or num_labels]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens of one step."""

    step_id: int
    rows: Int32Array  # [n] rows that sampled or returned a vector, in the order of the step
    token_ids: Int32Array  # [n] 0 for a vector
    failed_rows: Int32Array  # [n] rows whose logits or vectors were not finite, or whose constraint failed
    step_time_us: int
    sampled_logprobs: list[RowLogprobs] = field(default_factory=list)  # of rows that want them, in the order of rows
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)  # of rows whose prompt was computed here
    num_moved_blocks: int = 0  # to and from host memory, by moves that ended since the step before
    move_time_us: int = 0  # of these moves
    pooled: list[PooledRow] = field(default_factory=list)  # of the rows with `pooling` among `rows`, in their order
    unconstrained_rows: Int32Array = field(default_factory=no_rows)  # those of failed_rows whose constraint failed
    num_drafted: int = 0  # draft tokens that the step verified
    num_accepted: int = 0  # of these
    waiting_rows: Int32Array = field(default_factory=no_rows)  # rows whose mask was not ready; see plan.proto


class TargetKind(Enum):
    """What a module is to adapters."""

    LINEAR = "linear"
    HEAD = "head"
    EMBEDDING = "embedding"
    ROUTER = "router"  # chooses the experts of a token by a product with its weight
    EXPERT = "expert"  # one product of an expert, or of all experts of a layer


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A module that an adapter may name as its target."""

    name: str  # path in the transformers model
    kind: TargetKind
    in_features: int  # of an embedding: the vocabulary
    out_features: int
    reason: str = ""  # why it takes no adapters; empty: it takes them
    num_experts: int = 0  # the name stands for this module of so many experts (contract/expert_names.py); 0: for itself
    # Of a layer's experts: in their stacked parameter a column of gate is followed by one of up, not all gates by all
    # ups.
    is_interleaved: bool = False

    def each(self) -> list[TargetModule]:
        """The modules that the name stands for."""
        if not self.num_experts:
            return [self]
        return [replace(self, name=of_expert(self.name, expert), num_experts=0) for expert in range(self.num_experts)]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Where the memory of a worker's device went, beside the arena. Bytes; 0: nothing, or not known."""

    device_bytes: int = 0  # all of it; on the CPU the machine's, or the container's
    weights_bytes: int = 0  # taken once the checkpoint was loaded; on the CPU by the whole process
    step_bytes: int = 0  # taken by the largest step while it runs; 0: not measured, since the KV blocks were named
    kv_bytes: int = 0
    host_kv_bytes: int = 0  # in host memory, of swapped-out requests
    graph_bytes: int = 0  # of captured graphs
    headroom_bytes: int = 0  # left free on purpose
    pinned_bytes: int = 0  # at most, of adapters in host memory beside the arena


@dataclass(frozen=True, slots=True)
class Capacities:
    """What an engine can hold; becomes the Hello."""

    model_fingerprint: str  # 64 lower-case hexadecimal digits
    dtype: str  # "float32", "bfloat16" or "float16"
    device: str  # for people
    num_blocks: int
    block_size: int  # tokens
    max_rows: int
    max_step_tokens: int
    arena_bytes: int
    num_slots: int
    max_model_len: int  # tokens
    vocab_size: int  # tokens
    num_host_blocks: int = 0  # KV blocks in host memory; 0: it does not swap
    target_modules: tuple[TargetModule, ...] = ()  # in the model's order; empty: not reported
    hidden_width: int = 0  # of the last hidden state, which rows with `pooling` return; 0: it takes no such rows
    max_adapter_model_len: int = 0  # tokens, of adapters that rotate by tables of their own; 0: max_model_len
    memory: MemoryUse = MemoryUse()  # for people
    quantization: str = NOT_QUANTIZED  # of contract.fingerprint

    @property
    def longest_row(self) -> int:
        """Tokens that a row may have."""
        return max(self.max_model_len, self.max_adapter_model_len)


ChunkBytes = bytes | memoryview  # of one chunk of a packed adapter


class AdapterSource(Protocol):
    """Where packed adapters come from: the host cache, or the control plane. Thread-safe; blocks."""

    def open(self, digest: str) -> tuple[bytes, Iterator[ChunkBytes]]:
        """The canonical manifest and then its chunks in order, every hash verified.

        Raises data_plane.errors.AdapterUnavailable if no tier gives it.
        """


class AdapterSlots(Protocol):
    """The slots of one engine. `load` runs on loader threads, everything else on the compute thread."""

    def load(self, slot: int, generation: int, digest: str, source: AdapterSource) -> None:
        """Fill an empty slot; afterwards plans may name (slot, generation).

        Raises data_plane.errors.AdapterLoadError; the slot is empty again then.
        """

    def evict(self, slot: int, generation: int) -> None:
        """Empty the slot. Raises data_plane.errors.StaleSlot if it holds another generation."""

    def used_bytes(self) -> int:
        """Bytes of the arena in use."""

    def clear(self) -> None:
        """Empty every slot: a new session begins."""


class PendingStep(Protocol):
    """A step that was submitted. Its results may still be on the device."""

    def is_done(self) -> bool:
        """Whether `wait` returns at once. Does not wait for a device."""

    def wait(self) -> StepOutput:
        """The results. To be called once, on any one thread, in the order of the steps.

        Raises what the device reports: the engine cannot go on then.
        """


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step whose results came with its submission."""

    output: StepOutput

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        return self.output


class Engine(Protocol):
    """Executes step plans in order on one thread."""

    capacities: Capacities
    slots: AdapterSlots

    def submit(self, plan: StepPlan) -> PendingStep:
        """Apply the plan's differences, queue one forward pass and its samples. The next plan may follow at once.

        Raises data_plane.errors.PlanRefused where the plan contradicts the engine's state, a slot generation
        that is not the slot's included. The session ends then: nothing is guessed.
        """

    def execute(self, plan: StepPlan) -> StepOutput:
        """Submit the plan and wait for its results."""

    def read_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Read the tokenizer of a vocabulary that rows will name, so that no step reads it. Survives `reset`.

        A tokenizer that cannot be read fails the rows that name it, each by itself.
        """

    def reset(self) -> None:
        """Forget all rows, slots and KV: a new session begins."""

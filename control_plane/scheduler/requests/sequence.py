"""A live request inside the scheduler: the group, its sequences, and the rows of the worker that they hold.

A request is a group of one sequence for each completion. A group waits, is admitted, paused, preempted and ended as a
whole; its members hold rows and blocks. What holds only while a sequence has a row is in its `Row`, which is made when
the sequence takes the row and dropped when it leaves. States are assigned in transitions.py alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from control_plane.scheduler.logprobs import PromptLogprobs
from control_plane.scheduler.requests.beam_search import BeamSearcher
from control_plane.scheduler.requests.states import GroupState, SequenceState
from control_plane.scheduler.types import Completion, FinishReason, Request, RequestId, Sampling


@dataclass(slots=True, eq=False)
class Row:
    """What a sequence has while it holds a row of the worker.

    Token positions: [0, num_computed) are computed, [num_computed, num_planned) are in steps in flight. While the
    sequence decodes, the value of the last planned token may be unknown here; the worker feeds it back itself.
    """

    sequence: Sequence
    row_idx: int
    slot_idx: int | None  # leased adapter slot; None: no adapter
    state: SequenceState  # never IDLE
    is_begun: bool = False  # the worker knows the row
    block_ids: list[int] = field(default_factory=list)  # block table
    moved_block_ids: list[int] = field(default_factory=list)  # the table's beginning, moved to host memory by a plan
    forks_from: Sequence | None = None  # while FORKING: computes what it shares, in plans that come before
    copied_block: int | None = None  # held until the result of the plan that copies it
    prefill_end: int = 0  # known tokens when the sequence took the row; it decodes from there
    num_planned: int = 0  # tokens whose KV is computed or in steps in flight
    num_computed: int = 0  # tokens whose KV is computed: their results came
    num_registered: int = 0  # leading blocks that were offered to the prefix cache
    register_at: int = 0  # computed tokens at which the next block is full
    num_in_flight: int = 0  # steps in flight that name the row
    is_decoding: bool = False  # its prefill is planned to the end
    # Tokens planned, and tokens computed, up to which the row decodes on and needs no closer look; 0: look always.
    plan_closely_at: int = 0
    apply_closely_at: int = 0

    def look_closely(self) -> None:
        """Look at whatever is planned for the row or computed of it."""
        self.plan_closely_at = self.apply_closely_at = 0

    def plan_on(self, block_size: int) -> None:
        """The row decodes: its plans need no closer look until its table is full, or its last token is planned."""
        self.plan_closely_at = min(len(self.block_ids) * block_size, self.sequence.max_planned - 1)

    def apply_on(self) -> None:
        """The row decodes: its results need no closer look until a block is full, or its longest length is reached."""
        sequence = self.sequence
        self.apply_closely_at = 0 if sequence.has_extras else min(self.register_at, sequence.max_planned)


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request: what was requested, and what is known of it."""

    group: SequenceGroup
    index: int  # which of the request's completions
    request: Request  # the group's
    request_id: RequestId  # the request's
    account: str  # the request's
    stop_token_ids: frozenset[int]  # the request's
    sampling: Sampling  # the request's, with this completion's own seed
    max_generated: int  # generated tokens at which max_tokens or the context ends it
    max_planned: int  # tokens to compute in all: not the last that is sampled; of a host-fed sequence, those known
    wants_logprobs: bool  # log-probabilities are returned with its tokens or its prompt
    has_extras: bool  # wants_logprobs, or an index other than 0: its results are more than a token
    generated: list[int]  # accepted tokens
    is_host_fed: bool = False  # what it is fed after its prefill is chosen here, not on the worker
    is_cancelled: bool = False  # cancelled by the client: it only goes on until other sequences forked from it
    is_ended: bool = False  # its completion is complete, or its request over
    block_hashes: list[bytes] = field(default_factory=list)  # chain over full blocks of known tokens, as far as needed
    host_block_ids: list[int] = field(default_factory=list)  # its table in host memory, while it is swapped out
    row: Row | None = None  # None: it holds no row

    @property
    def state(self) -> SequenceState:
        """What the sequence holds."""
        return SequenceState.IDLE if self.row is None else self.row.state

    @property
    def held_row(self) -> Row:
        """The row of a sequence that must hold one."""
        assert self.row is not None, f"sequence {self.index} of request {self.request_id} holds no row"
        return self.row

    @property
    def digest(self) -> str | None:
        """Digest of its adapter, None for the base model."""
        adapter = self.request.adapter
        return None if adapter is None else adapter.digest

    @property
    def num_known(self) -> int:
        """Tokens whose values are known: prompt and accepted ones."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are requested and not returned yet; its first token brings them."""
        return self.sampling.num_prompt_logprobs is not None and not self.generated

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Known tokens of positions [start, end)."""
        prompt = self.request.prompt_token_ids
        num_prompt = len(prompt)
        if end <= num_prompt:
            return list(prompt[start:end])
        if start >= num_prompt:
            return self.generated[start - num_prompt : end - num_prompt]
        return [*prompt[start:], *self.generated[: end - num_prompt]]

    def accept(self, token_id: int) -> FinishReason | None:
        """Append a sampled token; the reason if the completion ends with it."""
        self.generated.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if len(self.generated) >= self.max_generated:
            return FinishReason.LENGTH
        return None


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its sequences, by index."""

    request: Request
    order: tuple[float, int]  # (arrival_s, serial): total order of arrival
    cache_root: bytes  # first link of the block hash chain: (adapter or base, tenant, salt)
    members: list[Sequence] = field(default_factory=list)  # one per completion, ended ones included
    state: GroupState = GroupState.WAITING
    is_paused: bool = False  # its reader is slow. It may keep its rows meanwhile; without any, its state is PAUSED
    is_ended: bool = False  # never to be scheduled again
    num_rows: int = 0  # members that hold a row, draining ones included
    prompt_logprobs: PromptLogprobs | None = None  # those that came so far from the prefill under way
    searcher: BeamSearcher | None = None  # for beam search
    beam_sequences: list[Sequence] = field(default_factory=list)  # of the searcher's beams, in their order
    num_searched: int = 0  # tokens computed for beams, dropped ones included
    beam_candidates: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # by index of the beam
    num_preemptions: int = 0
    was_preempted_for_room: bool = False  # for a request that lacked room, which happens once; backfill.py
    times_overtaken: int = 0  # by requests whose adapters cost the step less
    has_progressed: bool = False  # some member gained a token since the group took its rows
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    first_scheduled_s: float | None = None

    @property
    def digest(self) -> str | None:
        """Digest of its adapter, None for the base model."""
        adapter = self.request.adapter
        return None if adapter is None else adapter.digest

    def live_members(self) -> list[Sequence]:
        """Members whose completion has not ended; the others fork from the first of them.

        By index, except for a beam search: the sequences of its beams come first, in the order of the search.
        """
        if self.searcher is not None:
            beams = self.beam_sequences
            return [*beams, *(sequence for sequence in self.members if sequence not in beams)]
        return [sequence for sequence in self.members if not sequence.is_ended]

    def request_so_far(self) -> Request:
        """The request with every accepted token, to go on elsewhere; a beam search begins again."""
        if self.searcher is not None:
            return self.request
        if len(self.members) == 1:
            return replace(self.request, generated_token_ids=tuple(self.members[0].generated))
        completions = tuple(
            Completion(tuple(sequence.generated), sequence.is_ended or sequence.is_cancelled)
            for sequence in self.members
        )
        return replace(self.request, completions=completions)

"""A live request inside the scheduler: the group, its sequences, and the rows of the worker that they hold.

A request is a group of one sequence for each completion. A group waits, is admitted, paused, preempted and ended as a
whole; its members hold rows and blocks. What holds only while a sequence has a row is in its `Row`, which is made when
the sequence takes the row and dropped when it leaves. admission.py makes groups. From then on states and rows are
assigned in transitions.py alone, and every other field in this file alone: other modules read fields and call methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence as Items
from dataclasses import dataclass, field, replace

from control_plane.scheduler.logprobs import PromptLogprobs, TokenLogprobs
from control_plane.scheduler.requests.beam_search import BeamSearcher
from control_plane.scheduler.requests.states import GroupState, SequenceState
from control_plane.scheduler.types import Completion, FinishReason, Request, RequestId, RequestOutput, Sampling, SlotRef


@dataclass(slots=True, eq=False)
class Row:
    """What a sequence has while it holds a row of the worker.

    Token positions: [0, num_computed) are computed, [num_computed, num_planned) are in steps in flight. While the
    sequence decodes, the value of the last planned token may be unknown here; the worker feeds it back itself.
    """

    sequence: Sequence
    row_idx: int
    slot_idx: int | None  # leased adapter slot, of several the first; None: no adapter
    state: SequenceState  # never IDLE
    further_slots: tuple[int, ...] = ()  # the other slots that it leases, where the request combines adapters
    is_begun: bool = False  # the worker knows the row; set by `begin`
    block_ids: list[int] = field(default_factory=list)  # block table
    moved_block_ids: list[int] = field(default_factory=list)  # the table's beginning, moved to host memory by a plan
    forks_from: Sequence | None = None  # while FORKING: computes what it shares, in plans that come before
    copied_block: int | None = None  # held until the result of the plan that copies it
    prefill_end: int = 0  # known tokens when the sequence took the row; it decodes from there
    num_planned: int = 0  # tokens whose KV is computed or in steps in flight
    num_computed: int = 0  # tokens whose KV is computed: their results came
    most_planned: int = 0  # num_planned before the row sat out a step, which left it blocks for these; 0: it never did
    num_registered: int = 0  # leading blocks that were offered to the prefix cache
    register_at: int = 0  # computed tokens at which the next block is full
    num_in_flight: int = 0  # steps in flight that name the row
    is_decoding: bool = False  # its prefill is planned to the end
    # Tokens planned, and tokens computed, up to which the row decodes on and needs no closer look; 0: look always.
    plan_closely_at: int = 0
    apply_closely_at: int = 0

    def add_blocks(self, block_ids: Iterable[int]) -> None:
        """Append blocks to the table."""
        self.block_ids += block_ids

    def share_blocks(self, block_ids: list[int]) -> None:
        """Begin the table with blocks of another row; the blocks that the row holds come after them."""
        self.block_ids = [*block_ids, *self.block_ids]

    def copy_from(self, block_id: int) -> None:
        """Let the first block of its own begin as a copy of `block_id`, which the row holds until it was copied."""
        self.copied_block = block_id

    def take_copied(self) -> int | None:
        """The block that it held for a copy, which the caller gives back; None if it holds none."""
        block_id, self.copied_block = self.copied_block, None
        return block_id

    def move_blocks(self, num_blocks: int) -> list[int]:
        """Note that a plan moves the first blocks of the table to host memory; the blocks, which the caller frees."""
        self.moved_block_ids, self.block_ids = self.block_ids[:num_blocks], self.block_ids[num_blocks:]
        return self.moved_block_ids

    def note_registered(self, num_blocks: int, block_size: int) -> None:
        """Note how many leading blocks were offered to the prefix cache, or came from it."""
        self.num_registered = num_blocks
        self.register_at = (num_blocks + 1) * block_size

    def start_at(self, num_computed: int) -> None:
        """Its blocks hold the KV of the first `num_computed` tokens; all others that are known are its prefill."""
        self.prefill_end = self.sequence.num_known
        self.num_planned = self.num_computed = num_computed

    def fork_from(self, source: Sequence) -> None:
        """Begin only when the source's prefill is planned to its end."""
        self.forks_from = source

    def begin(self) -> None:
        """Note that the worker knows the row from the present plan on."""
        assert not self.is_begun, f"request {self.sequence.request_id} begins a row twice"
        self.is_begun = True
        self.forks_from = None

    def plan_prefill(self, num_tokens: int) -> None:
        """Note that a step computes the next tokens of its prefill."""
        self.num_planned += num_tokens
        self.num_in_flight += 1
        self.is_decoding = self.num_planned == self.prefill_end

    def plan_decodes(self, num_steps: int) -> None:
        """Note that `num_steps` steps compute a token each."""
        self.num_planned += num_steps
        self.num_in_flight += num_steps

    def plan_last_again(self) -> None:
        """Note that a step sampled nothing after the row's last token: that token is planned once more."""
        self.most_planned = max(self.most_planned, self.num_planned)
        self.num_planned -= 1

    def end_step(self) -> None:
        """Note that the result of a step which names the row has come."""
        self.num_in_flight -= 1

    def note_computed(self, num_tokens: int) -> None:
        """Note that the KV of the next tokens is computed."""
        self.num_computed += num_tokens

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


def plan_next_tokens(rows: Iterable[Row], may_decode: Callable[[Row], bool]) -> set[Row]:
    """Plan one token more of every row; the rows that are left out.

    A row that needs a closer look is planned if `may_decode` returns True. This loop runs over all rows in each step:
    calling a method of each row would cost more than the loop itself.
    """
    left_out: set[Row] = set()
    for row in rows:
        position = row.num_planned
        if position >= row.plan_closely_at and not may_decode(row):
            left_out.add(row)
            continue
        row.num_planned = position + 1
        row.num_in_flight += 1
    return left_out


def accept_next_tokens(
    rows: Iterable[Row],
    token_ids: Iterator[int | None],
    accepted: list[tuple[RequestId, int]],
    look_closely: Callable[[Row, int | None], None],
) -> None:
    """Accept one sampled token of every row, and append these tokens to `accepted`.

    A row that needs a closer look is left to `look_closely`: its token may end the completion, is None (the row has
    none), or comes with more than itself. Takes no more of `token_ids` than there are rows. This loop runs as often as
    the other.
    """
    for row, token_id in zip(rows, token_ids, strict=False):
        sequence = row.sequence
        num_computed = row.num_computed + 1
        if num_computed >= row.apply_closely_at or token_id is None or token_id in sequence.stop_token_ids:
            look_closely(row, token_id)
            continue
        row.num_in_flight -= 1
        row.num_computed = num_computed
        sequence.generated.append(token_id)
        accepted.append((sequence.request_id, token_id))


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
    # Chain over full blocks of known tokens, as far as needed; the prefix cache extends it.
    block_hashes: list[bytes] = field(default_factory=list)
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
        """Digest of its adapter, or the name of the set of its adapters; None for the base model."""
        return self.group.digest

    @property
    def num_known(self) -> int:
        """Tokens whose values are known: prompt and accepted ones."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are requested and not returned yet; its first token brings them."""
        return self.sampling.num_prompt_logprobs is not None and not self.generated

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of its prompt must be computed: what is returned of it is in no cached block."""
        pooling = self.request.pooling
        return self.awaits_prompt_logprobs or (pooling is not None and pooling.reads_all)

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

    def share_hashes(self, source: Sequence, num_blocks: int) -> None:
        """Begin with the block hashes of a sequence whose first `num_blocks` blocks hold the same tokens."""
        self.block_hashes = source.block_hashes[:num_blocks]

    def end(self) -> None:
        """The completion is complete, or its request over."""
        self.is_ended = True

    def cancel(self) -> None:
        """The client cancelled the completion."""
        self.is_cancelled = True

    def end_at_next_token(self) -> None:
        """Let the next token end the completion, and plan nothing beyond it."""
        self.max_generated = len(self.generated) + 1
        self.max_planned = self.num_known

    # ---- beams: their tokens are chosen here ----

    def append_chosen(self, token_id: int) -> None:
        """Go on with the token that the search chose, and no further."""
        self.generated.append(token_id)
        self.max_planned = self.num_known

    def follow(self, source: Sequence, token_id: int) -> None:
        """Become a beam with the source's tokens and one more."""
        self.generated = [*source.generated, token_id]
        self.max_planned = self.num_known

    def forget_beam(self) -> None:
        """The beam came to nothing."""
        self.generated, self.block_hashes, self.max_planned = [], [], 0

    # ---- host memory ----

    def add_host_block(self, host_block: int) -> None:
        """Append a block to its table in host memory."""
        self.host_block_ids.append(host_block)

    def take_host_blocks(self) -> list[int]:
        """Its table in host memory, which the sequence gives up."""
        host_blocks, self.host_block_ids = self.host_block_ids, []
        return host_blocks


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its sequences, by index."""

    request: Request
    order: tuple[float, int]  # (arrival_s, serial): total order of arrival
    cache_root: bytes  # first link of the block hash chain: (adapter or base, tenant, salt)
    activation_root: bytes | None = None  # of an activated LoRA: what the chain goes on with where it begins
    members: list[Sequence] = field(default_factory=list)  # one per completion, ended ones included
    state: GroupState = GroupState.WAITING
    is_paused: bool = False  # its reader is slow. It may keep its rows meanwhile; without any, its state is PAUSED
    is_ended: bool = False  # never to be scheduled again
    num_rows: int = 0  # members that hold a row, leaving ones included
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
    slot: SlotRef | None = None  # of its adapter, or the first of several, when a member took a row last
    adapter_ready_s: float | None = None  # when its adapters were loaded, as it was when a member first took a row
    _adapters_name: str | None = field(init=False)

    def __post_init__(self) -> None:
        self._adapters_name = self.request.adapters_name

    @property
    def digest(self) -> str | None:
        """Digest of its adapter, or the name of the set of its adapters; None for the base model."""
        return self._adapters_name

    def pause(self) -> None:
        """Its reader is slow."""
        self.is_paused = True

    def resume(self) -> None:
        """Its reader reads again."""
        self.is_paused = False

    def note_start(self, now_s: float, num_cached: int) -> bool:
        """Note that the group starts, with `num_cached` tokens. Returns whether it starts for the first time."""
        self.times_overtaken = 0
        if self.first_scheduled_s is not None:
            return False
        self.first_scheduled_s = now_s
        self.num_cached_tokens = min(num_cached, len(self.request.prompt_token_ids))
        return True

    def note_overtaken(self) -> None:
        """Another request started before it, because the adapter of the other costs the step less."""
        self.times_overtaken += 1

    def note_row_taken(self, slot: SlotRef | None, ready_s: float | None) -> None:
        """A member took a row, which leases this slot; the last of its adapters was loaded at `ready_s`."""
        self.num_rows += 1
        self.slot = slot
        if self.adapter_ready_s is None:
            self.adapter_ready_s = ready_s

    def note_row_left(self) -> None:
        """A member left its row. What the group computed in its rows is lost with the last of them."""
        self.num_rows -= 1
        if self.num_rows == 0:
            self.has_progressed = False
            self.beam_candidates.clear()

    def note_progress(self) -> None:
        """A member gained a token."""
        self.has_progressed = True

    def note_preemption(self) -> None:
        """The group is preempted."""
        self.num_preemptions += 1

    def note_preempted_for_room(self) -> None:
        """The group is preempted for a request that lacks room, which happens once."""
        self.was_preempted_for_room = True

    def end(self) -> None:
        """The request is over."""
        self.is_ended = True

    def dissolve(self) -> None:
        """Forget the members. They and the group name each other: the garbage collector would have to find them."""
        self.beam_sequences.clear()
        self.members.clear()

    # ---- log-probabilities of its prompt ----

    def add_prompt_logprobs(self, returned: Items[TokenLogprobs]) -> None:
        """Append those that a step returned."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = PromptLogprobs()
        self.prompt_logprobs.extend(returned)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """The log-probabilities that came so far, which the group gives up."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return logprobs

    # ---- beams ----

    def add_candidates(self, beam: Sequence, top: tuple[tuple[int, float], ...]) -> bool:
        """Note the next tokens that a beam may choose from; whether those of all beams have come."""
        self.beam_candidates[beam.index] = top
        return len(self.beam_candidates) == len(self.beam_sequences)

    def take_candidates(self) -> list[tuple[tuple[int, float], ...]]:
        """The next tokens of all beams, in the order of the beams; they are counted as searched."""
        candidates = [self.beam_candidates[sequence.index] for sequence in self.beam_sequences]
        self.beam_candidates.clear()
        self.num_searched += len(self.beam_sequences)
        return candidates

    def go_on_with(self, beam_sequences: list[Sequence]) -> None:
        """These sequences compute the beams from here on."""
        self.beam_sequences = beam_sequences

    # ---- what it is ----

    def output(self, token_ids: list[int], reason: FinishReason | None) -> RequestOutput:
        """What a member gained, or how the request ends, with the facts about the request."""
        return RequestOutput(
            self.request.request_id,
            token_ids,
            reason,
            self.num_cached_tokens,
            self.first_scheduled_s,
            self.slot,
            self.adapter_ready_s,
        )

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

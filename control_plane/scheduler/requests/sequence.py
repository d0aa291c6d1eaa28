"""One answer to a live request inside the scheduler: what is known, planned and computed of it, and what it holds.

What is true of the request as a whole is its group's (sequence_group.py). Only roster.py and the planner move a
sequence from one state to another.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from control_plane.scheduler.requests.sequence_group import SequenceGroup
from control_plane.scheduler.types import FinishReason, Request, RequestId, Sampling


class SequenceState(enum.Enum):
    """What a sequence holds."""

    IDLE = "idle"  # nothing: its group waits, or its answer ended
    FORKING = "forking"  # a row that the worker does not know, and blocks: begins once its source is computed
    RESERVED = "reserved"  # a row that the worker does not know, and one block, for a beam that may fork into it
    RUNNING = "running"  # a row; it may be planned
    DRAINING = "draining"  # a row; it is planned no more and leaves with the last unanswered plan that names it


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer and its progress.

    Token positions: [0, num_computed) answered, [num_computed, num_planned) in unanswered plans. While it decodes,
    the value of the last planned token may be unknown here; the worker feeds it back itself.
    """

    group: SequenceGroup
    index: int  # which of the request's answers
    request: Request  # the group's, at hand
    request_id: RequestId  # at hand for every token
    account: str  # the request's, at hand
    order: tuple[float, int]  # the group's, at hand
    max_generated: int  # generated tokens at which max_tokens or the context ends it
    max_planned: int  # tokens to compute in all: not the last that is sampled; of a stepwise one, those known
    stop_token_ids: frozenset[int]  # the request's, at hand for every token
    sampling: Sampling  # the request's, with this answer's own seed
    tells_logprobs: bool  # log-probabilities come with its tokens or its prompt
    tells_more: bool  # that, or an index other than 0: at hand for every token
    generated: list[int]  # accepted tokens
    state: SequenceState = SequenceState.IDLE
    is_stepwise: bool = False  # what it is fed after its prefill is chosen here, not on the worker
    is_given_up: bool = False  # nobody wants its answer: it only goes on until others forked from it
    is_ended: bool = False  # its answer is complete, or its request over
    block_hashes: list[bytes] = field(default_factory=list)  # chain over full blocks of known tokens, as far as needed

    host_block_ids: list[int] = field(default_factory=list)  # its table in host memory, while it is swapped out

    # While it holds a row (not IDLE); reset by `leave_row`.
    row: int = 0
    is_begun: bool = False  # the worker knows its row
    slot_idx: int | None = None  # leased adapter slot; None: no adapter
    block_ids: list[int] = field(default_factory=list)  # block table
    moved_block_ids: list[int] = field(default_factory=list)  # the table's beginning, moved to host memory by a plan
    forks_from: Sequence | None = None  # while FORKING: computes what it shares, in plans that come before
    copied_block: int | None = None  # held until the plan that copies it is answered
    prefill_end: int = 0  # known tokens when it took the row; it decodes from there
    num_planned: int = 0  # tokens whose KV is computed or in unanswered plans
    num_computed: int = 0  # tokens whose KV is computed by answered plans
    num_registered: int = 0  # leading blocks that were offered to the prefix cache
    register_at: int = 0  # computed tokens at which the next block is full
    num_in_flight: int = 0  # unanswered steps that name it
    is_decoding: bool = False  # its prefill is planned to the end
    # Tokens planned, and tokens answered, up to which it decodes on and there is nothing to look at; 0: look always.
    plan_closely_at: int = 0
    book_closely_at: int = 0

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
    def tells_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are asked for and still to come: with its first token."""
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
        """Append a sampled token; the reason if the answer ends with it."""
        self.generated.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if len(self.generated) >= self.max_generated:
            return FinishReason.LENGTH
        return None

    def look_closely(self) -> None:
        """Look at whatever is planned or answered of it."""
        self.plan_closely_at = self.book_closely_at = 0

    def plan_on(self, block_size: int) -> None:
        """It decodes: nothing is to be looked at until its table is full, or its last token planned."""
        self.plan_closely_at = min(len(self.block_ids) * block_size, self.max_planned - 1)

    def book_on(self) -> None:
        """It decodes: nothing is to be looked at until a block is full, or its longest length reached."""
        self.book_closely_at = 0 if self.tells_more else min(self.register_at, self.max_planned)

    def leave_row(self) -> None:
        """Forget everything that belonged to the row; blocks, row and lease must be given back by the caller."""
        self.row = 0
        self.slot_idx = None
        self.block_ids = []
        self.moved_block_ids = []
        self.prefill_end = self.num_planned = self.num_computed = self.num_registered = self.register_at = 0
        self.look_closely()
        self.is_decoding = self.is_begun = False
        self.forks_from = self.copied_block = None

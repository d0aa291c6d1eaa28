"""One live request inside the scheduler: what is true of it as a whole, and the sequences that compute it.

A request with one answer is a group of one. A group waits, is admitted, paused, preempted and ended as a whole; its
members hold the rows and blocks. Only roster.py moves a group from one state to another.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from control_plane.scheduler.logprobs import PromptLogprobs
from control_plane.scheduler.requests.beam_search import BeamSearcher
from control_plane.scheduler.types import Answer, Request

if TYPE_CHECKING:
    from control_plane.scheduler.requests.sequence import Sequence


class GroupState(enum.Enum):
    """Where a request is; each live one is in exactly one place."""

    WAITING = "waiting"  # in the waiting queue
    SWAPPED = "swapped"  # in the swapped queue: no rows, its blocks in host memory
    HELD = "held"  # no rows, and its reader is slow: out of the queue until it reads again
    RUNNING = "running"  # its members hold rows, and may be planned
    DRAINING = "draining"  # preempted or ended; some member is still named by an unanswered plan
    GONE = "gone"  # over, holds nothing


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its sequences, by index."""

    request: Request
    order: tuple[float, int]  # (arrival_s, serial): total order of arrival
    cache_root: bytes  # first link of the block hash chain: (adapter or base, tenant, salt)
    members: list[Sequence] = field(default_factory=list)  # one per sample, ended ones included
    state: GroupState = GroupState.WAITING
    is_paused: bool = False
    is_ended: bool = False  # never to be scheduled again
    num_rows: int = 0  # members that hold a row, draining ones included
    prompt_logprobs: PromptLogprobs | None = None  # told so far by the prefill that goes on
    searcher: BeamSearcher | None = None  # for beam search
    beam_sequences: list[Sequence] = field(default_factory=list)  # of the searcher's beams, in their order
    num_searched: int = 0  # tokens computed for beams, dropped ones included
    beam_candidates: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # by index: beams answered
    num_preemptions: int = 0
    has_given_way: bool = False  # it was preempted for a request that lacked room; backfill.py
    num_overtaken: int = 0  # requests that went before it, for their adapters cost the step less
    has_progressed: bool = False  # some member gained a token since the group took its rows
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    first_scheduled_s: float | None = None

    @property
    def digest(self) -> str | None:
        """Digest of its adapter, None for the base model."""
        adapter = self.request.adapter
        return None if adapter is None else adapter.digest

    def live_members(self) -> list[Sequence]:
        """Members whose answer has not ended; the first is the one that the others fork from.

        By index, but for beams: those of the search as it stands come first, in its order.
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
        answers = tuple(
            Answer(tuple(sequence.generated), sequence.is_ended or sequence.is_given_up) for sequence in self.members
        )
        return replace(self.request, answers=answers)

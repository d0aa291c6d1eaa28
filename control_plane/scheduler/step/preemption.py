"""Who gives way when blocks, rows or slots are short.

A request gives way as a whole. It keeps its tokens and gives its blocks back; whether these are computed once more or
come back from host memory is for swap_space.py to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.requests.sequence import Sequence
from control_plane.scheduler.requests.sequence_group import GroupState, SequenceGroup


def choose_victim(
    running: list[Sequence], needy: Sequence, counters: VirtualCounters | None = None
) -> SequenceGroup | None:
    """The request that gives blocks to `needy`, or None if it has to wait. `running` is in order of arrival.

    1. A paused one, the latest arrival first: nobody reads its tokens.
    2. Of those that arrived after `needy` and gained a token since they took their rows: one of the tenant that got
       most service by `counters`, there the least priority, there the latest arrival. So nobody is preempted twice
       without progress, and the oldest request always gets what it needs in the end: those that it may not preempt
       yet hold all blocks of their prefill and gain their token without taking another.
    """
    paused = choose_paused(running)
    if paused is not None:
        return paused
    victim: SequenceGroup | None = None
    victim_rank: tuple[float, int] | None = None
    for sequence in reversed(running):
        if sequence.order <= needy.order:
            break
        group = sequence.group
        if group.state is GroupState.RUNNING and group.has_progressed and group is not victim:
            if counters is None:
                return group
            rank = (counters.counter(group.request.account), -group.request.priority)
            if victim_rank is None or rank > victim_rank:
                victim, victim_rank = group, rank
    return victim


def choose_paused(running: Iterable[Sequence], *, has_adapter: bool = False) -> SequenceGroup | None:
    """The latest arrival whose reader is slow, or None; with `has_adapter` only one that leases a slot."""
    victim: SequenceGroup | None = None
    for sequence in running:
        group = sequence.group
        is_candidate = group.is_paused and group.state is GroupState.RUNNING
        if is_candidate and (sequence.slot_idx is not None or not has_adapter):
            victim = group
    return victim

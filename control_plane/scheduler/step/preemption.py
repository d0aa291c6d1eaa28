"""Which request is preempted when blocks, rows or slots are short.

A request is preempted as a whole. It keeps its tokens and gives its blocks back. swap_space.py decides whether they are
computed once more or come back from host memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.requests.sequence import Row, SequenceGroup
from control_plane.scheduler.requests.states import GroupState


def choose_victim(held: list[Row], needy: Row, counters: VirtualCounters | None = None) -> SequenceGroup | None:
    """The request that gives blocks to `needy`, or None if `needy` has to wait. `held` is in order of arrival.

    1. A paused request, the latest arrival first: its client does not read its tokens.
    2. Candidates are requests that arrived later than `needy` and gained a token since they took their rows. Of these,
       a request of the tenant that received most service by `counters`, then the lowest priority, then the latest
       arrival. So no request is preempted twice without progress, and the oldest request always gets what it needs in
       the end: requests that it may not preempt yet hold all blocks of their prefill, and gain their token without
       taking another block.
    """
    paused = choose_paused(held)
    if paused is not None:
        return paused
    victim: SequenceGroup | None = None
    victim_rank: tuple[float, int] | None = None
    needy_order = needy.sequence.group.order
    for row in reversed(held):
        group = row.sequence.group
        if group.order <= needy_order:
            break
        if group.state is GroupState.RUNNING and group.has_progressed and group is not victim:
            if counters is None:
                return group
            rank = (counters.counter(group.request.account), -group.request.priority)
            if victim_rank is None or rank > victim_rank:
                victim, victim_rank = group, rank
    return victim


def choose_paused(held: Iterable[Row], *, has_adapter: bool = False) -> SequenceGroup | None:
    """The latest arrival whose reader is slow, or None; with `has_adapter` only one that leases a slot."""
    victim: SequenceGroup | None = None
    for row in held:
        group = row.sequence.group
        is_candidate = group.is_paused and group.state is GroupState.RUNNING
        if is_candidate and (row.slot_idx is not None or not has_adapter):
            victim = group
    return victim

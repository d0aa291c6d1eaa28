"""Who gives way when blocks, rows or slots are short.

Preemption is by recompute: the victim keeps its tokens, gives its blocks back and waits again in its place by arrival.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.scheduler.sequence import Sequence, SequenceState


def choose_victim(running: list[Sequence], needy: Sequence) -> Sequence | None:
    """The sequence that gives blocks to `needy`, or None if it has to wait. `running` is in order of arrival.

    1. A paused one, the latest arrival first: nobody reads its tokens.
    2. The latest arrival after `needy` that gained a token since it took its row. So nobody is preempted twice without
       progress, and the oldest request always gets what it needs in the end: those that it may not preempt yet hold
       all blocks of their prefill and gain their token without taking another.
    """
    paused = choose_paused(running)
    if paused is not None:
        return paused
    for sequence in reversed(running):
        if sequence.order <= needy.order:
            return None
        if sequence.state is SequenceState.RUNNING and sequence.has_progressed:
            return sequence
    return None


def choose_paused(running: Iterable[Sequence], *, has_adapter: bool = False) -> Sequence | None:
    """The latest arrival whose reader is slow, or None; with `has_adapter` only one that leases a slot."""
    victim: Sequence | None = None
    for sequence in running:
        is_candidate = sequence.is_paused and sequence.state is SequenceState.RUNNING
        if is_candidate and (sequence.slot_idx is not None or not has_adapter):
            victim = sequence
    return victim

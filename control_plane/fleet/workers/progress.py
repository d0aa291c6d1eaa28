"""Notices a scheduler that has work and does not plan it: a mistake of ours, which would look like silence."""

from __future__ import annotations

from control_plane.scheduler.scheduler import Scheduler

# Far above the time between two ticks, and below the time in which a person or a probe gives up.
STALL_S = 5.0


class ProgressWatch:
    """Watches one scheduler."""

    def __init__(self) -> None:
        self._stuck_since_s: float | None = None

    def has_stalled(self, scheduler: Scheduler, now_s: float) -> bool:
        """Whether the scheduler has been stuck for STALL_S. To be called right after it planned all that it may."""
        if not scheduler.stats().is_stuck:
            self._stuck_since_s = None
            return False
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        return now_s - self._stuck_since_s >= STALL_S

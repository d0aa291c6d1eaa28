"""Notices a scheduler that has work which it could do, and does not: a mistake of ours that would look like silence."""

from __future__ import annotations

import logging

from control_plane.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Far above the time between two ticks, and below the time in which a person or a probe gives up.
STALL_S = 5.0


class ProgressWatch:
    """Looks at one scheduler, again and again."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.is_stalled = False
        self._worker_id = worker_id
        self._epoch = epoch
        self._stuck_since_s: float | None = None

    def look(self, scheduler: Scheduler, now_s: float) -> bool:
        """Judge the moment right after everything that may be planned was; True if `is_stalled` changed with it."""
        if not scheduler.is_stuck:
            self._stuck_since_s = None
            if self.is_stalled:
                self.is_stalled = False
                logger.info("worker goes on worker_id=%s epoch=%d", self._worker_id, self._epoch)
                return True
            return False
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if self.is_stalled or now_s - self._stuck_since_s < STALL_S:
            return False
        self.is_stalled = True
        logger.error(
            "worker stalled: requests wait, nothing is under way worker_id=%s epoch=%d %s",
            *(self._worker_id, self._epoch, scheduler.stats()),
        )
        return True

"""The log lines about a worker's sessions. A reason is logged once a minute, although the worker attaches every second.

Called by plan_client.py, in one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from contract.process_log import shown
from data_plane.stream.plan_stream import Ended

logger = logging.getLogger(__name__)

# A control plane that went away is logged at WARNING only after this time: it may be restarting, or the whole system
# may be stopping.
AWAY_S = 5.0
REPEAT_S = 60.0  # the same reason is logged again after this time


class SessionLog:
    """The log lines of one worker."""

    def __init__(self, worker_id: str, control_plane: str, clock: Callable[[], float]) -> None:
        self._worker_id = worker_id
        self._control_plane = control_plane  # HOST:PORT
        self._clock = clock
        self._gone_s: float | None = None  # when the control plane of the last session went away; None: it did not
        self._warned_s: dict[str, float] = {}  # by reason: when it was last logged at WARNING

    def attached(self, epoch: int) -> None:
        """A session began."""
        is_known = bool(self._warned_s)  # the log said that there was no control plane
        self._gone_s = None
        self._warned_s.clear()
        logger.info(
            "attached worker_id=%s epoch=%d",
            self._worker_id,
            epoch,
            extra=shown(f"attached to {self._control_plane}") if is_known else None,
        )

    def session_ended(self, ended: Ended) -> None:
        """A session ended, and the worker will try to attach again."""
        if ended.code is grpc.StatusCode.UNAVAILABLE:
            self._gone_s = self._clock()
            logger.info("session ended worker_id=%s: %s", self._worker_id, ended.reason)
        else:
            logger.warning("session ended worker_id=%s: %s", self._worker_id, ended.reason)

    def not_attached(self, ended: Ended) -> None:
        """An attempt to attach failed, and the worker will try again."""
        now_s = self._clock()
        is_gone = ended.is_unreachable and self._gone_s is not None and now_s - self._gone_s < AWAY_S
        reason = "unreachable" if ended.is_unreachable else ended.reason
        last_s = self._warned_s.get(reason)
        is_due = not is_gone and (last_s is None or now_s - last_s >= REPEAT_S)
        if is_due:
            self._warned_s[reason] = now_s
        what = f"no control plane at {self._control_plane}" if ended.is_unreachable else "not attached"
        logger.log(
            logging.WARNING if is_due else logging.DEBUG,
            "%s worker_id=%s: %s; trying again every second",
            what,
            self._worker_id,
            ended.reason,
        )

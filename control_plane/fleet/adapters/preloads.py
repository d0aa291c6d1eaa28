"""Loads adapters into slots before requests need them, and knows when that is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from control_plane.fleet.workers.session import WorkerSession
from control_plane.fleet.workers.sessions import SessionTable
from control_plane.scheduler.types import AdapterRef

logger = logging.getLogger(__name__)

# A worker without room loads nothing: the adapter waits there for a slot as one of a request would, but not for ever.
PRELOAD_TIMEOUT_S = 5.0


class AdapterPreloads:
    """Preloads under way. Only reads `sessions`."""

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions.taking
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}  # until when each waits
        self._is_check_due = False

    def choose_workers(self, previous_digest: str) -> list[WorkerSession]:
        """Where a version that follows another belongs: the workers that have that one in a slot.

        If none has it, the worker with the fewest requests.
        """
        sessions = [self._sessions[worker_id] for worker_id in sorted(self._sessions)]
        holders = [session for session in sessions if session.scheduler.adapter_use(previous_digest).is_ready]
        return holders or sorted(sessions, key=lambda session: len(session.scheduler.request_ids))[:1]

    async def preload(
        self, ref: AdapterRef, account: str, sessions: Sequence[WorkerSession], *, timeout_s: float = PRELOAD_TIMEOUT_S
    ) -> list[str]:
        """Have the adapter loaded on these workers; the ids of those that have it when all loads have ended.

        The loads count for the account. A load that fails, or that finds no room in time, is left out.
        """

        def is_over() -> bool:
            # A session that ended loads nothing any more.
            return not any(
                not session.ended.is_set() and session.scheduler.preloads.is_open(ref.digest) for session in sessions
            )

        for session in sessions:
            session.preload(ref, account)
        if not is_over():
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[done] = is_over
            try:
                async with asyncio.timeout(timeout_s):
                    await done
            except TimeoutError:
                logger.warning("adapter not preloaded in time digest=%s timeout_s=%g", ref.digest, timeout_s)
            finally:
                del self._waiting[done]
                for session in sessions:
                    session.end_preload(ref.digest)
        return [
            session.worker_id
            for session in sessions
            if not session.ended.is_set() and session.scheduler.adapter_use(ref.digest).is_ready
        ]

    def check_soon(self) -> None:
        """Look again after this turn of the event loop: a session or a slot changed."""
        if self._waiting and not self._is_check_due:
            self._is_check_due = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        self._is_check_due = False
        for done, is_over in list(self._waiting.items()):
            if not done.done() and is_over():
                done.set_result(None)

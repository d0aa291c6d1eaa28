"""Unloads adapters from every worker, and knows when an adapter is gone."""

from __future__ import annotations

import asyncio

from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.workers.sessions import SessionTable


class AdapterUnloads:
    """Digests that are being unloaded. Only reads `sessions` and `jobs`."""

    def __init__(self, sessions: SessionTable, jobs: UnfinishedJobs) -> None:
        self._sessions = sessions.by_id
        self._jobs = jobs.by_id
        self._gone: dict[str, asyncio.Event] = {}  # digest -> set when no request uses it and no worker has it
        self._is_check_due = False
        jobs.call_when_over(lambda _job: self.check_soon())

    async def unload(self, digest: str) -> None:
        """Unload the adapter. Returns once no request uses it and no worker has it, or once `cancel_unload` was called.

        Several callers may wait for one digest.
        """
        gone = self._gone.setdefault(digest, asyncio.Event())
        self._check()
        await gone.wait()

    def cancel_unload(self, digest: str) -> None:
        """Cancel the unload and wake its waiters: another name uses the digest. Workers without it load it again."""
        if digest in self._gone:
            self._gone.pop(digest).set()

    def has_requests(self, digest: str) -> bool:
        """Whether an unfinished request uses the adapter."""
        return any(ref.digest == digest for job in self._jobs.values() for ref in job.request.adapters)

    def check_soon(self) -> None:
        """Look again after this turn of the event loop: a request, session or slot ended."""
        if self._gone and not self._is_check_due:
            self._is_check_due = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        self._is_check_due = False
        for digest in list(self._gone):
            for session in self._sessions.values():
                session.purge_digest(digest)
            if not self._is_used(digest):
                self._gone.pop(digest).set()

    def _is_used(self, digest: str) -> bool:
        # Sessions first: one look-up each, and enough as long as a request runs or waits on one of them.
        is_held = any(session.scheduler.adapter_use(digest).is_held for session in self._sessions.values())
        return is_held or self.has_requests(digest)

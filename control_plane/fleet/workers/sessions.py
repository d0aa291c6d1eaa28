"""The sessions of the attached workers."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.fleet.workers.session import WorkerSession


class SessionTable:
    """Sessions by worker id. attach.py opens and closes them; the other parts read the table."""

    def __init__(self) -> None:
        self._by_id: dict[str, WorkerSession] = {}
        self.by_id: Mapping[str, WorkerSession] = self._by_id

    def open(self, session: WorkerSession) -> None:
        """Add a session. It replaces the one that its worker had before."""
        self._by_id[session.worker_id] = session

    def close(self, session: WorkerSession) -> None:
        """Remove a session that has ended. Does nothing if its worker has another one already."""
        if self._by_id.get(session.worker_id) is session:
            del self._by_id[session.worker_id]

"""The sessions of the attached workers, and which workers are drained."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.fleet.workers.session import WorkerSession


class SessionTable:
    """Sessions by worker id. attach.py opens and closes them, drains.py drains workers; others read."""

    def __init__(self) -> None:
        self._by_id: dict[str, WorkerSession] = {}
        self._taking: dict[str, WorkerSession] = {}
        self._drained: set[str] = set()
        self.by_id: Mapping[str, WorkerSession] = self._by_id  # every one
        self.taking: Mapping[str, WorkerSession] = self._taking  # of workers that take requests: those not drained

    @property
    def drained_ids(self) -> list[str]:
        """Ids of drained workers, attached or not, in order."""
        return sorted(self._drained)

    def open(self, session: WorkerSession) -> None:
        """Add a session. It replaces the one that its worker had before."""
        self._by_id[session.worker_id] = session
        if session.worker_id not in self._drained:
            self._taking[session.worker_id] = session

    def close(self, session: WorkerSession) -> None:
        """Remove a session that has ended. Does nothing if its worker has another one already."""
        if self._by_id.get(session.worker_id) is session:
            del self._by_id[session.worker_id]
            self._taking.pop(session.worker_id, None)

    def drain(self, worker_id: str) -> None:
        """Give the worker no requests any more, in this session and later ones."""
        self._drained.add(worker_id)
        self._taking.pop(worker_id, None)

    def undrain(self, worker_id: str) -> None:
        """Give the worker requests again."""
        self._drained.discard(worker_id)
        if (session := self._by_id.get(worker_id)) is not None:
            self._taking[worker_id] = session

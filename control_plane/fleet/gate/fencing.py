"""Decides whether a worker may attach, and with which epoch: its Hello, its quarantine, and which session is newer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set
from typing import Protocol

from contract.v1 import plan_pb2
from control_plane.errors import StaleControlPlane, WorkerIdTaken
from control_plane.fleet.gate.hello import BaseModelLike, check_hello
from control_plane.fleet.gate.quarantine import Quarantine
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.workers.session import WorkerSession


class SessionLike(Protocol):
    """A session that is attached under the same worker id."""

    epoch: int


class WorkerGate:
    """Admits workers and hands out epochs."""

    def __init__(
        self, settings: FleetSettings, base_model: BaseModelLike, incarnation: int, clock: Callable[[], float]
    ) -> None:
        """`incarnation`: of the control plane; it counts up at every start."""
        self.quarantine = Quarantine(settings, clock)
        self._base_model = base_model
        self._incarnation = incarnation
        self._session_ids = itertools.count(1)

    def admit(self, hello: plan_pb2.Hello, former: SessionLike | None) -> int:
        """The epoch of the worker's new session; `former` is attached under its id.

        Raises InvalidRequest, BaseModelMismatch, WorkerQuarantined, WorkerIdTaken or StaleControlPlane.
        """
        check_hello(hello, self._base_model)
        if hello.last_epoch:
            self.quarantine.outlived(hello.worker_id, hello.last_epoch)
        self.quarantine.check(hello.worker_id)
        epoch = (self._incarnation << 32) | next(self._session_ids)
        check_epochs(hello, epoch, former)
        return epoch

    def note_end(self, session: WorkerSession, explained: Set[int], *, is_requests_fault: bool) -> None:
        """Count the end of a session against its worker, unless requests are the reason.

        `explained`: epochs of sessions whose ends a request explains; they no longer count either.
        """
        self.quarantine.discount(explained)
        if not is_requests_fault:
            assert session.end_cause is not None, "a session without a cause has not ended"
            self.quarantine.note_end(
                session.worker_id,
                session.epoch,
                session.end_cause,
                session.end_reason,
                num_steps=session.steps.num_steps,
                lasted_s=session.lasted_s,
            )


def check_epochs(hello: plan_pb2.Hello, epoch: int, former: SessionLike | None) -> None:
    """Raise MotetError if the worker may not have a session of this epoch.

    A worker whose last session is `former` is the same process again, and replaces that session. Any other process
    waits until `former` has ended. Otherwise two workers with one id would replace each other for ever.
    """
    if former is not None and hello.last_epoch != former.epoch:
        raise WorkerIdTaken(
            f"a worker with the id {hello.worker_id} is attached and alive; wait until it is gone, or start this "
            "worker with another --worker-id"
        )
    if hello.last_epoch >= epoch:
        raise StaleControlPlane(
            f"worker {hello.worker_id} served epoch {hello.last_epoch}, and this control plane is at epoch {epoch}: it "
            "is an older one, or its store was replaced; to use this control plane, restart the worker"
        )

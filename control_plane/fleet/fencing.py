"""Which session of a worker counts, where there could be two: told from the epoch that the worker served last."""

from __future__ import annotations

from typing import Protocol

from motet.v1 import plan_pb2

from control_plane.errors import StaleControlPlane, WorkerIdTaken


class SessionLike(Protocol):
    """A session that is attached under the same worker id."""

    epoch: int


def check_epochs(hello: plan_pb2.Hello, epoch: int, former: SessionLike | None) -> None:
    """Raise MotetError if the worker may not have a session of this epoch.

    A worker whose last session is `former` is that process once more, and takes its place. Any other process waits
    until `former` is over: two workers of one id would else take the place from each other for ever.
    """
    if former is not None and hello.last_epoch != former.epoch:
        raise WorkerIdTaken(
            f"a worker is attached as {hello.worker_id} and alive; this one may attach once that is gone, or under a "
            "--worker-id of its own"
        )
    if hello.last_epoch >= epoch:
        raise StaleControlPlane(
            f"worker {hello.worker_id} served epoch {hello.last_epoch}, and this control plane is at epoch {epoch}: it "
            "is an older one, or its store was replaced; restart the worker if it shall follow"
        )

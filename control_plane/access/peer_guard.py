"""Refuses calls of peers whose certificate has expired or is on the deny list.

Calls that run are ended when the certificate of their peer is added to the list. Its expiry ends none: it is looked at
when a call begins.

Needs the package cryptography. server.py imports it only where clients present certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio

from control_plane.access.name_lists import DenyList
from control_plane.access.peer_certificate import PeerCertificate, certificate_of
from control_plane.access.principal import Principal
from control_plane.access.watched_files import WatchedFiles
from control_plane.access.worker_access import WorkerAccess
from control_plane.errors import PermissionDenied, Unauthenticated

Context = grpc.aio.ServicerContext[Any, Any]


class ClientGuard:
    """Guards the clients' port. Make it inside the event loop."""

    def __init__(self, denied: WatchedFiles[DenyList] | None, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._denied = denied
        self._wall_clock = wall_clock
        self._running: dict[asyncio.Task[Any], PeerCertificate] = {}
        self._ended: set[asyncio.Task[Any]] = set()  # by `_end_denied`, which cancelled them
        self._loop = asyncio.get_running_loop()
        if denied is not None:
            denied.on_change(self._on_change)

    @contextlib.contextmanager
    def __call__(self, context: Context) -> Iterator[None]:
        """Around the handling of one call. Raises Unauthenticated or PermissionDenied, at once or when it is so."""
        certificate = certificate_of(context.auth_context())
        if certificate is None:  # TLS demands one where clients have to present one
            yield
            return
        if certificate.not_after_s <= self._wall_clock():
            expired = Unauthenticated("the client's certificate has expired; connect with a new one")
            raise expired.of(Principal(certificate.holder))
        self._refuse_denied(certificate)
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        self._running[task] = certificate
        try:
            yield
        except asyncio.CancelledError:
            if task in self._ended and task.uncancel() == 0:  # else it was cancelled for another reason, too
                self._refuse_denied(certificate)
            raise
        finally:
            del self._running[task]
            self._ended.discard(task)

    def _refuse_denied(self, certificate: PeerCertificate) -> None:
        if self._is_denied(certificate):
            refused = PermissionDenied("the client's certificate is refused by the operator of this server")
            raise refused.of(Principal(certificate.holder))

    def _is_denied(self, certificate: PeerCertificate) -> bool:
        return self._denied is not None and self._denied.value.names_any_of(certificate)

    def _on_change(self, _denied: DenyList) -> None:  # in the thread that watches the file
        self._loop.call_soon_threadsafe(self._end_denied)

    def _end_denied(self) -> None:
        for task, certificate in list(self._running.items()):
            if task not in self._ended and self._is_denied(certificate):
                self._ended.add(task)
                task.cancel()


def worker_guard(access: WorkerAccess) -> Callable[[Context], contextlib.AbstractContextManager[None]]:
    """Guards the workers' port: only workers may call. The worker service checks which worker it is."""

    @contextlib.contextmanager
    def guard(context: Context) -> Iterator[None]:
        access.credential(context.auth_context())
        yield

    return guard

"""TLS of every port as the settings say: credentials to listen with, and who is refused in spite of a certificate.

Whatever needs the package cryptography is imported where TLS is set up: a server without TLS does without the package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from control_plane.access.settings import AccessSettings
from control_plane.access.watched_files import FileWatcher, WatchedFiles

if TYPE_CHECKING:
    from control_plane.access.name_lists import DenyList
    from control_plane.access.worker_access import WorkerAccess

Guard = Callable[[grpc.aio.ServicerContext[Any, Any]], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Transport:
    """What the ports need for TLS. None: the port has none of it."""

    client_credentials: grpc.ServerCredentials | None = None
    client_guard: Guard | None = None  # around every call of the clients' port
    worker_credentials: grpc.ServerCredentials | None = None
    worker_guard: Guard | None = None  # around every call of the workers' port
    worker_access: WorkerAccess | None = None  # set if workers present certificates
    scaler_credentials: grpc.ServerCredentials | None = None
    scaler_guard: Guard | None = None  # around every call of the autoscaler's port


def open_transport(settings: AccessSettings, watcher: FileWatcher, *, has_scaler: bool = False) -> Transport:
    """Read all files and have them watched. Call it in the event loop. `has_scaler`: there is an autoscaler's port.

    Raises ValueError, whose text begins with the flag.
    """
    if settings.tls_cert is None and settings.worker_tls_cert is None:
        return Transport()
    flag = "--worker-tls-cert" if settings.tls_cert is None else "--tls-cert"
    try:
        from control_plane.access.name_lists import parse_deny_list
        from control_plane.access.peer_guard import ClientGuard, worker_guard
    except ModuleNotFoundError as error:
        raise ValueError(f"{flag}: TLS needs the Python package {error.name}; install it") from error
    denied = None
    if settings.tls_deny is not None:
        with _flagged("--tls-deny"):
            denied = watcher.add(
                WatchedFiles([settings.tls_deny], parse_deny_list, what="list of refused certificates")
            )
    access = _worker_access(settings, denied, watcher)
    return Transport(
        client_credentials=_credentials(
            "--tls-cert", settings.tls_cert, settings.tls_key, settings.tls_client_ca, "clients'", watcher
        ),
        client_guard=None if settings.tls_client_ca is None else ClientGuard(denied),
        worker_credentials=_credentials(
            "--worker-tls-cert",
            settings.worker_tls_cert,
            settings.worker_tls_key,
            settings.worker_tls_client_ca,
            "workers'",
            watcher,
        ),
        worker_guard=None if access is None else worker_guard(access),
        worker_access=access,
        scaler_credentials=_credentials(
            *("--tls-cert", settings.tls_cert, settings.tls_key, settings.scaler_tls_client_ca, "scaler's", watcher)
        )
        if has_scaler
        else None,
        scaler_guard=None if settings.scaler_tls_client_ca is None else ClientGuard(denied),
    )


def _worker_access(
    settings: AccessSettings, denied: WatchedFiles[DenyList] | None, watcher: FileWatcher
) -> WorkerAccess | None:
    from control_plane.access.name_lists import parse_worker_list
    from control_plane.access.worker_access import WorkerAccess

    if settings.worker_tls_client_ca is None:
        return None
    if settings.worker_allow is None:
        return WorkerAccess(denied=denied)
    with _flagged("--worker-allow"):
        allowed = watcher.add(WatchedFiles([settings.worker_allow], parse_worker_list, what="list of workers"))
    return WorkerAccess(allowed=allowed, denied=denied)


def _credentials(
    flag: str, cert: Path | None, key: Path | None, client_ca: Path | None, port: str, watcher: FileWatcher
) -> grpc.ServerCredentials | None:
    from control_plane.access import server_certificates

    if cert is None or key is None:
        return None
    with _flagged(flag):
        files = server_certificates.watch(cert, key, client_ca, port=port)
    return server_certificates.credentials(watcher.add(files))


@contextlib.contextmanager
def _flagged(flag: str) -> Iterator[None]:
    """Turn what goes wrong in the block into a ValueError whose text begins with the flag."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag}: {error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error

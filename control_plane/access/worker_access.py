"""Decides whether the peer of a call on the workers' port is the worker that it says it is, and may be here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from contract.process_log import printable
from control_plane.access.name_lists import DenyList, worker_ids_of
from control_plane.access.peer_certificate import PeerCertificate, certificate_of
from control_plane.access.principal import Principal
from control_plane.access.watched_files import WatchedFiles
from control_plane.errors import PermissionDenied, Unauthenticated

AuthContext = Mapping[str, Iterable[bytes]]


class WorkerAccess:
    """The rules of the workers' port where workers present certificates."""

    def __init__(
        self,
        *,
        allowed: WatchedFiles[frozenset[str]] | None = None,
        denied: WatchedFiles[DenyList] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`allowed`: ids of the workers that may attach; None: all."""
        self._allowed = allowed
        self._denied = denied
        self._wall_clock = wall_clock

    def credential(self, auth_context: AuthContext | None) -> WorkerCredential:
        """What the connection of a call proves. Raises Unauthenticated or PermissionDenied if no worker may use it."""
        certificate = certificate_of(auth_context)
        if certificate is None:
            raise Unauthenticated("this port needs a certificate; start the worker with --control-plane-tls-cert")
        credential = WorkerCredential(self, certificate)
        reasons = [credential.refusal(worker_id) for worker_id in sorted(worker_ids_of(certificate))]
        if not reasons:
            raise PermissionDenied(
                f"the certificate names no worker; it has {certificate}, and needs the DNS name ID or the URI "
                "spiffe://TRUST/motet/worker/ID"
            ).of(Principal(certificate.holder))
        if None not in reasons:
            raise PermissionDenied(reasons[0] or "").of(Principal(certificate.holder))
        return credential

    def refusal(self, certificate: PeerCertificate, worker_id: str) -> str | None:
        """Why the owner of the certificate may not be this worker at present; None if it may."""
        if certificate.not_after_s <= self._wall_clock():
            until = datetime.fromtimestamp(certificate.not_after_s, UTC)
            return f"the worker's certificate has expired: it was valid until {until:%Y-%m-%d %H:%M} UTC"
        if worker_id not in worker_ids_of(certificate):
            worker_id = printable(worker_id, 63)  # a worker may claim anything, of any length
            return (
                f"the certificate is not that of worker {worker_id}: it has {certificate}; give the worker a "
                f"certificate with the DNS name {worker_id} or the URI spiffe://TRUST/motet/worker/{worker_id}"
            )
        if self._denied is not None and self._denied.value.names_any_of(certificate):
            return f"worker {worker_id} or its certificate is on the list of --tls-deny"
        if self._allowed is not None and worker_id not in self._allowed.value:
            return f"worker {worker_id} is not on the list of --worker-allow; the operator has to add it"
        return None


@dataclass(frozen=True, slots=True)
class WorkerCredential:
    """A verified certificate on the workers' port. What it allows may change while a session lasts."""

    access: WorkerAccess
    certificate: PeerCertificate

    def refusal(self, worker_id: str) -> str | None:
        """Why its owner may not be this worker at present; None if it may."""
        return self.access.refusal(self.certificate, worker_id)

    def require(self, worker_id: str) -> None:
        """Raise PermissionDenied unless its owner may be this worker at present."""
        if (reason := self.refusal(worker_id)) is not None:
            raise PermissionDenied(reason).of(Principal(self.certificate.holder))

"""WorkerService: joins the plan stream's gRPC calls to the fleet's sessions, and sends packed adapters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import grpc

from contract.process_log import printable
from contract.settings.addresses import is_loopback
from contract.v1 import plan_pb2, plan_pb2_grpc
from control_plane.access.principal import Principal
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import acting_as, current_caller
from control_plane.checks import check_digest, require
from control_plane.errors import MotetError, Unavailable
from control_plane.fleet.fleet import Fleet
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.session import WorkerSession

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
PIECE_BYTES = 1 << 20

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it

_AttachContext = grpc.aio.ServicerContext[plan_pb2.AttachRequest, plan_pb2.AttachResponse]
_FetchContext = grpc.aio.ServicerContext[plan_pb2.FetchAdapterRequest, plan_pb2.FetchAdapterResponse]


class PackedAdapterLike(Protocol):
    """One adapter's packed bytes."""

    @property
    def manifest(self) -> bytes:
        """Canonical JSON; its SHA-256 is the digest."""

    @property
    def paths(self) -> Sequence[Path]:
        """The chunks' files, which may be gone at any moment. Empty: it lies in none of this process."""

    def parts(self) -> AsyncIterator[bytes]:
        """The bytes of the chunks in the manifest's order, in parts that cross no chunk."""


class WeightsSourceLike(Protocol):
    """Where packed adapters come from."""

    async def open_packed(self, digest: str) -> PackedAdapterLike:
        """The adapter, from whichever tier has it. Raises MotetError."""


class CredentialLike(Protocol):
    """What the connection of a call proves."""

    def refusal(self, worker_id: str) -> str | None:
        """Why the other end may not be this worker at present; None if it may."""

    def require(self, worker_id: str) -> None:
        """Raise PermissionDenied if it may not be this worker at present."""


class WorkerAccessLike(Protocol):
    """Knows which worker is at the other end of a connection."""

    def credential(self, auth_context: Mapping[str, Iterable[bytes]] | None) -> CredentialLike:
        """What a connection proves, from gRPC's auth context. Raises MotetError if it is no worker's."""


class _Believed:
    """The credential of a port where workers present no certificates."""

    def refusal(self, _worker_id: str) -> str | None:
        return None

    def require(self, _worker_id: str) -> None:
        return None


class WorkerService(plan_pb2_grpc.WorkerServiceServicer):
    """The servicer of the worker port."""

    def __init__(
        self,
        fleet: Fleet,
        weights: WeightsSourceLike,
        access: WorkerAccessLike | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """Without `access` a worker's id is believed. `audit` has a line for each worker that is refused."""
        self._audit = audit or AuditLog()
        self._fleet = fleet
        self._weights = weights
        self._access = access

    async def Attach(self, _requests: object, context: _AttachContext) -> None:  # noqa: N802 - the RPC's name
        """One session, from the worker's Hello to the end of either side."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_TIMEOUT_S:g} s")
        if first is _EOF or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        # Not together with the first write: if that is cancelled, gRPC would send the metadata again with the status,
        # fail, and leave the worker without an end of its stream.
        await context.send_initial_metadata(())
        try:
            session = self._attached(first.hello, context)
        except MotetError as error:
            worker_id = printable(first.hello.worker_id, 63)
            logger.warning("worker refused worker_id=%s: %s", worker_id, error)
            self._audit.event(actions.ATTACH, f"workers/{worker_id}", caller=current_caller(), error=error)
            raise
        tasks = [
            asyncio.create_task(self._read(session, context)),
            asyncio.create_task(self._write(session, context)),
        ]
        try:
            await session.ended.wait()
        finally:
            # 1. The session ended: the stream follows. 2. The stream broke or the server stops: the session follows.
            session.end(EndCause.LOST, "the stream was cut")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert session.end_cause is not None, "a session ended without a cause"
        if session.end_cause.code is not None:
            await context.abort(session.end_cause.code, session.end_reason)

    def _attached(self, hello: plan_pb2.Hello, context: _AttachContext) -> WorkerSession:
        credential, worker_id = self._credential(context), hello.worker_id
        credential.require(worker_id)
        caller = current_caller()
        if self._access is not None:
            caller = replace(caller, tenant="", principal=Principal(f"cert:{worker_id}"))
        with acting_as(caller):
            return self._fleet.attach(hello, lambda: credential.refusal(worker_id))

    def _credential(self, context: grpc.aio.ServicerContext[Any, Any]) -> CredentialLike:
        return _Believed() if self._access is None else self._access.credential(context.auth_context())

    async def _read(self, session: WorkerSession, context: _AttachContext) -> None:
        try:
            while (message := await context.read()) is not _EOF:
                session.receive(message)
            # A worker that leaves says so first. If its process dies, gRPC ends this loop and cancels the handler,
            # in either order: both count as a loss.
            session.end(EndCause.LOST, "the stream ended without a leave message from the worker")
        except Exception as error:  # whatever gRPC raises for a broken stream
            session.end(EndCause.LOST, f"the stream broke: {type(error).__name__}")

    async def _write(self, session: WorkerSession, context: _AttachContext) -> None:
        try:
            while messages := await session.outbox.wait():
                for message in messages:
                    await context.write(message)
        except Exception as error:  # as above
            session.end(EndCause.LOST, f"the stream broke: {type(error).__name__}")

    async def FetchAdapter(  # noqa: N802 - the RPC's name
        self, request: plan_pb2.FetchAdapterRequest, context: _FetchContext
    ) -> AsyncIterator[plan_pb2.FetchAdapterResponse]:
        """The manifest, then the chunks in pieces, or where their files are."""
        require(check_digest, request.digest, "digest")
        credential = self._credential(context)
        worker_id = printable(request.worker_id, 63)
        try:
            credential.require(request.worker_id)
            packed = await self._weights.open_packed(request.digest)
            yield plan_pb2.FetchAdapterResponse(manifest=packed.manifest)
            if request.reads_files and packed.paths and _is_on_this_machine(context.peer()):
                yield plan_pb2.FetchAdapterResponse(files=plan_pb2.AdapterFiles(paths=map(str, packed.paths)))
                return
            async for part in packed.parts():
                credential.require(request.worker_id)
                for start in range(0, len(part), PIECE_BYTES):
                    yield plan_pb2.FetchAdapterResponse(data=part[start : start + PIECE_BYTES])
        except MotetError as error:
            logger.warning("adapter not served worker_id=%s digest=%s: %s", worker_id, request.digest, error)
            raise
        except OSError as error:  # the store's own error text stays in the log
            logger.exception("adapter not served worker_id=%s digest=%s", worker_id, request.digest)
            raise Unavailable(f"the adapter cannot be read: {type(error).__name__}") from error


def _is_on_this_machine(peer: str) -> bool:
    """Whether the other end of a connection is on this machine. `peer` is gRPC's name for it: `ipv4:127.0.0.1:5005`."""
    kind, _, address = peer.partition(":")
    return kind == "unix" or (kind in ("ipv4", "ipv6") and is_loopback(unquote(address)))

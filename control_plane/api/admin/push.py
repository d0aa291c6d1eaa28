"""PushService: versions from the memory of a training run. Receives, and calls the part that registers them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import grpc.aio
from motet.v1 import push_pb2, push_pb2_grpc

from control_plane.adapters.kept_files import check_files_from
from control_plane.adapters.life_cycle import Registration
from control_plane.adapters.pushes import Pushed, Pushes
from control_plane.api import wire
from control_plane.api.admin.adapters import check_whole
from control_plane.api.admin.disk_space import Reservation
from control_plane.api.admin.ownership import change_of, check_ownership
from control_plane.api.admin.upload import MAX_CHUNK_BYTES, Accepted, UploadReceiver
from control_plane.api.gate import ShutdownGate
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import current_caller
from control_plane.checks import Violations, check_adapter_id, refuse
from control_plane.errors import Exhausted
from control_plane.registry.companions.inherited import NOT_INHERITED, Inherited
from control_plane.registry.peft.ingest import CONFIG_FILE, WEIGHTS_FILE
from control_plane.registry.versions.rollout import VersionRollout
from control_plane.signatures.bundle import MAX_SIGNATURE_BYTES
from control_plane.signatures.verifier import SIGNATURE_FILE

SERVICE_NAME = push_pb2.DESCRIPTOR.services_by_name["PushService"].full_name
MAX_CONFIG_BYTES = 2**20
WRITE_BYTES = 2 * 2**20  # one batch is written while the next one comes
Context = grpc.aio.ServicerContext[Any, Any]


class PushService(push_pb2_grpc.PushServiceServicer):
    """See protos/motet/v1/push.proto."""

    def __init__(
        self,
        *,
        pushes: Pushes,
        gate: ShutdownGate,
        uploads: UploadReceiver,
        max_adapter_bytes: int,
        audit: AuditLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`uploads`: those of AdapterService; pushes and uploads share one limit."""
        self._pushes = pushes
        self._gate = gate
        self._uploads = uploads
        self._max_adapter_bytes = max_adapter_bytes
        self._audit = audit or AuditLog()
        self._clock = clock

    # ruff: noqa: N802 - the stubs name the methods

    async def PushVersion(
        self, request_iterator: AsyncIterator[push_pb2.PushVersionRequest], context: Context
    ) -> push_pb2.PushVersionResponse:
        """Receive, check, register."""
        self._gate.check()
        async with (
            self._audit.change(actions.PUSH) as change,
            self._uploads.accept(request_iterator, current_caller().holder, self._checked_size) as accepted,
        ):
            begun_s = self._clock()
            header: push_pb2.PushHeader = accepted.header
            change.resource = f"adapters/{header.adapter_id}"
            registration = Registration(
                adapter_id=header.adapter_id,
                ownership=change_of(header),
                rollout=VersionRollout(is_held=header.hold),
                validate_only=header.validate_only,
            )
            self._pushes.check_registrable(registration)  # before the bytes are received
            names = (CONFIG_FILE, WEIGHTS_FILE, *((SIGNATURE_FILE,) if header.signature else ()))
            files = {name: accepted.directory / name for name in names}
            inherited = await self._kept_files(header)
            await receive_all(accepted, files)
            receive_s = self._clock() - begun_s
            await check_whole(context)
            pushed = await self._pushes.push(registration, files, inherited)
            change.digest = pushed.registered.digest
            return response_to(pushed, receive_s)

    async def _kept_files(self, header: push_pb2.PushHeader) -> Inherited:
        if header.without_files:
            return NOT_INHERITED
        return await self._pushes.kept_files(header.adapter_id, header.files_from)

    def _checked_size(self, header: push_pb2.PushHeader) -> int:
        violations = Violations()
        check_adapter_id(header.adapter_id, "header.adapter_id", violations)
        if not 1 <= len(header.config) <= MAX_CONFIG_BYTES:
            violations.add(
                "header.config",
                f"has {len(header.config)} bytes; send the content of {CONFIG_FILE}, at most {MAX_CONFIG_BYTES} bytes",
            )
        if len(header.signature) > MAX_SIGNATURE_BYTES:
            violations.add(
                "header.signature", f"has {len(header.signature)} bytes; at most {MAX_SIGNATURE_BYTES} are read"
            )
        elif len(header.config) <= MAX_CONFIG_BYTES < len(header.config) + len(header.signature):
            violations.add(
                "header.signature",
                f"has {len(header.signature)} bytes and config {len(header.config)}; send at most {MAX_CONFIG_BYTES} "
                "in all",
            )
        if not 1 <= header.weights_bytes <= self._max_adapter_bytes:
            violations.add(
                "header.weights_bytes",
                f"is {header.weights_bytes}; send 1 to {self._max_adapter_bytes} bytes (the server's "
                "--max-adapter-bytes)",
            )
        check_files_from(header.files_from, is_cleared=header.without_files, violations=violations)
        check_ownership(header, "header.", violations)
        violations.raise_if_any()
        return len(header.config) + len(header.signature) + header.weights_bytes


def _write_head(header: push_pb2.PushHeader, files: Mapping[str, Path]) -> None:
    """The files whose content the header has."""
    files[CONFIG_FILE].write_bytes(header.config)
    if SIGNATURE_FILE in files:
        files[SIGNATURE_FILE].write_bytes(header.signature)


async def receive_all(accepted: Accepted, files: Mapping[str, Path]) -> None:
    """Write what the header has, and the chunks that follow. Raises InvalidRequest, DeadlineExceeded or Exhausted."""
    writing = asyncio.ensure_future(asyncio.to_thread(_write_head, accepted.header, files))
    try:
        await receive(accepted, files[WEIGHTS_FILE])
    finally:
        await _ended(writing)
    with _disk_errors():
        writing.result()


async def _ended(writing: asyncio.Future[None]) -> None:
    """Wait for the end of a thread that writes, also if the call is cancelled meanwhile. Raises CancelledError then.

    The directory is removed next: a thread that still wrote into it would leave it there.
    """
    cancelled: asyncio.CancelledError | None = None
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError as error:
            cancelled = error
    writing.exception()  # has been looked at, also if another error goes on
    if cancelled is not None:
        raise cancelled


async def receive(accepted: Accepted, path: Path) -> None:
    """Write the chunks to the file, while the next ones come. Raises InvalidRequest, DeadlineExceeded or Exhausted."""
    announced, received = accepted.header.weights_bytes, 0
    batch: list[bytes] = []
    num_batched = 0
    with _disk_errors(), path.open("wb") as out:
        async with _BatchWriter(out, accepted.space) as writer:
            while (message := await accepted.messages.next()) is not None:
                data = message.chunk.data
                received += len(data)
                _check_chunk(message, received, announced)
                batch.append(data)
                num_batched += len(data)
                if num_batched >= WRITE_BYTES or received == announced:
                    await writer.write(batch, num_batched)
                    batch, num_batched = [], 0
    if received != announced:
        raise refuse("header.weights_bytes", f"the push ended after {received} of {announced} bytes; send it again")


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn a full disk into an error for clients."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Exhausted("the server ran out of disk space for this push", retry_after_s=60.0) from error
        raise


class _BatchWriter:
    """Writes one batch of chunks at a time, in a thread. All are written when its block ends without an error."""

    def __init__(self, out: BinaryIO, space: Reservation) -> None:
        self._out = out
        self._space = space
        self._writing: asyncio.Task[None] | None = None

    async def write(self, batch: list[bytes], num_bytes: int) -> None:
        """Begin to write a batch, once the one before it is written. Raises the OSError of that one."""
        await self._wait()
        self._writing = asyncio.create_task(self._write(batch, num_bytes))

    async def _write(self, batch: list[bytes], num_bytes: int) -> None:
        await asyncio.to_thread(self._out.writelines, batch)
        self._space.use(num_bytes)

    async def _wait(self) -> None:
        if self._writing is not None:
            await _ended(self._writing)
            self._writing.result()

    async def __aenter__(self) -> _BatchWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._wait()
        elif self._writing is not None:
            await _ended(self._writing)  # its thread has the file


def _check_chunk(message: push_pb2.PushVersionRequest, received: int, announced: int) -> None:
    if message.WhichOneof("part") != "chunk":
        raise refuse("header", "appears twice; send it once, then chunks")
    size = len(message.chunk.data)
    if not 1 <= size <= MAX_CHUNK_BYTES:
        raise refuse("chunk.data", f"has {size} bytes; send 1 to {MAX_CHUNK_BYTES}")
    if received > announced:
        raise refuse("chunk.data", f"brings the push to {received} bytes; the header announces {announced}")


def response_to(pushed: Pushed, receive_s: float) -> push_pb2.PushVersionResponse:
    """What the caller learns of a push."""
    timings = push_pb2.PushTimings(
        receive_time=wire.duration(receive_s),
        pack_time=wire.duration(pushed.pack_s),
        cache_time=wire.duration(pushed.cache_s),
        load_time=wire.duration(pushed.load_s),
        visible_time=wire.duration(receive_s + pushed.visible_s),
        durable_time=wire.duration(receive_s + pushed.durable_s),
    )
    # The workers are those that had the version before: another tenant may have loaded the same weights.
    num_workers = len(pushed.worker_ids) if current_caller().principal.is_admin else 0
    return push_pb2.PushVersionResponse(
        adapter=wire.registered_message(pushed.registered),
        timings=timings,
        num_workers=num_workers,
        files_from=pushed.files_from,
    )

"""Receives the files of an adapter from an upload stream into a directory that is removed when the upload ends.

Owns sizes, order, hashes and the least rate of an upload; knows nothing of what the files mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from motet.v1 import adapters_pb2

from contract.ids import DIGEST_FORM, is_digest
from control_plane.api.admin.disk_space import DiskSpace, Reservation, free_bytes_of
from control_plane.api.admin.ownership import check_ownership
from control_plane.api.admin.spools import Received, Spool, Spools, UploadKey
from control_plane.api.rollout_fields import checked_version_rollout
from control_plane.api.rpc.shared_limit import SharedLimit
from control_plane.awake import AwakeClock, AwakeTimeout
from control_plane.caller import current_caller
from control_plane.checks import (
    Violations,
    check_adapter_id,
    check_display_name,
    check_labels,
    check_request_id,
    quoted,
    refuse,
)
from control_plane.directory_lock import PRIVATE
from control_plane.errors import DeadlineExceeded, DigestMismatch, Exhausted, MotetError, UploadTakenOver
from control_plane.registry.adapter_files import ALL_NAMES, COMPANION_LIMITS, PEFT, TRTLLM, names_error
from control_plane.signatures.bundle import MAX_SIGNATURE_BYTES
from control_plane.signatures.verifier import SIGNATURE_FILE

MAX_CHUNK_BYTES = 2**20
MAX_LISTED_FILES = 16  # in a header that is looked at file by file
MAX_OPEN_UPLOADS = 16
IDLE_TIMEOUT_S = 30.0
# The server waits for a client for GRACE_S, and a second longer for every LEAST_BYTES_PER_S that the client sent. So
# the waiting for an upload of N bytes ends after at most GRACE_S + N / LEAST_BYTES_PER_S.
GRACE_S = 30.0
LEAST_BYTES_PER_S = 64 * 2**10
# What a client still sends when its upload is refused is read and dropped up to these limits before the call ends:
# grpc.aio's clients report a write that fails in place of the refusal.
DROP_BYTES = 64 * 2**20
DROP_S = 1.0
# Chunks go to the disk when this many bytes have come together: every write costs a change of threads.
WRITE_BYTES = 256 * 2**10


class UploadReceiver:
    """Bounds the uploads of one server.

    `clock` measures how long the server waits for clients, `kept_clock` how long the files of broken uploads stay, in
    seconds. `free_bytes` returns what is free on a directory's disk.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_adapter_bytes: int,
        max_open: int = MAX_OPEN_UPLOADS,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        drop_s: float = DROP_S,
        clock: AwakeClock | None = None,
        kept_clock: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[Path], int] = free_bytes_of,
    ) -> None:
        self._directory = directory
        self._max_adapter_bytes = max_adapter_bytes
        self._places = SharedLimit(max_open, "uploads", retry_after_s=2.0)
        self._space = DiskSpace(lambda: free_bytes(directory))
        self._idle_timeout_s = idle_timeout_s
        self._drop_s = drop_s
        self._clock = clock or AwakeClock()
        # An AwakeClock stands still while nobody reads it, as between two uploads.
        self.spools = Spools(directory, clock=kept_clock, max_tenant_bytes=max_adapter_bytes)

    def received_bytes(self, upload_id: str) -> list[int]:
        """What came of each file of the current caller's upload. Raises UploadNotFound."""
        return self.spools.received_bytes(_key(upload_id))

    @contextlib.asynccontextmanager
    async def open(
        self, stream: AsyncIterable[Any], holder: Sequence[str], check: Callable[[Any], str] | None = None
    ) -> AsyncIterator[Upload]:
        """An upload whose checked header was read. `holder` as in `accept`.

        Its files exist until the block ends; if it did not get to its end, they stay for a call that continues it.
        `check` checks a header with `files` and returns the upload_id, "" if no call can continue it. None: the headers
        are those of UploadAdapter.
        """
        async with contextlib.AsyncExitStack() as held:
            messages, header = await self._begun(stream, holder, held)
            upload_id = (check or self._checked_upload_id)(header)
            files = list(header.files)
            spool = await held.enter_async_context(self.spools.held(_key(upload_id), files, messages.interrupt))
            num_left = sum(file.size_bytes for file in files) - spool.num_bytes
            yield Upload(header, messages, spool, self._reserve(num_left, held))

    @contextlib.asynccontextmanager
    async def accept(
        self, stream: AsyncIterable[Any], holder: Sequence[str], size_of: Callable[[Any], int]
    ) -> AsyncIterator[Accepted]:
        """A stream whose first message was a header. Its directory exists until the block ends.

        `size_of` checks a header and returns the bytes that it announces. `holder`, as Caller.holder: whose part of the
        open uploads it takes. Raises Exhausted.
        """
        async with contextlib.AsyncExitStack() as held:
            messages, header = await self._begun(stream, holder, held)
            size_bytes = size_of(header)
            self._directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            space = self._reserve(size_bytes, held)
            directory = Path(tempfile.mkdtemp(dir=self._directory, prefix="upload-"))
            held.callback(shutil.rmtree, directory, ignore_errors=True)
            yield Accepted(header, messages, directory, space)

    def _checked_upload_id(self, header: adapters_pb2.UploadHeader) -> str:
        check_header(header, self._max_adapter_bytes)
        return header.upload_id

    async def _begun(
        self, stream: AsyncIterable[Any], holder: Sequence[str], held: contextlib.AsyncExitStack
    ) -> tuple[PacedMessages, Any]:
        """The messages after the header, and the header as it came."""
        held.enter_context(self._places.place(holder))
        messages = PacedMessages(stream, idle_timeout_s=self._idle_timeout_s, clock=self._clock)

        async def leave(kind: type[BaseException] | None, _error: BaseException | None, _trace: object) -> None:
            if kind is not None and issubclass(kind, MotetError):
                await messages.drop_rest(self._drop_s)
            await messages.close()

        held.push_async_exit(leave)
        first = await messages.next()
        if first is None or first.WhichOneof("part") != "header":
            raise refuse("header", "is missing; send the header as the first message of an upload")
        return messages, first.header

    def _reserve(self, num_bytes: int, held: contextlib.AsyncExitStack) -> Reservation:
        """Space on the disk, for which the oldest broken uploads go. Raises Exhausted."""
        while True:
            try:
                return held.enter_context(self._space.reserved(num_bytes))
            except Exhausted:
                if not self.spools.remove_oldest():
                    raise


def _key(upload_id: str) -> UploadKey:
    caller = current_caller()
    return UploadKey(caller.tenant, caller.principal.name, upload_id)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A stream whose header is checked."""

    header: Any
    messages: PacedMessages  # those after the header
    directory: Path  # empty
    space: Reservation  # of the bytes that the header announces


class PacedMessages:
    """The messages of one upload. Ends the upload of a client that is silent, or slower than the least rate.

    Only time in which the server ran and waited for the client counts. Time in which the server itself was slow or
    stopped does not.
    """

    def __init__(
        self,
        stream: AsyncIterable[Any],
        *,
        idle_timeout_s: float,
        clock: AwakeClock,
    ) -> None:
        self._messages = aiter(stream)
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._waited_s = 0.0
        self._received_bytes = 0
        self._is_interrupted = False
        self._is_ended = False  # by the client, or given up
        self._waiting: asyncio.Task[Any] | None = None  # for the next message

    def interrupt(self) -> None:
        """Let the call that waits for a message, or will, end. Idempotent."""
        if self._is_interrupted:  # a second cancellation of the task would be taken for that of its call
            return
        self._is_interrupted = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def next(self) -> Any:
        """The next message, None at the end of the stream. Raises DeadlineExceeded, UploadTakenOver."""
        if self._is_interrupted:
            raise self._taken_over()
        allowed_s = GRACE_S + self._received_bytes / LEAST_BYTES_PER_S - self._waited_s
        if allowed_s <= 0:
            self._is_ended = True
            raise self._too_slow()
        begin_s = self._clock()
        self._waiting = asyncio.current_task()
        try:
            async with AwakeTimeout(min(allowed_s, self._idle_timeout_s), self._clock):
                message = await anext(self._messages)
        except StopAsyncIteration:
            self._is_ended = True
            return None
        except TimeoutError:
            self._is_ended = True
            if allowed_s < self._idle_timeout_s:
                raise self._too_slow() from None
            raise DeadlineExceeded(f"no chunk came for {self._idle_timeout_s:g} s; start the upload again") from None
        except asyncio.CancelledError:
            if self._is_interrupted and self._waiting is not None and self._waiting.uncancel() == 0:
                raise self._taken_over() from None
            raise
        finally:
            self._waiting = None
            self._waited_s += self._clock() - begin_s
        self._received_bytes += len(message.chunk.data)
        return message

    def _taken_over(self) -> UploadTakenOver:
        return UploadTakenOver("another call with this header.upload_id continues the upload")

    def _too_slow(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._received_bytes} bytes came in {self._waited_s:.0f} s; after {GRACE_S:g} s an upload must bring "
            f"{LEAST_BYTES_PER_S} bytes per second on average; start the upload again over a faster connection"
        )

    async def drop_rest(self, limit_s: float) -> None:
        """Read on after a refusal, to the client's end, DROP_BYTES or the limit of time."""
        dropped_bytes = 0
        with contextlib.suppress(StopAsyncIteration, TimeoutError, MotetError):
            async with asyncio.timeout(limit_s):
                while not self._is_ended and dropped_bytes < DROP_BYTES:
                    dropped_bytes += (await anext(self._messages)).ByteSize()

    async def close(self) -> None:
        """Take no further message."""
        if (aclose := getattr(self._messages, "aclose", None)) is not None:  # grpc.aio hands out a generator
            await aclose()


class Upload:
    """One upload: `header` is checked, `receive` gets the files."""

    def __init__(self, header: Any, messages: PacedMessages, spool: Spool, space: Reservation) -> None:
        """`header`: has the `files`, whatever else it has."""
        self.header = header
        self._messages = messages
        self._spool = spool
        self._space = space

    async def receive(self) -> dict[str, Path]:
        """The files by name, every byte as announced. Raises InvalidRequest, DigestMismatch, DeadlineExceeded."""
        paths = {}
        try:
            for index, file in enumerate(self.header.files):
                paths[file.name] = path = self._spool.directory / file.name
                with path.open("ab") as out:
                    await self._receive_file(index, file, out)
        except OSError as error:
            self._spool.is_ended = True  # how much of the last write is in the file is not known
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Exhausted("the server ran out of disk space for this upload", retry_after_s=60.0) from error
            raise
        if await self._messages.next() is not None:
            raise refuse(
                "chunk", "comes after the last byte of the last file; send as many bytes as the header announces"
            )
        return paths

    def end(self) -> None:
        """Nothing is left to continue: the files were registered, or refused for what they are."""
        self._spool.is_ended = True

    async def _receive_file(self, index: int, file: adapters_pb2.UploadFile, out: IO[bytes]) -> None:
        received = self._spool.received[index]
        unwritten: list[bytes] = []  # chunks
        num_unwritten = 0  # their bytes
        try:
            while (num_received := received.num_bytes + num_unwritten) < file.size_bytes:
                message = await self._messages.next()
                if message is None:
                    raise refuse(
                        f"header.files[{index}].size_bytes",
                        f"the upload of {file.name} ended after {num_received} of {file.size_bytes} bytes; "
                        "send it again",
                    )
                if message.WhichOneof("part") != "chunk":
                    raise refuse("header", "appears twice; send it once, then chunks")
                _check_chunk(message.chunk, index, num_received, file)
                unwritten.append(message.chunk.data)
                num_unwritten += len(message.chunk.data)
                if num_unwritten >= WRITE_BYTES:
                    chunks, unwritten, num_unwritten = unwritten, [], 0
                    await self._write(out, received, chunks)
        finally:
            if unwritten:  # also of a call that broke: the next one continues after them
                await self._write(out, received, unwritten)
        if received.digest.hexdigest() != file.sha256:
            self._spool.is_ended = True
            raise DigestMismatch(f"{file.name}: the bytes that arrived do not have the announced sha256; send it again")

    async def _write(self, out: IO[bytes], received: Received, chunks: list[bytes]) -> None:
        """Write the chunks whole, also if the call is cancelled meanwhile."""
        writing = asyncio.ensure_future(asyncio.to_thread(_write, out, received, chunks))
        try:
            await asyncio.shield(writing)
        finally:
            if not writing.done():
                await asyncio.wait([writing])
            if writing.exception() is None:
                self._space.use(sum(map(len, chunks)))


def _write(out: IO[bytes], received: Received, chunks: list[bytes]) -> None:
    for chunk in chunks:
        out.write(chunk)
        received.digest.update(chunk)
    out.flush()
    received.num_bytes += sum(map(len, chunks))


def check_header(header: adapters_pb2.UploadHeader, max_adapter_bytes: int) -> None:
    """Raises InvalidRequest with everything that is wrong with the header."""
    violations = Violations()
    check_adapter_id(header.adapter_id, "header.adapter_id", violations)
    check_display_name(header.display_name, "header.display_name", violations)
    check_labels(header.labels, "header.labels", violations)
    check_request_id(header.request_id, "header.request_id", violations)
    check_request_id(header.upload_id, "header.upload_id", violations)
    check_ownership(header, "header.", violations)
    checked_version_rollout(header, "header.", violations)
    check_listed_files(header.files, max_adapter_bytes, violations)
    violations.raise_if_any()


def check_listed_files(
    files: Sequence[adapters_pb2.UploadFile], max_adapter_bytes: int, violations: Violations
) -> None:
    """Add a violation for everything that is wrong with `header.files`."""
    if len(files) > MAX_LISTED_FILES:  # before they are read: there may be a million
        expected = ", or ".join(" and ".join(known.required) for known in (PEFT, TRTLLM))
        violations.add("header.files", f"has {len(files)} files; send {expected}, each once")
        return
    names = [file.name for file in files if file.name != SIGNATURE_FILE]
    for index, file in enumerate(files[: len(ALL_NAMES) + 2]):
        if file.name not in (*ALL_NAMES, SIGNATURE_FILE):
            expected = ", ".join((*ALL_NAMES, SIGNATURE_FILE))
            violations.add(f"header.files[{index}].name", f"is {quoted(file.name)}; files of an adapter are {expected}")
        if file.name == SIGNATURE_FILE and file.size_bytes > MAX_SIGNATURE_BYTES:
            violations.add(
                f"header.files[{index}].size_bytes",
                f"is {file.size_bytes} for {SIGNATURE_FILE}; at most {MAX_SIGNATURE_BYTES} are read",
            )
        if file.size_bytes > COMPANION_LIMITS.get(file.name, file.size_bytes):
            violations.add(
                f"header.files[{index}].size_bytes",
                f"is {file.size_bytes} for {file.name}; at most {COMPANION_LIMITS[file.name]}: leave the file out",
            )
        if not is_digest(file.sha256):
            violations.add(f"header.files[{index}].sha256", f"is not a valid SHA-256: {DIGEST_FORM}")
        if file.size_bytes == 0:
            name = f" for {file.name}" if file.name in (*ALL_NAMES, SIGNATURE_FILE) else ""
            violations.add(f"header.files[{index}].size_bytes", f"is 0{name}; send a file that is not empty")
    wrong = names_error(names) or (len(names) < len(files) - 1 and f"has {SIGNATURE_FILE} twice; send it once")
    if wrong and not violations:
        violations.add("header.files", wrong)
    total = sum(file.size_bytes for file in files)
    if total > max_adapter_bytes:
        violations.add(
            "header.files",
            f"{total} bytes in all; at most {max_adapter_bytes} (the server's --max-adapter-bytes): raise it, or save "
            "with save_embedding_layers=False, without which PEFT stores the base's weight beside adapters on "
            "embedding and head",
        )


def _check_chunk(chunk: adapters_pb2.UploadChunk, index: int, received: int, file: adapters_pb2.UploadFile) -> None:
    violations = Violations()
    if chunk.file_index != index:
        violations.add(
            "chunk.file_index", f"is {chunk.file_index}, but file {index} is not complete; send the files in order"
        )
    elif chunk.offset != received:
        violations.add(
            "chunk.offset",
            f"is {chunk.offset}, but {received} bytes of {file.name} were sent so far; send the chunks in order",
        )
    if not chunk.data:
        violations.add("chunk.data", "is empty; send at least one byte")
    if len(chunk.data) > MAX_CHUNK_BYTES:
        violations.add("chunk.data", f"has {len(chunk.data)} bytes; send at most {MAX_CHUNK_BYTES}")
    if received + len(chunk.data) > file.size_bytes:
        violations.add(
            "chunk.data",
            f"brings {file.name} to {received + len(chunk.data)} bytes; the header announces {file.size_bytes}",
        )
    violations.raise_if_any()

"""Receives the files of an adapter from an upload stream into a directory that is gone when the upload ends.

Owns sizes, order, hashes and the idle timeout; knows nothing of what the files mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import re
import shutil
import tempfile
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from typing import IO, Any

from motet.v1 import adapters_pb2

from control_plane.api.validation import (
    Violations,
    check_adapter_id,
    check_display_name,
    check_labels,
    check_request_id,
    refuse,
)
from control_plane.errors import DeadlineExceeded, DigestMismatch, Exhausted

FILE_NAMES = ("adapter_config.json", "adapter_model.safetensors")
MAX_CHUNK_BYTES = 2**20
MAX_LISTED_FILES = 16  # in a header that is looked at file by file
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What an upload leaves free on the disk that it is written to.
_SPARE_DISK_BYTES = 64 * 2**20


class UploadReceiver:
    """Bounds the uploads of one server."""

    def __init__(
        self, directory: Path, *, max_adapter_bytes: int, max_open: int = 4, idle_timeout_s: float = 30.0
    ) -> None:
        self._directory = directory
        self._max_adapter_bytes = max_adapter_bytes
        self._max_open = max_open
        self._idle_timeout_s = idle_timeout_s
        self._num_open = 0

    @contextlib.asynccontextmanager
    async def open(self, stream: AsyncIterable[adapters_pb2.UploadAdapterRequest]) -> AsyncIterator[Upload]:
        """An upload whose checked header was read. Its files exist until the block ends."""
        if self._num_open >= self._max_open:
            raise Exhausted(
                f"{self._num_open} uploads are open, at most {self._max_open}; try again", retry_after_s=2.0
            )
        self._num_open += 1
        directory: Path | None = None
        messages = aiter(stream)
        try:
            first = await self._next(messages)
            if first is None or first.WhichOneof("part") != "header":
                raise refuse("header", "missing; the first message of an upload is its header")
            check_header(first.header, self._max_adapter_bytes)
            self._directory.mkdir(parents=True, exist_ok=True)
            total = sum(file.size_bytes for file in first.header.files)
            free = shutil.disk_usage(self._directory).free
            if free < total + _SPARE_DISK_BYTES:
                raise Exhausted("the server has too little disk space for this upload", retry_after_s=60.0)
            directory = Path(tempfile.mkdtemp(dir=self._directory, prefix="upload-"))
            yield Upload(first.header, messages, directory, self)
        finally:
            self._num_open -= 1
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            if (aclose := getattr(messages, "aclose", None)) is not None:  # grpc.aio hands out a generator
                await aclose()

    async def _next(
        self, messages: AsyncIterator[adapters_pb2.UploadAdapterRequest]
    ) -> adapters_pb2.UploadAdapterRequest | None:
        """The next message, None at the end of the stream."""
        try:
            return await asyncio.wait_for(anext(messages), self._idle_timeout_s)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise DeadlineExceeded(f"no chunk came for {self._idle_timeout_s:g} s; start the upload again") from None


class Upload:
    """One upload: `header` is checked, `receive` gets the files."""

    def __init__(
        self,
        header: adapters_pb2.UploadHeader,
        messages: AsyncIterator[adapters_pb2.UploadAdapterRequest],
        directory: Path,
        receiver: UploadReceiver,
    ) -> None:
        self.header = header
        self._messages = messages
        self._directory = directory
        self._receiver = receiver

    async def receive(self) -> dict[str, Path]:
        """The files by name, every byte as announced. Raises InvalidRequest, DigestMismatch, DeadlineExceeded."""
        paths = {}
        try:
            for index, file in enumerate(self.header.files):
                paths[file.name] = path = self._directory / file.name
                with path.open("wb") as out:
                    await self._receive_file(index, file, out)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Exhausted("the server ran out of disk space for this upload", retry_after_s=60.0) from error
            raise
        if await self._receiver._next(self._messages) is not None:
            raise refuse("chunk", "after the last byte of the last file; send what the header announces")
        return paths

    async def _receive_file(self, index: int, file: adapters_pb2.UploadFile, out: IO[bytes]) -> None:
        digest: Any = hashlib.sha256()
        received = 0
        while received < file.size_bytes:
            message = await self._receiver._next(self._messages)
            if message is None:
                raise refuse(
                    f"header.files[{index}].size_bytes",
                    f"the upload of {file.name} ended after {received} of {file.size_bytes} bytes; send it again",
                )
            chunk = message.chunk
            if message.WhichOneof("part") != "chunk":
                raise refuse("header", "sent twice; chunks follow the header")
            _check_chunk(chunk, index, received, file)

            def write(data: bytes = chunk.data) -> None:
                out.write(data)
                digest.update(data)

            await asyncio.to_thread(write)
            received += len(chunk.data)
        if digest.hexdigest() != file.sha256:
            raise DigestMismatch(f"{file.name}: the bytes that arrived do not have the announced sha256; send it again")


def check_header(header: adapters_pb2.UploadHeader, max_adapter_bytes: int) -> None:
    """Raises InvalidRequest with everything that is wrong with the header."""
    violations = Violations()
    check_adapter_id(header.adapter_id, "header.adapter_id", violations)
    check_display_name(header.display_name, "header.display_name", violations)
    check_labels(header.labels, "header.labels", violations)
    check_request_id(header.request_id, violations, "header.request_id")
    expected = " and ".join(FILE_NAMES)
    if len(header.files) > MAX_LISTED_FILES:  # before they are read: there may be a million
        violations.add("header.files", f"{len(header.files)} files; exactly {expected}, each once")
        violations.raise_if_any()
    for index, file in enumerate(header.files[: len(FILE_NAMES) + 1]):
        if file.name not in FILE_NAMES:
            violations.add(f"header.files[{index}].name", f"only {expected} are taken")
        if not _SHA256.fullmatch(file.sha256):
            violations.add(f"header.files[{index}].sha256", "not 64 lower-case hexadecimal digits")
        if file.size_bytes == 0:
            violations.add(f"header.files[{index}].size_bytes", "0; the file is empty")
    if sorted(file.name for file in header.files) != sorted(FILE_NAMES) and not violations:
        violations.add("header.files", f"{len(header.files)} files; exactly {expected}, each once")
    total = sum(file.size_bytes for file in header.files)
    if total > max_adapter_bytes:
        violations.add(
            "header.files",
            f"{total} bytes in all; at most {max_adapter_bytes} (the server's --max-adapter-bytes): raise it, or save "
            "with save_embedding_layers=False, without which PEFT stores the base's weight beside adapters on "
            "embedding and head",
        )
    violations.raise_if_any()


def _check_chunk(chunk: adapters_pb2.UploadChunk, index: int, received: int, file: adapters_pb2.UploadFile) -> None:
    violations = Violations()
    if chunk.file_index != index:
        violations.add("chunk.file_index", f"{chunk.file_index}; {index} is not complete, files come in order")
    elif chunk.offset != received:
        violations.add("chunk.offset", f"{chunk.offset}; {received} bytes of {file.name} were sent so far")
    if not chunk.data:
        violations.add("chunk.data", "empty")
    if len(chunk.data) > MAX_CHUNK_BYTES:
        violations.add("chunk.data", f"{len(chunk.data)} bytes; at most {MAX_CHUNK_BYTES}")
    if received + len(chunk.data) > file.size_bytes:
        violations.add(
            "chunk.data", f"{received + len(chunk.data)} bytes of {file.name}; {file.size_bytes} were announced"
        )
    violations.raise_if_any()

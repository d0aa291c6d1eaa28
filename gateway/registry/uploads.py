"""An upload: its parts go to files of a private folder as they come, a piece at a time, and from there to Motet.

Motet wants size and hash of each file before the first byte of it, and a form has neither. So the files lie on disk
meanwhile: never in memory, at most `--max-upload-bytes` of each of `--max-uploads`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BufferedWriter
from pathlib import Path

from motet.adapters.files import (
    COMPANION_FILES,
    CONFIG_FILE,
    EXACT_ARRAY,
    ROWS_ARRAY,
    SIGNATURE_FILE,
    WEIGHTS_ARRAY,
    WEIGHTS_FILE,
)
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from gateway.http.bodies import GRACE_S, LEAST_BYTES_PER_S
from gateway.http.described import FORM_MEDIA
from gateway.http.errors import Refusal
from gateway.openai.errors import refused
from gateway.registry.settings import RegistrySettings

FILES = (CONFIG_FILE, WEIGHTS_FILE, *COMPANION_FILES, SIGNATURE_FILE, WEIGHTS_ARRAY, ROWS_ARRAY, EXACT_ARRAY)
# PEFT's save_pretrained writes it, so that it comes with a whole directory. It is not sent on to Motet.
NOT_KEPT = ("README.md",)
SETTINGS, FILE = "settings", "files"  # names of the parts
# What the parts are, as JSON Schema.
FORM = {
    SETTINGS: {"type": "string", "contentMediaType": "application/json", "description": "as Settings, without source"},
    FILE: {"type": "array", "items": {"type": "string", "contentMediaType": "application/octet-stream"}},
}
MAX_SETTINGS_BYTES = 256 << 10
_LATER = {"retry-after": "1", "retry-after-ms": "1000"}


class Uploads:
    """Uploads that are received."""

    def __init__(self, settings: RegistrySettings, check_caller: Callable[[], Awaitable[None]]) -> None:
        """`check_caller` raises if the caller of the current request may not upload."""
        self._settings = settings
        self._check_caller = check_caller
        self._num_open = 0

    @contextlib.asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[tuple[bytes, Path]]:
        """The part `settings`, and a folder with the files, which is removed afterwards. Raises Refusal, MotetError."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if kind != FORM_MEDIA.encode() or not 1 <= len(boundary) <= 70:
            raise Refusal(415, "send multipart/form-data with a boundary of at most 70 bytes, or application/json")
        most = self._settings.max_upload_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise _too_long(most)
        await self._check_caller()
        if self._num_open >= self._settings.max_uploads:
            raise Refusal(503, f"{self._num_open} uploads run, as many as --max-uploads allows", headers=_LATER)
        self._num_open += 1
        try:
            where = self._settings.upload_dir
            with tempfile.TemporaryDirectory(prefix="motet-upload-", dir=where) as directory:
                form = _Form(boundary, Path(directory))
                try:
                    await _feed(form, request, most)
                finally:
                    form.close()
                yield form.settings, Path(directory)
        finally:
            self._num_open -= 1


async def _feed(form: _Form, request: Request, most: int) -> None:
    size, begun_s = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(begun_s + GRACE_S) as limit:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_long(most)
                limit.reschedule(begun_s + GRACE_S + size / LEAST_BYTES_PER_S)
                await asyncio.to_thread(form.write, part)
    except TimeoutError:
        raise Refusal(
            408, f"{size} bytes of the upload came too slowly; send it again", headers={"connection": "close"}
        ) from None
    except FormParserError as error:
        raise Refusal(400, f"the body is not multipart/form-data: {error}") from error
    form.finish()


def _too_long(most: int) -> Refusal:
    return Refusal(413, f"the upload is longer than {most} bytes, which --max-upload-bytes sets")


class _Form:
    """Takes a body apart, as it comes. Only one thread at a time calls it."""

    def __init__(self, boundary: bytes, directory: Path) -> None:
        self._directory = directory
        self._settings: bytearray | None = None
        self._file: BufferedWriter | None = None  # the part that comes is this file; None: it is `settings`
        self._name, self._value = bytearray(), bytearray()
        self._head: dict[bytes, bytes] = {}
        self._is_whole = False
        # It bounds a part's head itself: 8 lines of 4 KiB.
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_name,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_headers_finished": self._open,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
                "on_end": self._on_end,
            },
        )

    @property
    def settings(self) -> bytes:
        """The part of this name. Raises Refusal if there is none."""
        if self._settings is None:
            raise refused(SETTINGS, "is missing; give a part of this name with the adapter's name, as JSON")
        return bytes(self._settings)

    def write(self, data: bytes) -> None:
        """The next piece of the body. Raises Refusal, FormParserError."""
        self._parser.write(data)

    def finish(self) -> None:
        """Raise Refusal if the body ended too early."""
        if not self._is_whole:
            raise Refusal(400, "the body is not multipart/form-data: it ends before its last boundary")

    def close(self) -> None:
        """Close the file that is open, if one is."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self._head = {}

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        self._head[bytes(self._name).lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _open(self) -> None:
        _, options = parse_options_header(self._head.get(b"content-disposition", b""))
        part = options.get(b"name", b"").decode(errors="replace")
        if part == SETTINGS:
            if self._settings is not None:
                raise refused(SETTINGS, "comes twice; give it once")
            self._settings = bytearray()
            return
        if part != FILE:
            raise Refusal(400, f"the part {part[:100]!r} is unknown; give {SETTINGS} and {FILE}")
        name = options.get(b"filename", b"").decode(errors="replace")
        if name not in (*FILES, *NOT_KEPT):
            raise refused(FILE, f"the filename {name[:100]!r} is not a file of an adapter: {', '.join(FILES)}")
        try:
            self._file = (self._directory / name).open("xb")
        except FileExistsError:
            raise refused(FILE, f"{name} comes twice; give it once") from None

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.write(memoryview(data)[start:end])
            return
        assert self._settings is not None, "a part is a file, or the settings"
        self._settings += data[start:end]
        if len(self._settings) > MAX_SETTINGS_BYTES:
            raise refused(SETTINGS, f"is longer than {MAX_SETTINGS_BYTES} bytes")

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _on_end(self) -> None:
        self._is_whole = True


def probe_id() -> str:
    """The id of an upload that does not exist."""
    return f"probe-{uuid.uuid4().hex}"

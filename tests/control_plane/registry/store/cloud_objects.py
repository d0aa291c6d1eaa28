"""Objects of one bucket in memory, with the states and conditions that Google Cloud Storage and Azure have."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class StoredObject:
    """One state of an object."""

    content: bytes
    generation: int  # another one for every state of any object
    modified_s: float

    @property
    def md5(self) -> str:
        return hashlib.md5(self.content, usedforsecurity=False).hexdigest()

    @property
    def date(self) -> str:
        return formatdate(self.modified_s, usegmt=True)


@dataclass
class Request:
    """What a client sent."""

    method: str
    target: str
    headers: dict[str, str]  # by names in small letters
    body: bytes

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        return {
            name: values[0] for name, values in parse_qs(urlsplit(self.target).query, keep_blank_values=True).items()
        }


@dataclass
class Response:
    """What it gets."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Page:
    """A part of a list, with a delimiter."""

    objects: list[tuple[str, StoredObject]]
    prefixes: list[str]
    marker: str  # of the next page; empty: this is the last one


class CloudObjects:
    """All objects of one bucket. Each method is one step, whatever else happens."""

    def __init__(self) -> None:
        self._objects: dict[str, StoredObject] = {}
        self._generation = 1_700_000_000_000_000
        self._uploads: dict[str, dict[str, bytes]] = {}  # parts by upload and number
        self.lock = threading.Lock()

    def get(self, key: str) -> StoredObject | None:
        """The present state."""
        return self._objects.get(key)

    def put(self, key: str, content: bytes) -> StoredObject:
        """Write a new state."""
        self._generation += 1
        written = StoredObject(content, self._generation, time.time())
        self._objects[key] = written
        return written

    def delete(self, key: str) -> bool:
        """Whether there was one."""
        return self._objects.pop(key, None) is not None

    def put_part(self, upload: str, number: str, content: bytes) -> None:
        """Keep a part of an object that is sent in parts."""
        self._uploads.setdefault(upload, {})[number] = content

    def complete(self, key: str, upload: str, numbers: list[str]) -> StoredObject:
        """Put an object together."""
        parts = self._uploads.pop(upload, {})
        return self.put(key, b"".join(parts[number] for number in numbers))

    def page(self, prefix: str, delimiter: str, after: str, count: int) -> Page:
        """Names below a prefix: objects, and what their names have in common up to the delimiter."""
        names: list[str] = []
        for key in sorted(self._objects):
            if key.startswith(prefix):
                rest = key[len(prefix) :]
                end = rest.find(delimiter) if delimiter else -1
                name = key if end < 0 else key[: len(prefix) + end + 1]
                if name > after and name not in names[-1:]:
                    names.append(name)
        shown = names[:count]
        objects = [(name, self._objects[name]) for name in shown if name in self._objects]
        prefixes = [name for name in shown if name not in self._objects]
        return Page(objects, prefixes, shown[-1] if len(names) > count else "")


def content_response(found: StoredObject, request: Request, headers: dict[str, str]) -> Response:
    """The content, or the part that a Range names."""
    headers |= {"Last-Modified": found.date, "Content-Type": "application/octet-stream"}
    size = len(found.content)
    if "range" not in request.headers or request.method == "HEAD":
        return Response(200, headers | {"Content-Length": str(size)}, found.content)
    first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
    begin, end = int(first), min(int(last or size - 1), size - 1)
    if begin >= size:
        return Response(416, {"Content-Range": f"bytes */{size}"})
    part = found.content[begin : end + 1]
    return Response(206, headers | {"Content-Range": f"bytes {begin}-{end}/{size}"}, part)

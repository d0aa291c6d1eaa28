"""A bucket of an object store as the storage of a store, and how one is opened from its URL.

Conditional writes are the object store's own (`If-None-Match`, `If-Match`). No protocol has a conditional deletion: it
is a conditional write of empty content, which counts as none. Such empty objects go after a day.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError
from obstore.store import MemoryStore, from_url

from control_plane.registry.store.store import LEFTOVER_AGE, Entry, KeyChanged, KeyExists, StoreUrlError

logger = logging.getLogger(__name__)

# A file above this size is sent in parts, for which the protocols have no condition.
MAX_CONDITIONAL_BYTES = 64 << 20
SWEEP_INTERVAL_S = 3600.0
_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure")
_PROVIDERS = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}  # in names of environment variables; others are Azure's
# Environment variables of obstore with a URL, by provider. It panics at the first request where one has a space.
_ENDPOINTS = {
    "AWS": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "AZURE": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
# So that a request that was sent either takes effect soon or never.
_CLIENT_OPTIONS: Any = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=60)}

_memory_stores: dict[str, MemoryStore] = {}  # by name: memory://NAME is the same one all over this process
_memory_lock = threading.Lock()


def memory_store(name: str) -> MemoryStore:
    """The object store in the memory of this process that has this name."""
    with _memory_lock:
        return _memory_stores.setdefault(name, MemoryStore())


def open_bucket(url: str) -> Bucket:
    """The bucket of an s3://, gs://, az:// or memory:// URL, with credentials from the environment.

    Raises StoreUrlError. Nothing is sent yet.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        name, _, prefix = (parts.netloc + parts.path).strip("/").partition("/")
        return Bucket(memory_store(name.rpartition("@")[2]), prefix, what="memory")
    if parts.scheme not in _SCHEMES:
        raise StoreUrlError(
            f"{parts.scheme}:// is not a store that Motet knows; give a directory, or a URL of s3://, gs:// or az://"
        )
    if "@" in parts.netloc and parts.scheme in ("s3", "s3a", "gs"):
        raise StoreUrlError(
            f"{parts.scheme}://: credentials in the URL are not read; give them in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY)"
        )
    provider = _PROVIDERS.get(parts.scheme, "AZURE")
    for variable in _ENDPOINTS.get(provider, ()):
        _check_endpoint(variable, os.environ.get(variable, ""))
    # obstore reads this variable only where no other option of its HTTP client is given.
    allows = os.environ.get(f"{provider}_ALLOW_HTTP", "")
    options = _CLIENT_OPTIONS | {"allow_http": allows.lower() in ("true", "1")}
    try:
        return Bucket(from_url(url, client_options=options, retry_config=_RETRIES), what=parts.scheme)
    except (BaseError, ValueError) as error:
        raise StoreUrlError(f"{parts.scheme}://: {_first_line(error)}") from None


def _check_endpoint(variable: str, url: str) -> None:
    """Raise StoreUrlError for the URL of a service that no request could be sent to; empty: none is given."""
    if not url:
        return
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or not url.isascii() or any(not 32 < ord(character) < 127 for character in url):
        # Not repeated: it may hold a password.
        raise StoreUrlError(f"{variable} is not a URL of http:// or https:// with a host; correct it or leave it out")


class Bucket:
    """The six methods of store.Store, without a fence: what the lease and readers of adapters use."""

    def __init__(
        self, remote: Any, prefix: str = "", *, what: str = "bucket", clock: Callable[[], float] = time.time
    ) -> None:
        """`remote`: an object store of obstore, which has the prefix of its URL; `prefix` comes after that."""
        self.remote = remote
        self.what = what  # in messages
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._clock = clock  # wall clock, seconds
        self._sweep_due_s: dict[str, float] = {}  # by prefix

    def get(self, key: str, start: int = 0, size_bytes: int | None = None) -> tuple[bytes, str]:
        """See Store."""
        with _as_os_errors():
            if start == 0 and size_bytes is None:
                found = obstore.get(self.remote, self._path(key))
                if not found.meta["size"]:
                    raise FileNotFoundError(key)
                return bytes(found.bytes()), _tag(dict(found.meta))
            entry = self.head(key)
            if entry is None:
                raise FileNotFoundError(key)
            count = min(entry.size_bytes - start, entry.size_bytes if size_bytes is None else size_bytes)
            if count <= 0:
                return b"", entry.tag
            return bytes(obstore.get_range(self.remote, self._path(key), start=start, length=count)), entry.tag

    def get_part(self, key: str, start: int, size_bytes: int, tag: str) -> bytes:
        """A part of the state that has this tag. Raises KeyChanged if that is not what is there."""
        options: Any = {"range": (start, start + size_bytes), "if_match": tag.partition("\n")[0]}
        with _as_os_errors():
            try:
                return bytes(obstore.get(self.remote, self._path(key), options=options).bytes())
            except PreconditionError as error:
                raise KeyChanged(f"{key} changed: {_first_line(error)}") from None

    def head(self, key: str) -> Entry | None:
        """See Store."""
        found = self._head(key)
        return found if found is not None and found.size_bytes else None

    def list(self, prefix: str, *, names_only: bool = False) -> list[Entry]:  # noqa: ARG002 - one request has it all
        """See Store."""
        with _as_os_errors():
            found = obstore.list_with_delimiter(self.remote, self._path(prefix))
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"]}
        entries = [Entry(name) for name in names]
        entries += [_entry(dict(item)) for item in found["objects"] if item["size"]]
        return sorted(entries, key=lambda entry: entry.name)

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        """See Store."""
        if not (isinstance(content, Path) and content.stat().st_size > MAX_CONDITIONAL_BYTES):
            try:
                return self._put(key, content, KeyExists, tag=None)
            except KeyExists:
                present = self._head(key)
                if present is None or present.size_bytes:
                    raise
                return self._put(key, content, KeyExists, tag=present.tag)  # over what a deletion left
        if self.head(key) is not None:
            raise KeyExists(f"{key} exists")
        return self._put(key, content, KeyExists, tag=None)

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
        """See Store."""
        return self._put(key, content, KeyChanged, tag=tag)

    def delete(self, key: str, tag: str | None = None) -> None:
        """See Store."""
        if tag is None:
            with _as_os_errors(), contextlib.suppress(FileNotFoundError):
                obstore.delete(self.remote, self._path(key))
            return
        self._put(key, b"", KeyChanged, tag=tag)
        prefix = key.rpartition("/")[0]
        now_s = self._clock()
        if now_s >= self._sweep_due_s.get(prefix, 0.0):
            self._sweep_due_s[prefix] = now_s + SWEEP_INTERVAL_S
            threading.Thread(target=self.sweep, args=(prefix,), name="motet-sweep", daemon=True).start()

    def sweep(self, prefix: str) -> int:
        """Remove what deletions below a prefix left a day ago; how many there were."""
        num_removed = 0
        try:
            with _as_os_errors():
                found = obstore.list_with_delimiter(self.remote, self._path(prefix))["objects"]
            for item in found:
                key = f"{prefix}/{item['path'].rsplit('/', 1)[-1]}"
                entry = None if item["size"] else self._head(key)  # once more: a name may be in use again
                if entry is not None and not entry.size_bytes and self._is_old(entry):
                    self.delete(key)
                    num_removed += 1
        except OSError as error:
            logger.warning("store not swept prefix=%s error=%s", prefix, error)
        return num_removed

    def _is_old(self, entry: Entry) -> bool:
        return entry.modified_s < self._clock() - LEFTOVER_AGE.total_seconds()

    def _head(self, key: str) -> Entry | None:
        """The entry of a key, that of a deletion included."""
        with _as_os_errors():
            try:
                return _entry(dict(obstore.head(self.remote, self._path(key))))
            except FileNotFoundError:
                return None

    def _put(self, key: str, content: bytes | Path, conflict: type[OSError], *, tag: str | None) -> str:
        path = self._path(key)
        condition: Any = "create" if tag is None else _condition(tag)
        with _as_os_errors():
            try:
                if isinstance(content, Path) and content.stat().st_size > MAX_CONDITIONAL_BYTES:
                    return _tag(dict(obstore.put(self.remote, path, content)))
                return _tag(dict(obstore.put(self.remote, path, content, mode=condition, use_multipart=False)))
            except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
                if isinstance(error, FileNotFoundError) and tag is None:
                    raise  # the bucket
                failure = conflict(f"{key} changed: {_first_line(error)}")
        return self._unless_own(key, content, failure)

    def _unless_own(self, key: str, content: bytes | Path, failure: OSError) -> str:
        """The tag of what is there, if it is what was to be written: a retried request finds its own content."""
        if isinstance(content, bytes) and content:
            with contextlib.suppress(FileNotFoundError):
                found, tag = self.get(key)
                if found == content:
                    return tag
        raise failure

    def _path(self, key: str) -> str:
        return f"{self._prefix}{key}"


def _tag(meta: dict[str, Any]) -> str:
    """Both marks of an object's state: some stores compare the one, some the other."""
    return f"{meta.get('e_tag') or ''}\n{meta.get('version') or ''}"


def _condition(tag: str) -> Any:
    e_tag, _, version = tag.partition("\n")
    return {name: value for name, value in (("e_tag", e_tag), ("version", version)) if value}


def _entry(meta: dict[str, Any]) -> Entry:
    return Entry(meta["path"].rsplit("/", 1)[-1], _tag(meta), meta["size"], meta["last_modified"].timestamp())


def _first_line(error: BaseException) -> str:
    """What obstore says of an error; the lines below it have requests with their headers."""
    return str(error).split("\n", 1)[0]


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """obstore raises errors of its own; here all of them are OSError."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_first_line(error)) from None
    except OSError:
        raise
    except NotSupportedError as error:
        raise OSError(f"the object store has no conditional writes: {_first_line(error)}") from None
    except BaseError as error:
        raise OSError(f"{type(error).__name__}: {_first_line(error)}") from None

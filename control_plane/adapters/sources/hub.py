"""Reads adapters from a Hub that speaks Hugging Face's REST API. Blocks: call it in a thread.

Uses Python's own HTTP client: redirects are followed here, and only to hosts that the operator allows. The token goes
to the Hub itself and to no other host. A revision is resolved to a commit once; everything after that names the commit.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from control_plane.adapters.sources.locations import RemoteRoot
from control_plane.adapters.sources.remote_adapter import (
    Changed,
    RemoteFile,
    TryLater,
    adapter_names,
    not_found,
    seconds_to_wait,
)
from control_plane.checks import quoted
from control_plane.errors import PathNotAllowed

DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_HOSTS = (".huggingface.co", ".hf.co")  # where huggingface.co keeps large files
MAX_REDIRECTS = 5
MAX_LISTING_BYTES = 16 << 20
LISTING_S = 120.0  # for the whole list
TIMEOUT_S = 30.0  # to connect, and between two pieces
PIECE_BYTES = 1 << 18
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BROKEN = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class Hub:
    """One Hub, and how this server proves who it is. The token is read for every request: it can be replaced."""

    endpoint: str = DEFAULT_ENDPOINT
    hosts: tuple[str, ...] = DEFAULT_HOSTS  # redirects may lead there; with a dot before it, every host below
    timeout_s: float = TIMEOUT_S
    clock: Callable[[], float] = time.monotonic  # seconds

    def token(self) -> str:
        """HF_TOKEN, or the first line of the file HF_TOKEN_PATH; empty without either."""
        token = os.environ.get("HF_TOKEN", "").strip()
        if not token and (path := os.environ.get("HF_TOKEN_PATH")):
            try:
                token = Path(path).read_text(encoding="utf-8").strip()
            except (OSError, ValueError):
                raise TryLater("HF_TOKEN_PATH names a file that cannot be read") from None
        return token

    def find(self, root: RemoteRoot, source: str) -> HubAdapter:
        """The adapter that the text names, at the commit that its revision names at present."""
        path, revision = root.place(source)
        parts = (*root.prefix, *path)
        repository, folder = "/".join(parts[:2]), "/".join(parts[2:])
        url = f"{self.endpoint}/api/models/{quote(repository)}/revision/{quote(revision, safe='')}?blobs=true"
        with self.open(url, source, hosts=None) as response:
            raw = self._listing_bytes(response, source)
        try:
            commit, listed = _listing(json.loads(raw), folder)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise TryLater("the Hub sent a list of files that cannot be read") from None
        names = adapter_names(source, {name: file.size_bytes for name, file in listed.items()})
        named = source.rpartition("@")[0] or source
        return HubAdapter(
            self, source, f"{named}@{commit}", repository, commit, folder, tuple(listed[name] for name in names)
        )

    def _listing_bytes(self, response: Any, source: str) -> bytes:
        raw, end_s = b"", self.clock() + LISTING_S
        for piece in _pieces(response):
            raw += piece
            if len(raw) > MAX_LISTING_BYTES:
                raise not_found(
                    source, f"its list of files is larger than {MAX_LISTING_BYTES} bytes; use a smaller repository"
                )
            if self.clock() > end_s:
                raise TryLater(f"the Hub takes more than {LISTING_S:g} s for its list of files")
        return raw

    def open(self, url: str, source: str, *, start: int = 0, hosts: tuple[str, ...] | None) -> Any:
        """The response to a GET, redirects followed to the Hub itself and to `hosts`; None follows none."""
        own = urlsplit(self.endpoint)
        for _ in range(MAX_REDIRECTS + 1):
            headers = {"User-Agent": "motet", "Accept-Encoding": "identity"}
            if start:
                headers["Range"] = f"bytes={start}-"
            parts = urlsplit(url)
            if (parts.scheme, parts.netloc) == (own.scheme, own.netloc) and (token := self.token()):
                headers["Authorization"] = f"Bearer {token}"
            try:
                return _opener().open(urllib.request.Request(url, headers=headers), timeout=self.timeout_s)
            except urllib.error.HTTPError as error:
                with error:
                    location = error.headers.get("Location")
                    if error.code not in (301, 302, 303, 307, 308) or not location:
                        raise _failure(error.code, error.headers, source) from None
            except _BROKEN as error:
                raise TryLater(f"the Hub cannot be reached ({type(_reason(error)).__name__})") from None
            if hosts is None:
                raise not_found(source, "the repository has moved on the Hub; name its new place")
            try:
                url = urljoin(url, location)
                may_follow, host = self._may_follow(url, hosts), urlsplit(url).hostname
            except ValueError:
                raise TryLater("the Hub redirects to a place that is not a URL") from None
            if not may_follow:
                raise PathNotAllowed(
                    f"source {quoted(source)}: the Hub redirects to {host or 'no host'!r}, which the "
                    "operator does not allow (--hub-host)"
                )
        raise TryLater(f"the Hub redirects more than {MAX_REDIRECTS} times")

    def _may_follow(self, url: str, hosts: tuple[str, ...]) -> bool:
        own, parts = urlsplit(self.endpoint), urlsplit(url)
        if (parts.scheme, parts.netloc) == (own.scheme, own.netloc):
            return True
        # From https never to http, and to the port that the scheme has, or that the operator names.
        if parts.scheme != own.scheme or "@" in parts.netloc:
            return False
        host = parts.hostname or ""
        return any(
            parts.netloc == allowed or (parts.netloc == host and allowed.startswith(".") and host.endswith(allowed))
            for allowed in hosts
        )


@dataclass(frozen=True, slots=True)
class HubAdapter:
    """An adapter in one commit of a repository. See RemoteAdapter."""

    hub: Hub
    named: str  # what the client named
    source: str
    repository: str
    commit: str
    folder: str
    files: tuple[RemoteFile, ...]

    @property
    def identity(self) -> str:
        """A text that is equal for equal bytes."""
        return f"{self.hub.endpoint} {self.repository} {self.commit} {self.folder}"

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """See RemoteAdapter."""
        path = f"{self.folder}/{file.name}" if self.folder else file.name
        url = f"{self.hub.endpoint}/{quote(self.repository)}/resolve/{self.commit}/{quote(path)}"
        with self.hub.open(url, self.named, start=start, hosts=self.hub.hosts) as response:
            if start and not _continues(response, start, file.size_bytes):
                raise Changed(f"{file.name} cannot be continued")
            yield from _pieces(response)

    def error(self, file: RemoteFile, content: Iterator[bytes]) -> str:
        """See RemoteAdapter: large files have a SHA-256, others the hash that git gives them."""
        kind, _, expected = file.tag.partition(":")
        digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
        if kind == "git":
            digest.update(f"blob {file.size_bytes}\0".encode())
        for piece in content:
            digest.update(piece)
        return "" if digest.hexdigest() == expected else f"{file.name} is not what the Hub lists"

    def check_unchanged(self) -> None:
        """A commit does not change."""


def open_hub(hosts: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> Hub:
    """The Hub of HF_ENDPOINT, with hosts that the operator adds. Raises ValueError."""
    endpoint = environment.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ValueError("HF_ENDPOINT: use https://HOST")
    has_token = environment.get("HF_TOKEN") or environment.get("HF_TOKEN_PATH")
    if parts.scheme == "http" and has_token and parts.hostname not in _LOOPBACK:
        raise ValueError(
            "HF_ENDPOINT: is http://, and the token of HF_TOKEN would be readable on the way; use https://"
        )
    return Hub(endpoint, (*(DEFAULT_HOSTS if endpoint == DEFAULT_ENDPOINT else ()), *hosts))


def _pieces(response: Any) -> Iterator[bytes]:
    """The body as it comes: who reads can stop after each piece, however slowly they come. Raises TryLater."""
    try:
        while piece := response.read1(PIECE_BYTES):
            yield piece
    except _BROKEN as error:
        raise TryLater(f"the connection broke ({type(_reason(error)).__name__})") from None


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only, through the proxies of the environment. A redirect is an HTTPError: it is followed here."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _listing(document: Any, folder: str) -> tuple[str, dict[str, RemoteFile]]:
    commit = document["sha"]
    if not all(isinstance(item["rfilename"], str) for item in document["siblings"]):
        raise ValueError("no name")
    if not _COMMIT.fullmatch(commit):
        raise ValueError("no commit")
    prefix, files = f"{folder}/" if folder else "", {}
    for item in document["siblings"]:
        path = item["rfilename"]
        name = path.removeprefix(prefix)
        if path != prefix + name or "/" in name or "size" not in item:
            continue
        lfs = item.get("lfs")
        size = lfs["size"] if lfs else item["size"]
        tag = f"sha256:{lfs['sha256']}" if lfs else f"git:{item['blobId']}"
        if not isinstance(size, int) or size < 0:
            raise ValueError("no size")
        files[name] = RemoteFile(name, size, tag)
    return commit, files


def _continues(response: Any, start: int, size_bytes: int) -> bool:
    expected = f"bytes {start}-{size_bytes - 1}/{size_bytes}"
    return bool(response.status == 206 and response.headers.get("Content-Range") == expected)


def _failure(code: int, headers: Any, source: str) -> Exception:
    if code == 416:
        return Changed("the Hub has no such part of a file")
    if code == 429 or code >= 500 or code == 408:
        return TryLater(f"the Hub responds with {code}", wait_s=seconds_to_wait(headers.get("Retry-After")))
    if code in (401, 403, 404):
        return not_found(
            source,
            "there is no such repository or revision on the Hub, or the server may not read it; correct the name, or "
            "have the operator set HF_TOKEN",
        )
    return not_found(source, f"the Hub refuses it with {code}; correct the name")


def _reason(error: BaseException) -> BaseException:
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, BaseException) else error

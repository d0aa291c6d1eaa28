"""What a sampling session samples from. Its id carries all of that, so the gateway keeps no sessions.

    tinker://NAME              the version that is active when the session is created
    tinker://NAME@NUMBER       that version, as `motet adapters versions NAME` numbers them
    tinker://NAME@LABEL        the version that the label points to when the session is created
    tinker://NAME@DIGEST       the version of that digest, 64 hexadecimal digits

A session keeps the version that it was created with, since its id has the digest.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from motet import AsyncClient, NotFound

from contract.ids import ADAPTER_ID_FORM, is_adapter_id, is_digest
from gateway.http.errors import Refusal

SCHEME = "tinker://"
PATH_FORM = "use tinker://NAME, tinker://NAME@NUMBER, tinker://NAME@LABEL or tinker://NAME@DIGEST"

_SESSION_ID = re.compile(r"motet-[0-9a-f]{32}")
_SAMPLING_ID = re.compile(r"(?P<session>motet-[0-9a-f]{32}):sample:(?P<number>\d{1,18}):(?P<source>base|[^:/]{1,200})")


@dataclass(frozen=True, slots=True)
class Source:
    """What is sampled from: one version of an adapter; the base model if both are empty."""

    adapter: str = ""
    digest: str = ""

    @property
    def path(self) -> str | None:
        """As a model path; None for the base model."""
        return f"{SCHEME}{self.adapter}@{self.digest}" if self.adapter else None


BASE = Source()


def new_session_id() -> str:
    """The id of a client's session."""
    return f"motet-{uuid.uuid4().hex}"


def check_session_id(session_id: str) -> None:
    """Raise Refusal unless a gateway gave out this id."""
    if _SESSION_ID.fullmatch(session_id) is None:
        raise Refusal(400, f"session_id: {session_id!r} is not the id of a session of this service")


def sampling_id(session_id: str, number: int, source: Source) -> str:
    """The id of a sampling session. Raises Refusal."""
    check_session_id(session_id)
    if not 0 <= number < 10**18:
        raise Refusal(400, f"sampling_session_seq_id: {number} is not from 0 to 10**18 - 1")
    return f"{session_id}:sample:{number}:{f'{source.adapter}@{source.digest}' if source.adapter else 'base'}"


def source_of(sampling_session_id: str) -> Source:
    """What a sampling session samples from. Raises Refusal for an id that no gateway gave out."""
    match = _SAMPLING_ID.fullmatch(sampling_session_id)
    if match is not None:
        adapter, at, digest = match["source"].partition("@")
        if match["source"] == "base":
            return BASE
        if at and is_adapter_id(adapter) and is_digest(digest):
            return Source(adapter, digest)
    # Never the base model in place of what cannot be read.
    raise Refusal(404, f"sampling_session_id: {sampling_session_id[:300]!r} is not a sampling session of this service")


async def resolve(model_path: str, client: AsyncClient) -> Source:
    """The version that a model path names at this moment. Raises Refusal, and what the server refuses with."""
    name, at, version = model_path.removeprefix(SCHEME).partition("@")
    if not model_path.startswith(SCHEME) or "/" in name or (at and not version):
        raise Refusal(400, f"model_path: {model_path!r} names no adapter of this service: {PATH_FORM}")
    if not is_adapter_id(name):
        raise Refusal(400, f"model_path: {name!r} in {model_path!r} is not a valid adapter id: {ADAPTER_ID_FORM}")
    adapter = await client.adapters.get(name)
    if not at:
        if adapter.active_version is None:
            raise Refusal(404, f"model_path: {name} has no active version at present; name one: {PATH_FORM}")
        return Source(name, adapter.active_version.digest)
    if digest := adapter.version_labels.get(version):
        return Source(name, digest)
    async for known in client.adapters.versions(name):
        if version in (known.digest, str(known.number)):
            return Source(name, known.digest)
    raise NotFound(f"model_path: adapter {name} has no version {version}; `motet adapters versions {name}` lists them")

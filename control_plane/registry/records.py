"""What is known of one adapter, and how it is written down. Immutable: every change makes a new record."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from control_plane.scheduler.types import AdapterRef

_FORMAT = 1


class AdapterState(enum.Enum):
    """Where an adapter stands in its life."""

    ACTIVE = "active"
    DELETING = "deleting"
    FAILED = "failed"  # state_reason says why; never stored, found out at every start


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable version."""

    digest: str  # 64 lower-case hexadecimal digits
    kind: str  # "lora", "rslora", "dora" or "rsdora"
    max_rank: int
    dtype: str  # element type it is packed in
    size_bytes: int  # packed
    arena_bytes: int  # what it takes of a worker's arena
    target_modules: tuple[str, ...]  # full names, sorted
    create_time_s: float  # wall clock, seconds since 1970
    base_fingerprint: str = ""  # base checkpoint it was checked against


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """One name and its versions."""

    adapter_id: str
    uid: str  # unique for this registration of the name
    display_name: str
    labels: dict[str, str]
    state: AdapterState
    state_reason: str  # for people; empty when active
    versions: tuple[AdapterVersion, ...]  # newest first; empty only when the record could not be read
    active_digest: str
    is_pinned: bool
    create_time_s: float  # wall clock, seconds since 1970
    update_time_s: float
    revision: int = field(default=1)  # counts up with every change

    @property
    def etag(self) -> str:
        """Changes with every change of the record."""
        return f"{self.uid[:12]}-{self.revision}"

    @property
    def active_version(self) -> AdapterVersion | None:
        """The version that new requests get; None if the record could not be read."""
        return self.version(self.active_digest)

    def version(self, digest: str) -> AdapterVersion | None:
        """The version of that digest, if there is one."""
        return next((version for version in self.versions if version.digest == digest), None)


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """What one request was admitted with."""

    adapter_id: str
    version: AdapterVersion
    ref: AdapterRef


def encode_record(record: AdapterRecord) -> bytes:
    """The stored document."""
    document = asdict(record)
    is_failed = record.state is AdapterState.FAILED  # found out again at the next start, if it is still so
    document["state"] = AdapterState.ACTIVE.value if is_failed else record.state.value
    document["state_reason"] = "" if is_failed else record.state_reason
    document["format"] = _FORMAT
    return json.dumps(document, sort_keys=True, indent=1).encode()


def decode_record(raw: bytes) -> AdapterRecord:
    """Read a stored document. Raises ValueError with what is wrong."""
    try:
        document: dict[str, Any] = json.loads(raw)
        if document.pop("format") != _FORMAT:
            raise ValueError("written by another version")
        versions = tuple(
            AdapterVersion(**(version | {"target_modules": tuple(version["target_modules"])}))
            for version in document.pop("versions")
        )
        record = AdapterRecord(**(document | {"versions": versions, "state": AdapterState(document["state"])}))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("fields are missing or of the wrong type") from error
    if record.active_version is None:
        raise ValueError("the active version is none of its versions")
    return record

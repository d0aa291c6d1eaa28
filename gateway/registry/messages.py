"""Bodies and responses of the registry's routes. Adapters, versions and placements are those of the SDK.

A field that is not here is refused by name. None is a field that was left out.
"""

from __future__ import annotations

from datetime import datetime

import msgspec
from motet import Adapter, AdapterVersion, AdapterVisibility
from motet.types import AdapterTier, Residency

from gateway.openai.errors import Problem


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body, strictly."""


class Rollout(Message):
    """How a version is rolled out when it is registered, as the SDK's VersionRollout."""

    keep_active: bool = False
    canary_per_mille: int = 0
    version_labels: tuple[str, ...] = ()
    keep_versions: int | None = None
    ttl_s: float | None = None
    hold: bool = False


class Settings(Message):
    """What is registered, beside its files: the part `settings` of an upload."""

    name: str
    display_name: str = ""
    labels: dict[str, str] = {}
    visibility: AdapterVisibility | None = None
    shared_with: list[str] = []
    owner: str = ""
    rollout: Rollout | None = None
    validate_only: bool = False


class FromRoot(Settings, kw_only=True):
    """A registration from a place that the operator listed: `ROOT/PATH` or `ROOT/PATH@REVISION`."""

    source: str


class Change(Message):
    """What is changed of an adapter."""

    display_name: str | None = None
    labels: dict[str, str] | None = None
    visibility: AdapterVisibility | None = None
    shared_with: list[str] | None = None
    owner: str | None = None
    version_labels: dict[str, str] | None = None
    keep_versions: int | None = None
    expire_time: datetime | None = None
    ttl_s: float | None = None
    never_expires: bool = False
    etag: str = ""


class Version(Message):
    """Names a version."""

    digest: str


class Activation(Message):
    """The version that is to be active. `expected_digest`: only if that one is active at present."""

    digest: str
    etag: str = ""
    expected_digest: str = ""


class Rollback(Message):
    """Back to the version before. The fields are those of Activation."""

    etag: str = ""
    expected_digest: str = ""


class Canary(Message):
    """A version that gets a share of the new requests, in thousandths."""

    digest: str
    per_mille: int
    etag: str = ""


class Place(Message):
    """Where a version is loaded into, or taken out of. Without a digest it is the active one."""

    digest: str = ""
    tier: AdapterTier = AdapterTier.ARENA
    worker_ids: list[str] = []
    wait_s: float = 30.0


class AdapterPage(msgspec.Struct):
    """A page of adapters. `next_page_token` is empty at the end."""

    adapters: list[Adapter]
    next_page_token: str


class VersionPage(msgspec.Struct):
    """A page of versions, newest first."""

    versions: list[AdapterVersion]
    next_page_token: str


class Residencies(msgspec.Struct):
    """What became of each place."""

    results: list[Residency]


class Operation(msgspec.Struct):
    """Work that goes on. When it is done, it has an error, or the adapter if it made one."""

    name: str
    done: bool
    error: Problem | None = None
    adapter: Adapter | None = None
    bytes_done: int = 0  # of what is downloaded
    bytes_total: int = 0

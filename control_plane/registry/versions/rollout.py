"""How the versions of a name are rolled out and kept: labels, canary, retention, the way back, time to live.

Immutable, and no I/O. Also how it is written down: a part of the record's document, which is left out if it is empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from contract.ids import is_digest, is_label_key

MAX_VERSION_LABELS = 64
MAX_KEPT_VERSIONS = 500  # far enough below the most versions of a name for those that are kept beside these
MAX_PREVIOUS = 16
PER_MILLE = 1000
MAX_ROUTING_KEY_BYTES = 128
MAX_TTL_S = 10 * 366 * 86400.0
_HASH_BYTES = 8


class Canary(NamedTuple):
    """A version that gets a share of the new requests which name no version."""

    digest: str
    per_mille: int  # 1 to 1000

    def has(self, adapter_id: str, key: str) -> bool:
        """Whether a request with this key gets the canary. A larger share has every key that a smaller one has."""
        hashed = hashlib.sha256(f"{adapter_id}\0{key}".encode("utf-8", "surrogatepass")).digest()[:_HASH_BYTES]
        return int.from_bytes(hashed, "big") * PER_MILLE < self.per_mille << 8 * _HASH_BYTES


@dataclass(frozen=True, slots=True)
class Rollout:
    """How new requests for one name choose a version. Its digests are those of versions, unless a document was lost."""

    version_labels: Mapping[str, str] = field(default_factory=dict)  # label -> digest
    canary: Canary | None = None  # never of the active version
    keep_versions: int = 0  # how many of the newest ones are kept; 0: all
    expire_time_s: float | None = None  # wall clock, seconds since 1970; None: never
    previous_digests: tuple[str, ...] = ()  # that were active before, the latest first

    def activated(self, digest: str, former_digest: str) -> Rollout:
        """After this version became active in place of another one."""
        others = (other for other in self.previous_digests if other not in (digest, former_digest))
        previous = (former_digest, *others)[:MAX_PREVIOUS] if former_digest else self.previous_digests
        return replace(self, previous_digests=previous).without_canary(digest)

    def rolled_back(self) -> Rollout:
        """After the latest of `previous_digests` became active again. It leaves the list."""
        return replace(self, previous_digests=self.previous_digests[1:]).without_canary(self.previous_digests[0])

    def without_canary(self, digest: str) -> Rollout:
        """The canary ends where it is this version."""
        return replace(self, canary=None) if self.canary is not None and self.canary.digest == digest else self

    def without_versions(self, digests: Collection[str]) -> Rollout:
        """After these versions were deleted. They have no labels, and none is the canary."""
        if not any(digest in digests for digest in self.previous_digests):
            return self
        return replace(self, previous_digests=tuple(d for d in self.previous_digests if d not in digests))

    def labels_of(self, digest: str) -> list[str]:
        """The labels that point to a version, in order."""
        return sorted(label for label, labelled in self.version_labels.items() if labelled == digest)

    def holds(self, digest: str) -> bool:
        """Whether a label or the canary needs the version: it is not deleted then."""
        return (self.canary is not None and self.canary.digest == digest) or digest in self.version_labels.values()

    def excess(self, digests: Sequence[str], active_digest: str) -> list[str]:
        """The versions that `keep_versions` does not keep, oldest first. `digests` are all versions, newest first."""
        if not self.keep_versions:
            return []
        way_back = self.previous_digests[:1]
        return [
            digest
            for digest in reversed(digests[self.keep_versions :])
            if digest != active_digest and digest not in way_back and not self.holds(digest)
        ]


NO_ROLLOUT = Rollout()


@dataclass(frozen=True, slots=True)
class VersionRollout:
    """How one version is rolled out when it is registered."""

    is_active_kept: bool = False  # the version that is active stays it, also where `canary_per_mille` is set
    canary_per_mille: int = 0  # 0: it does not become the canary
    labels: tuple[str, ...] = ()  # that point to it from then on
    keep_versions: int | None = None  # None: as it is
    ttl_s: float | None = None  # of the name; None: its time to expire stays
    is_held: bool = False  # it does not become active, also where no other version is

    @property
    def is_staged(self) -> bool:
        """Whether another version stays active, if there is one."""
        return self.is_active_kept or self.is_held or self.canary_per_mille > 0

    def applied_to(self, rollout: Rollout, digest: str, now_s: float) -> Rollout:
        """The rollout of the name once it has this version. What a canary replaces, it replaces."""
        changed = rollout
        if self.canary_per_mille:
            changed = replace(changed, canary=Canary(digest, self.canary_per_mille))
        if any(rollout.version_labels.get(label) != digest for label in self.labels):
            labels = dict(rollout.version_labels) | dict.fromkeys(self.labels, digest)
            changed = replace(changed, version_labels=labels)
        if self.keep_versions is not None:
            changed = replace(changed, keep_versions=self.keep_versions)
        if self.ttl_s is not None:
            changed = replace(changed, expire_time_s=now_s + self.ttl_s)
        return changed


AT_ONCE = VersionRollout()


# ---- as a part of the record's document ----


def encode_rollout(rollout: Rollout) -> dict[str, Any]:
    """The rollout as JSON; empty where there is nothing to say."""
    values = {
        "version_labels": dict(rollout.version_labels),
        "canary": None if rollout.canary is None else list(rollout.canary),
        "keep_versions": rollout.keep_versions,
        "expire_time_s": rollout.expire_time_s,
        "previous_digests": list(rollout.previous_digests),
    }
    return {name: value for name, value in values.items() if value}


def decode_rollout(document: Any) -> Rollout:
    """Read what `encode_rollout` made. Raises ValueError."""
    if not isinstance(document, dict):
        raise ValueError("rollout is not a JSON object")
    labels = document.pop("version_labels", {})
    if not isinstance(labels, dict) or not all(
        is_label_key(key) and _is_digest(value) for key, value in labels.items()
    ):
        raise ValueError("rollout.version_labels is wrong")
    previous = document.pop("previous_digests", [])
    if not isinstance(previous, list) or not all(map(_is_digest, previous)):
        raise ValueError("rollout.previous_digests is wrong")
    keep_versions = document.pop("keep_versions", 0)
    if type(keep_versions) is not int or not 0 <= keep_versions <= MAX_KEPT_VERSIONS:
        raise ValueError("rollout.keep_versions is wrong")
    expire_time_s = document.pop("expire_time_s", None)
    if expire_time_s is not None and type(expire_time_s) not in (int, float):
        raise ValueError("rollout.expire_time_s is wrong")
    canary = document.pop("canary", None)
    if document:
        raise ValueError(f"rollout has unknown fields: {', '.join(document)[:200]}")
    return Rollout(labels, None if canary is None else _canary(canary), keep_versions, expire_time_s, tuple(previous))


def _canary(document: Any) -> Canary:
    match document:
        case [str(digest), int(per_mille)] if is_digest(digest) and 1 <= per_mille <= PER_MILLE:
            return Canary(digest, per_mille)
    raise ValueError("rollout.canary is wrong")


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and is_digest(value)

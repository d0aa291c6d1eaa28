"""What is known of one adapter. Immutable: every change makes a new record.

store/record_documents.py writes records down and reads them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from control_plane.access.visibility import NOBODYS, Ownership
from control_plane.registry.versions.rollout import NO_ROLLOUT, Rollout
from control_plane.registry.versions.verification import Verification
from control_plane.scheduler.adapter_ref import AdapterRef
from control_plane.signatures.verdict import SignatureVerdict

NONE_ACTIVE = "no version is active: verify one and activate it"  # the state reason of such a record


class AdapterState(enum.Enum):
    """Whether an adapter can be used."""

    ACTIVE = "active"
    DELETING = "deleting"  # stored as the record's name
    FAILED = "failed"  # state_reason says why; never stored, found out at every start


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable version."""

    digest: str  # 64 lower-case hexadecimal digits
    kind: str  # word of its AdapterKind, with "rs" before it if it is scaled by the root of its rank
    max_rank: int
    dtype: str  # element type it is packed in
    size_bytes: int  # packed
    arena_bytes: int  # what it takes of a worker's arena
    target_modules: tuple[str, ...]  # full names, sorted
    create_time_s: float  # wall clock, seconds since 1970
    base_fingerprint: str = ""  # base checkpoint it was checked against
    number: int = 0  # counts up from 1 with the versions of the name; never given twice while the name exists
    vocab_size: int = 0  # tokens of its own vocabulary; 0: the base model's
    num_rows: int = 0  # rows of embedding and head that it replaces or adds
    files: tuple[str, ...] = ()  # documents that it has beside its weights, sorted (registry/companions)
    min_rank: int = 0  # of a module; 0: registered before it was kept
    # Kinds of tensors that its modules have, as the packed layout calls them, sorted. What is not plain LoRA has
    # further ones. Empty: registered before they were kept.
    parts: tuple[str, ...] = ()
    signature: SignatureVerdict | None = None  # of the files that it was registered from; None: they had none
    source: str = ""  # where CreateAdapter found its files, with the commit on a Hub; empty: they were uploaded
    context_length: int = 0  # tokens that its own rotary embedding was trained for; 0: it has the base model's
    verification: Verification | None = None  # the last one; None: there was none
    labels: tuple[str, ...] = ()  # of its score head, in the order of the logits; empty: it has none
    problem_type: str = ""  # what the logits mean, in transformers' words; empty: the adapter does not say
    alora_invocation_tokens: tuple[int, ...] = ()  # it acts from their last place in a prompt on; empty: on all tokens
    warnings: tuple[str, ...] = ()  # what its owner should know; empty: nothing, or registered before they were kept

    @property
    def ref(self) -> AdapterRef:
        """The version as the scheduler sees it."""
        return AdapterRef(self.digest, self.arena_bytes, self.context_length, self.vocab_size or None)


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
    active_digest: str  # empty: none of them was activated yet
    is_pinned: bool
    create_time_s: float  # wall clock, seconds since 1970
    update_time_s: float
    revision: int = field(default=1)  # counts up with every change
    last_number: int = 0  # of the version that was registered last, deleted ones included
    ownership: Ownership = NOBODYS
    rollout: Rollout = NO_ROLLOUT

    @property
    def etag(self) -> str:
        """Changes with every change of the record."""
        return f"{self.uid[:12]}-{self.revision}"

    @property
    def active_version(self) -> AdapterVersion | None:
        """The version that new requests get; None if the record or that version's document could not be read."""
        return self.version(self.active_digest)

    def version(self, digest: str) -> AdapterVersion | None:
        """The version of that digest, if there is one."""
        for version in self.versions:  # a generator takes twice as long, and a start makes this call for every name
            if version.digest == digest:
                return version
        return None


@dataclass(frozen=True, slots=True)
class Registered:
    """What registering a version gave."""

    digest: str  # of the version
    record: AdapterRecord  # as it is with the version; not stored where the version was only checked
    previous: AdapterRecord | None  # as it was before: the same object if nothing changed, None if the name is new
    is_repaired: bool = False  # its weights were damaged in the store, or gone, and are whole again


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """What one request was admitted with."""

    adapter_id: str
    version: AdapterVersion
    ref: AdapterRef

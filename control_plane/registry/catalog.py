"""The registry's memory: every record, the index of names, what is in the store, and what can be served.

No I/O. The registry writes a change to the store first, then puts it here. A name that a caller may not see is, for
that caller, a name that nobody has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from contract.ids import is_adapter_id
from control_plane.caller import Caller
from control_plane.checks import bad_page_token, check_adapter_id, check_digest, page_size_of, require
from control_plane.errors import (
    AdapterNotActive,
    AdapterNotFound,
    AdapterNotServed,
    BaseModelMismatch,
    EtagMismatch,
    MotetError,
)
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.permissions import is_visible, require_change
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion, ResolvedAdapter
from control_plane.registry.versions.record_changes import version_of
from control_plane.registry.versions.version_names import VersionName
from control_plane.registry.visible_names import VisibleNames

RecordListener = Callable[[AdapterRecord | None, AdapterRecord | None], None]


@dataclass(frozen=True, slots=True)
class RegistryStats:
    """What the registry holds."""

    num_registered: int  # names
    num_stored: int  # distinct digests in the store
    num_changes: int = 0  # under way
    num_locks: int = 0  # names and blobs that a change holds or waits for
    # Names that the caller sees. None where its credential lists adapters: counting those takes a walk over all names.
    num_visible: int | None = None


class Catalog:
    """All records of one base model."""

    def __init__(
        self,
        base_model: BaseModel,
        blobs: Iterable[str] = (),
        records: Sequence[AdapterRecord] = (),
        *,
        reports: WorkerReports,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`records` as the store has them. Whether each can be served depends on what workers report, too."""
        self.base_model = base_model
        self._clock = clock  # wall clock, seconds
        self._reports = reports
        self._module_error_by_digest: dict[str, str] = {}  # by the reports of `_reports_seen`
        self._reports_seen = reports.changes
        self.blobs = set(blobs)  # digests that are complete in the store
        self.fresh: set[str] = set()  # digests that are served while they are being stored
        self._records: dict[str, AdapterRecord] = {}
        # Invariants: the index holds the keys of _records; a digest's count is over all records.
        self._names = VisibleNames((record.adapter_id, record.ownership) for record in records)
        self._names_by_digest: dict[str, set[str]] = {}  # names that are being deleted left out
        for record in records:
            self._records[record.adapter_id] = record
            self._count(record, 1)
        # Called after every change with the record before (None: the name is new) and after (None: it is gone).
        self.when_changed: list[RecordListener] = []

    # ---- reading ----

    def resolve(self, name: VersionName, digest: str, key: str, caller: Caller) -> ResolvedAdapter:
        """The version that a new request gets: the one that the name or `digest` says, else that of `key`.

        A key decides between the active version and the canary. A canary that cannot be served gets no requests.
        """
        adapter_id = name.adapter_id
        record = self.get(adapter_id, caller)
        if record.state is AdapterState.DELETING:
            raise AdapterNotFound(f"adapter {adapter_id!r} is being deleted", resource=f"adapters/{adapter_id}")
        rollout = record.rollout
        if rollout.expire_time_s is not None and self._clock() >= rollout.expire_time_s:
            raise AdapterNotFound(f"adapter {adapter_id!r} has expired", resource=f"adapters/{adapter_id}")
        if digest:
            require(check_digest, digest, "adapter.digest")
        is_exact = bool(digest or name.selector)
        if record.state is AdapterState.FAILED and not (is_exact and record.versions):
            self.refuse_failed(record)
        version = selected_version(record, name.selector) if name.selector else None
        if version is None and not is_exact and rollout.canary is not None and rollout.canary.has(adapter_id, key):
            canary = record.version(rollout.canary.digest)
            version = None if canary is None or self.servability_error(canary) else canary
        if version is None:
            version = version_of(record, digest or record.active_digest)
        if is_exact and (error := self.servability_error(version)):
            raise error
        return ResolvedAdapter(adapter_id, version, version.ref)

    def get(self, adapter_id: str, caller: Caller) -> AdapterRecord:
        """The record of a name that the caller sees. Raises AdapterNotFound, which suggests the nearest such names."""
        require(check_adapter_id, adapter_id, "adapter_id")
        record = self.find(adapter_id)
        if record is None or not is_visible(record, caller):
            nearest = ", ".join(repr(name) for name in self._names.nearest(caller, adapter_id))
            hint = f"did you mean {nearest}? " if nearest else ""
            raise AdapterNotFound(
                f"adapter {adapter_id!r} does not exist; {hint}ListAdapters (`motet adapters list`) shows all adapters",
                resource=f"adapters/{adapter_id}",
            )
        return record

    def changeable(self, adapter_id: str, caller: Caller) -> AdapterRecord:
        """The record of a name that the caller may change. Raises AdapterNotFound or PermissionDenied."""
        record = self.get(adapter_id, caller)
        require_change(record, caller)
        return record

    def find(self, adapter_id: str) -> AdapterRecord | None:
        """The record of a name, if there is one, whoever may see it: for the server's own work."""
        record = self._records.get(adapter_id)
        return None if record is None else self.with_state(record)

    def current(self, adapter_id: str, etag: str, caller: Caller) -> AdapterRecord:
        """The record of a name that the caller may change, if it is the one that it read ("" matches any)."""
        record = self.changeable(adapter_id, caller)
        if etag and etag != record.etag:
            raise EtagMismatch(f"adapter {adapter_id!r} changed since it was read; read it again and retry")
        return record

    def list_part(self, caller: Caller, after: str, count: int) -> tuple[list[AdapterRecord], str]:
        """Up to `count` records after a name, of those that the caller sees, and where to go on: see VisibleNames."""
        if after and not is_adapter_id(after):
            raise bad_page_token()
        names, go_on_after = self._names.part(caller, after, count)
        return [self.with_state(self._records[name]) for name in names], go_on_after

    def is_named(self, digest: str) -> bool:
        """Whether a name that is not being deleted has a version of this digest."""
        return digest in self._names_by_digest

    def names_of(self, digest: str) -> Collection[str]:
        """The names that have a version of this digest, those that are being deleted left out."""
        return self._names_by_digest.get(digest, ())

    def stats(self, caller: Caller) -> RegistryStats:
        """Counts, those of what the caller sees among them."""
        return RegistryStats(
            num_registered=len(self._names),
            num_stored=len(self.blobs),
            num_visible=self._names.num_visible_to(caller),
        )

    # ---- changing ----

    def put(self, record: AdapterRecord) -> None:
        """Put a record in place of the record with the same name."""
        old = self._records.get(record.adapter_id)
        if old is not None:
            self._count(old, -1)
            if old.ownership != record.ownership:
                self._names.remove(old.adapter_id, old.ownership)
        self._records[record.adapter_id] = record
        self._names.add(record.adapter_id, record.ownership)
        self._count(record, 1)
        for listener in self.when_changed:
            listener(old, record)

    def remove(self, record: AdapterRecord) -> None:
        """Remove a record."""
        self._count(record, -1)
        del self._records[record.adapter_id]
        self._names.remove(record.adapter_id, record.ownership)
        for listener in self.when_changed:
            listener(record, None)

    def _count(self, record: AdapterRecord, change: int) -> None:
        if record.state is AdapterState.DELETING:
            return
        for version in record.versions:
            if change > 0:
                self._names_by_digest.setdefault(version.digest, set()).add(record.adapter_id)
                continue
            names = self._names_by_digest[version.digest]
            names.discard(record.adapter_id)
            if not names:
                del self._names_by_digest[version.digest]

    # ---- what can be served ----

    def with_state(self, record: AdapterRecord) -> AdapterRecord:
        """The record as ACTIVE or FAILED, depending on whether its active version can be served at present.

        A record without its active version is FAILED already, with the reason.
        """
        if record.state is AdapterState.DELETING or record.active_version is None:
            return record
        error = self.servability_error(record.active_version)
        state, reason = AdapterState.FAILED if error else AdapterState.ACTIVE, str(error or "")
        is_same = (record.state, record.state_reason) == (state, reason)
        return record if is_same else replace(record, state=state, state_reason=reason)

    def servability_error(self, version: AdapterVersion) -> MotetError | None:
        """The error if this version cannot be served, or None."""
        if version.base_fingerprint != self.base_model.fingerprint:
            return BaseModelMismatch("it was registered for another base model; register it again for this one")
        if version.dtype != self.base_model.dtype:
            return BaseModelMismatch(
                f"it was packed as {version.dtype} and the base model is served as {self.base_model.dtype}; "
                "register it again"
            )
        if version.digest not in self.blobs and version.digest not in self.fresh:
            return AdapterNotActive("its weights are missing in the artifact store; register it again")
        reason = self._module_error(version)
        return AdapterNotServed(reason) if reason else None

    def _module_error(self, version: AdapterVersion) -> str:
        is_old = self._reports_seen != self._reports.changes
        if is_old or len(self._module_error_by_digest) > 2 * len(self._names_by_digest) + 1000:  # deleted ones
            self._module_error_by_digest.clear()
            self._reports_seen = self._reports.changes
        reason = self._module_error_by_digest.get(version.digest)
        if reason is None:
            reason = self._module_error_by_digest[version.digest] = self._reports.module_error(version.target_modules)
        return reason

    def refuse_failed(self, record: AdapterRecord) -> None:
        """Raise the reason for which a name is not served."""
        message = f"adapter {record.adapter_id!r} cannot be used: {record.state_reason}"
        error = self.servability_error(record.active_version) if record.active_version else None
        raise (AdapterNotActive if error is None else type(error))(message)


def selected_version(record: AdapterRecord, selector: str) -> AdapterVersion:
    """The version of this number or label. Raises AdapterNotFound."""
    if selector.isdecimal():
        number = int(selector)
        version = next((version for version in record.versions if version.number == number), None)
        what = f"number {selector}"
    else:
        digest = record.rollout.version_labels.get(selector)
        version = None if digest is None else record.version(digest)
        what = f"label {selector!r}"
    if version is None:
        raise AdapterNotFound(
            f"adapter {record.adapter_id!r} has no version of {what}; ListAdapterVersions (`motet adapters versions "
            f"{record.adapter_id}`) shows numbers and labels",
            resource=f"adapters/{record.adapter_id}",
        )
    return version


def versions_page(record: AdapterRecord, page_size: int = 0, page_token: str = "") -> tuple[list[AdapterVersion], str]:
    """One page of a name's versions, newest first, and the token of the next page ("": none)."""
    versions = record.versions
    start = 0
    if page_token:
        digests = [version.digest for version in versions]
        if page_token not in digests:
            raise bad_page_token()
        start = digests.index(page_token) + 1
    page = list(versions[start : start + page_size_of(page_size, page_token)])
    return page, page[-1].digest if start + len(page) < len(versions) else ""

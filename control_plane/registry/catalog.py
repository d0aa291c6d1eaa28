"""The registry's memory: every record, the index of names, what is in the store, and what can be served.

No I/O. The registry writes a change to the store first, then puts it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from contract.ids import is_adapter_id
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
from control_plane.registry.name_index import NameIndex
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion, ResolvedAdapter
from control_plane.scheduler.types import AdapterRef


@dataclass(frozen=True, slots=True)
class RegistryStats:
    """What the registry holds."""

    num_registered: int  # names
    num_stored: int  # distinct digests in the store
    num_changes: int = 0  # under way
    num_locks: int = 0  # names and blobs that a change holds or waits for


class Catalog:
    """All records of one base model."""

    def __init__(
        self,
        base_model: BaseModel,
        blobs: Iterable[str] = (),
        records: Sequence[AdapterRecord] = (),
        *,
        reports: WorkerReports,
    ) -> None:
        """`records` as the store has them. Whether each can be served depends on what workers report, too."""
        self.base_model = base_model
        self._reports = reports
        self._module_error_by_digest: dict[str, str] = {}  # by the reports of `_reports_seen`
        self._reports_seen = reports.changes
        self.blobs = set(blobs)  # digests that are complete in the store
        self._records: dict[str, AdapterRecord] = {}
        # Invariants: the index holds the keys of _records; a digest's counts are over all records.
        self._names = NameIndex(record.adapter_id for record in records)
        self._num_names_by_digest: Counter[str] = Counter()  # names that are being deleted left out
        self._num_pins_by_digest: Counter[str] = Counter()
        for record in records:
            self.put(record)

    # ---- reading ----

    def resolve(self, adapter_id: str, digest: str = "") -> ResolvedAdapter:
        """The version a new request gets: the active one, or the one with `digest`."""
        record = self.get(adapter_id)
        if record.state is AdapterState.DELETING:
            raise AdapterNotFound(f"adapter {adapter_id!r} is being deleted", resource=f"adapters/{adapter_id}")
        if digest:
            require(check_digest, digest, "adapter.digest")
        if record.state is AdapterState.FAILED and not (digest and record.versions):
            self.refuse_failed(record)
        version = self.version(record, digest or record.active_digest)
        if digest and (error := self.servability_error(version)):
            raise error
        return ResolvedAdapter(adapter_id, version, AdapterRef(version.digest, version.arena_bytes))

    def get(self, adapter_id: str) -> AdapterRecord:
        """The record of a name. Raises AdapterNotFound, which suggests the nearest names."""
        require(check_adapter_id, adapter_id, "adapter_id")
        record = self.find(adapter_id)
        if record is None:
            nearest = ", ".join(repr(name) for name in self._names.nearest(adapter_id))
            hint = f"did you mean {nearest}? " if nearest else ""
            raise AdapterNotFound(
                f"adapter {adapter_id!r} does not exist; {hint}ListAdapters (`motet adapters list`) shows all adapters",
                resource=f"adapters/{adapter_id}",
            )
        return record

    def find(self, adapter_id: str) -> AdapterRecord | None:
        """The record of a name, if there is one."""
        record = self._records.get(adapter_id)
        return None if record is None else self.with_state(record)

    def current(self, adapter_id: str, etag: str) -> AdapterRecord:
        """The record of a name, if it is the one that the caller read ("" matches any)."""
        record = self.get(adapter_id)
        if etag and etag != record.etag:
            raise EtagMismatch(f"adapter {adapter_id!r} changed since it was read; read it again and retry")
        return record

    def version(self, record: AdapterRecord, digest: str) -> AdapterVersion:
        """A version of a record. Raises AdapterNotFound."""
        version = record.version(digest)
        if version is None:
            raise AdapterNotFound(
                f"adapter {record.adapter_id!r} has no version {digest}; ListAdapterVersions (`motet adapters versions "
                f"{record.adapter_id}`) shows all versions",
                resource=f"adapters/{record.adapter_id}",
            )
        return version

    def list_page(self, page_size: int = 0, page_token: str = "") -> tuple[list[AdapterRecord], str]:
        """One page of records by name, and the token of the next page ("": none). 0 takes the default size."""
        if page_token and not is_adapter_id(page_token):
            raise bad_page_token()
        names, has_more = self._names.page(page_token, page_size_of(page_size, page_token))
        return [self.with_state(self._records[name]) for name in names], names[-1] if has_more else ""

    def versions_page(
        self, adapter_id: str, page_size: int = 0, page_token: str = ""
    ) -> tuple[list[AdapterVersion], str]:
        """One page of a name's versions, newest first, and the token of the next page ("": none)."""
        versions = self.get(adapter_id).versions
        start = 0
        if page_token:
            digests = [version.digest for version in versions]
            if page_token not in digests:
                raise bad_page_token()
            start = digests.index(page_token) + 1
        page = list(versions[start : start + page_size_of(page_size, page_token)])
        return page, page[-1].digest if start + len(page) < len(versions) else ""

    def pinned_digests(self) -> list[str]:
        """Active digests of all pinned names, sorted."""
        return sorted(digest for digest, count in self._num_pins_by_digest.items() if count)

    def is_named(self, digest: str) -> bool:
        """Whether a name that is not being deleted has a version of this digest."""
        return digest in self._num_names_by_digest

    def stats(self) -> RegistryStats:
        """Counts."""
        return RegistryStats(num_registered=len(self._names), num_stored=len(self.blobs))

    # ---- changing ----

    def put(self, record: AdapterRecord) -> None:
        """Put a record in place of the record with the same name."""
        old = self._records.get(record.adapter_id)
        if old is not None:
            self._count(old, -1)
        self._records[record.adapter_id] = record
        self._names.add(record.adapter_id)
        self._count(record, 1)

    def remove(self, record: AdapterRecord) -> None:
        """Remove a record."""
        self._count(record, -1)
        del self._records[record.adapter_id]
        self._names.remove(record.adapter_id)

    def _count(self, record: AdapterRecord, change: int) -> None:
        for counter, digests in (
            (
                self._num_names_by_digest,
                [] if record.state is AdapterState.DELETING else [version.digest for version in record.versions],
            ),
            (self._num_pins_by_digest, [record.active_digest] if record.is_pinned else []),
        ):
            for digest in digests:
                counter[digest] += change
                if not counter[digest]:
                    del counter[digest]

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
        if version.digest not in self.blobs:
            return AdapterNotActive("its weights are missing in the artifact store; register it again")
        reason = self._module_error(version)
        return AdapterNotServed(reason) if reason else None

    def _module_error(self, version: AdapterVersion) -> str:
        is_old = self._reports_seen != self._reports.changes
        if is_old or len(self._module_error_by_digest) > 2 * len(self._num_names_by_digest) + 1000:  # deleted ones
            self._module_error_by_digest.clear()
            self._reports_seen = self._reports.changes
        reason = self._module_error_by_digest.get(version.digest)
        if reason is None:
            reason = self._module_error_by_digest[version.digest] = self._reports.module_error(version.target_modules)
        return reason

    def refuse_failed(self, record: AdapterRecord) -> None:
        """Raise the reason for which a name is not served."""
        message = f"adapter {record.adapter_id!r} is {record.state.value}: {record.state_reason}"
        error = self.servability_error(record.active_version) if record.active_version else None
        raise (AdapterNotActive if error is None else type(error))(message)

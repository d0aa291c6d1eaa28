"""Fills the artifact store of a server that is not running with any number of small adapters, quickly.

Registering one through the API takes some milliseconds, most of them for syncing to the disk. Here the same documents
and weights are written without that; the server reads them at its next start as it would any others. Every adapter has
a digest of its own: they have the same matrices, scaled each by another number.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.new_version import version_of_packed
from control_plane.registry.peft.ingest import PackedInfo, ingest
from control_plane.registry.records import AdapterRecord, AdapterState
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.record_documents import encode_record, encode_version

MAX_ADAPTER_BYTES = 1 << 30


class UnsyncedFiles(DirectoryStore):
    """A directory whose files are written in place, and not synced to the disk."""

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        """See Store."""
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        return "written"

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:  # noqa: ARG002 - nobody else writes
        """See Store."""
        return self.put_if_absent(key, content)


def small_name(index: int) -> str:
    """The name of one of the small adapters."""
    return f"small-{index:06d}"


def fill_store(store_dir: Path, model_dir: Path, adapter_dir: Path, begin: int, end: int) -> None:
    """Register the adapters of these numbers, all made of the one in `adapter_dir`. No server may use the store."""
    base_model = BaseModel.load(model_dir)
    store_dir.mkdir(parents=True, exist_ok=True)
    store = ArtifactStore(UnsyncedFiles(store_dir))
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        files = {path.name: path for path in adapter_dir.glob("adapter_*")}
        packed = ingest(files, base_model, max_adapter_bytes=MAX_ADAPTER_BYTES, directory=Path(folder))
        for index in range(begin, end):
            _write(store, base_model, _scaled(packed, 1 + index / 1e6), small_name(index))


def _scaled(packed: PackedInfo, factor: float) -> PackedInfo:
    """The same adapter with other scalings, and so with another digest."""
    document = json.loads(packed.manifest)
    for chunk in document["chunks"]:
        for module in chunk["modules"]:
            module["scaling"] *= factor
    manifest = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    size_bytes = packed.size_bytes - len(packed.manifest) + len(manifest)
    return replace(packed, manifest=manifest, digest=hashlib.sha256(manifest).hexdigest(), size_bytes=size_bytes)


def _write(store: ArtifactStore, base_model: BaseModel, packed: PackedInfo, name: str) -> None:
    """Blob, version, record: in the order of the registry."""
    for index, chunk in enumerate(packed.chunks):
        store.put_chunk(packed.digest, index, chunk.path)
    store.put_manifest(packed.digest, packed.manifest)
    now_s = time.time()
    version = version_of_packed(packed, base_model, 1, now_s)
    record = AdapterRecord(
        adapter_id=name,
        uid=uuid.uuid4().hex,
        display_name="",
        labels={},
        state=AdapterState.ACTIVE,
        state_reason="",
        versions=(version,),
        active_digest=packed.digest,
        is_pinned=False,
        create_time_s=now_s,
        update_time_s=now_s,
        last_number=1,
    )
    store.write_version(name, packed.digest, encode_version(version))
    store.write_record(name, encode_record(record), expected=lambda _found: True)

"""Versions that new requests get before they are durable."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.errors import AdapterNotFound, StoreUnavailable
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from tests.control_plane.registry.rig import files


async def test_a_published_version_is_resolved_while_it_is_stored(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (await registry.register("a", files(tmp_path, 1))).record
    seen: list[str] = []
    put_manifest = ArtifactStore.put_manifest

    def note(store: ArtifactStore, digest: str, manifest: bytes) -> None:
        seen.append(registry.resolve("a").version.digest)
        put_manifest(store, digest, manifest)

    @contextlib.asynccontextmanager
    async def publish(packed: PackedInfo) -> AsyncIterator[None]:
        assert registry.resolve("a").version.digest == first.active_digest, "not before it is ready"
        assert all(chunk.path.stat().st_size == chunk.size_bytes for chunk in packed.chunks)
        yield
        assert registry.resolve("a").version.digest == packed.digest

    monkeypatch.setattr(ArtifactStore, "put_manifest", note)
    registered = await registry.register("a", files(tmp_path, 2), publish=publish)
    assert seen == [registered.record.active_digest] != [first.active_digest]
    assert registered.previous is first


@pytest.mark.parametrize("method", ["put_manifest", "write_version", "write_record"])
async def test_the_version_before_is_active_again_if_storing_fails(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    first = (await registry.register("known", files(tmp_path, 1))).record

    @contextlib.asynccontextmanager
    async def publish(_packed: PackedInfo) -> AsyncIterator[None]:
        yield

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise StoreUnavailable("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(ArtifactStore, method, fail)
        for name in ("known", "new"):
            with pytest.raises(StoreUnavailable):
                await registry.register(name, files(tmp_path, 2), publish=publish)
    assert registry.resolve("known").version.digest == first.active_digest
    assert registry.get("known").versions == first.versions
    with pytest.raises(AdapterNotFound):
        registry.resolve("new")
    again = (await registry.register("known", files(tmp_path, 2), publish=publish)).record
    assert registry.resolve("known").version.digest == again.active_digest != first.active_digest


async def test_a_version_that_cannot_be_made_ready_is_not_registered(registry: Registry, tmp_path: Path) -> None:
    @contextlib.asynccontextmanager
    async def publish(_packed: PackedInfo) -> AsyncIterator[None]:
        raise RuntimeError("our mistake")
        yield

    with pytest.raises(RuntimeError):
        await registry.register("a", files(tmp_path, 1), publish=publish)
    assert registry.stats().num_registered == registry.stats().num_stored == 0

"""A registry whose store fails, is damaged or is away, and one whose process dies."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from control_plane.errors import (
    AdapterNotActive,
    Exhausted,
    StoreUnavailable,
)
from control_plane.registry.peft import packing
from control_plane.registry.records import AdapterState
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.store import FencedStore, replace
from tests.control_plane.registry.rig import Crash, files, open_registry
from tests.control_plane.registry.watched_files import WatchedFiles

_T = TypeVar("_T")


class FailingFiles(DirectoryStore):
    """Fails at one mutation, before or after it took effect."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fail_at: int | None = None
        self.is_after = False
        self.error: Callable[[], BaseException] = lambda: Crash()
        self.num_mutations = 0

    def _step(self, mutate: Callable[[], _T]) -> _T:
        self.num_mutations += 1
        is_now = self.num_mutations == self.fail_at
        if is_now and not self.is_after:
            raise self.error()
        if self.fail_at is not None and self.num_mutations > self.fail_at and isinstance(self.error(), Crash):
            raise Crash  # dead
        result = mutate()
        if is_now:
            raise self.error()
        return result

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        return self._step(lambda: DirectoryStore.put_if_absent(self, key, content))

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
        return self._step(lambda: DirectoryStore.replace_if_match(self, key, content, tag))

    def delete(self, key: str, tag: str | None = None) -> None:
        self._step(lambda: DirectoryStore.delete(self, key, tag))


@pytest.mark.parametrize("is_after", [False, True])
async def test_a_crash_at_any_step_leaves_all_or_nothing(tmp_path: Path, is_after: bool) -> None:
    """Register, register anew, delete a version, delete: after a crash at any step what is listed is whole."""
    for step in range(1, 90):
        root = tmp_path / str(step)
        storage = FailingFiles(root)
        registry = await open_registry(storage)
        kept = (await registry.register("kept", files(tmp_path, 9))).record.active_digest
        storage.num_mutations, storage.fail_at, storage.is_after = 0, step, is_after
        has_crashed = False
        try:
            await registry.register("a", files(tmp_path, 1))
            deleted = (await registry.register("a", files(tmp_path, 2))).record.active_digest
            await registry.register("a", files(tmp_path, 3))
            await registry.begin_delete_version("a", deleted)
            await registry.finish_delete_version(deleted)
            await registry.begin_delete("a")
            await registry.finish_delete("a")
        except Crash:
            has_crashed = True
        storage.fence.close()
        again = await open_registry(str(root))
        assert again.resolve("kept").version.digest == kept
        named = {version.digest for record in again.list_part()[0] for version in record.versions}
        for record in again.list_part()[0]:
            assert record.state is AdapterState.ACTIVE
            assert all(ArtifactStore(str(root)).has_blob(version.digest) for version in record.versions)
        assert set(ArtifactStore(str(root)).list_names().blobs) == named
        await again.register("a", files(tmp_path, 1))
        await again.close()
        if not has_crashed:
            assert step > 20
            return
    pytest.fail("the sequence has more steps than were tried")


async def test_a_broken_record_is_set_apart_and_the_rest_serves(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    await registry.register("good", files(tmp_path, 1))
    await registry.register("bad", files(tmp_path, 2))
    await registry.close()
    path = tmp_path / "store" / "adapters" / "bad.json"
    (tmp_path / "store" / "adapters" / "half.json.tmp").write_text("{")
    for damage in (b"{", b"[]", b"{}", path.read_bytes().replace(b'"good"', b'"x"')[:-20], b"\xff\xfe"):
        path.write_bytes(damage)
        registry = await open_registry(str(tmp_path / "store"))
        assert registry.resolve("good")
        assert registry.get("bad").state is AdapterState.FAILED
        with pytest.raises(AdapterNotActive, match="register it again"):
            registry.resolve("bad")
        await registry.close()
    assert not (tmp_path / "store" / "adapters" / "half.json.tmp").exists()
    registry = await open_registry(str(tmp_path / "store"))
    await registry.register("bad", files(tmp_path, 2))
    assert registry.resolve("bad")
    path.write_bytes(b"{")
    await registry.begin_delete("bad")
    await registry.finish_delete("bad")
    assert not path.exists()
    await registry.close()


async def test_lost_weights_are_reported_and_come_back_with_the_same_bytes(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    digest = (await registry.register("a", files(tmp_path))).record.active_digest
    await registry.close()
    (tmp_path / "store" / "blobs" / digest / "manifest.json").unlink()
    registry = await open_registry(str(tmp_path / "store"))
    with pytest.raises(AdapterNotActive, match="weights are missing"):
        registry.resolve("a")
    await registry.register("a", files(tmp_path))
    assert registry.resolve("a").version.digest == digest
    await registry.close()


async def test_an_unreadable_incarnation_never_goes_back(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path))
    await registry.close()
    (tmp_path / "incarnation.json").write_text(json.dumps({"incarnation": "x"}))
    again = await open_registry(str(tmp_path))
    assert again.incarnation > 1_000_000_000
    await again.close()


@pytest.mark.parametrize(("number", "error"), [(28, Exhausted), (5, StoreUnavailable)])
async def test_disk_failure_while_packing_is_not_a_mistake_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    adapter = files(tmp_path)

    def fail(*args: object, directory: Path, **kwargs: object) -> None:
        raise OSError(number, "the disk", str(directory))

    with monkeypatch.context() as patch:
        patch.setattr(packing, "pack_whole", fail)
        with pytest.raises(error) as caught:
            await registry.register("a", adapter)
    assert str(tmp_path) not in str(caught.value)
    assert (await registry.register("a", adapter)).record.active_digest  # the next one works
    await registry.close()


@pytest.mark.parametrize(("number", "error"), [(28, Exhausted), (5, StoreUnavailable)])
async def test_storage_failure_is_reported_and_the_next_try_works(tmp_path: Path, number: int, error: type) -> None:
    storage = FailingFiles(tmp_path / "store")
    storage.error = lambda: OSError(number, "failure")
    registry = await open_registry(storage)
    for step in range(1, 5):
        storage.num_mutations, storage.fail_at = 0, step
        with pytest.raises(error):
            await registry.register("a", files(tmp_path))
        assert registry.stats().num_registered == 0
    storage.fail_at = None
    await registry.register("a", files(tmp_path))
    await registry.close()


async def test_a_cancelled_registration_leaves_memory_and_store_alike(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    for turns in range(12):
        task = asyncio.create_task(registry.register(f"n{turns}", files(tmp_path)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await registry.close()
    listed = [record.adapter_id for record in registry.list_part()[0]]
    stored = ArtifactStore(str(tmp_path / "store")).list_names().records
    assert tuple(listed) == stored


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
async def test_registering_the_same_bytes_again_repairs_a_damaged_blob(
    registry: Registry, storage: FencedStore, tmp_path: Path, damage: str
) -> None:
    digest = (await registry.register("a", files(tmp_path))).record.active_digest
    chunk, manifest = f"blobs/{digest}/00001.safetensors", f"blobs/{digest}/manifest.json"
    good = {path: storage.get(path)[0] for path in (chunk, manifest)}
    if damage == "flip":
        replace(storage, chunk, good[chunk][:-1] + bytes([good[chunk][-1] ^ 1]))
    elif damage == "cut":
        replace(storage, chunk, good[chunk][:-1])
    elif damage == "missing":
        storage.delete(chunk)
    else:
        replace(storage, manifest, b"{}")
    record = registry.get("a")
    registered = await registry.register("a", files(tmp_path))
    assert registered.record is record and registered.is_repaired  # nothing of the name changes
    assert {path: storage.get(path)[0] for path in good} == good
    assert not (await registry.register("a", files(tmp_path))).is_repaired


async def test_a_whole_blob_is_read_and_not_written_again(tmp_path: Path) -> None:
    storage = WatchedFiles(tmp_path / "store")
    registry = await open_registry(storage)
    await registry.register("a", files(tmp_path))
    storage.written.clear()
    await registry.register("b", files(tmp_path))
    assert [path.split("/")[0] for path in storage.written] == ["versions", "adapters"]
    await registry.close()


async def test_deleting_needs_no_space(tmp_path: Path) -> None:
    """On a full disk every write fails; deleting is what helps."""

    class FullDisk(DirectoryStore):
        is_full = False

        def put_if_absent(self, key: str, content: bytes | Path) -> str:
            self._take_space()
            return super().put_if_absent(key, content)

        def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
            self._take_space()
            return super().replace_if_match(key, content, tag)

        def _take_space(self) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "no space")

    storage = FullDisk(tmp_path / "store")
    registry = await open_registry(storage)
    first = (await registry.register("a", files(tmp_path, 1))).record.active_digest
    second = (await registry.register("a", files(tmp_path, 2))).record.active_digest
    await registry.register("b", files(tmp_path, 3))
    storage.is_full = True
    with pytest.raises(Exhausted, match="full"):
        await registry.register("c", files(tmp_path, 4))
    await registry.begin_delete_version("a", first)
    await registry.finish_delete_version(first)
    await registry.begin_delete("b")
    await registry.finish_delete("b")
    assert [path.name for path in (tmp_path / "store" / "blobs").iterdir()] == [second]
    storage.is_full = False
    await registry.close()
    again = await open_registry(str(tmp_path / "store"))
    assert [version.digest for version in again.get("a").versions] == [second]
    assert again.stats().num_registered == 1
    await again.close()


async def test_a_store_that_is_away_refuses_changes_and_loses_none(tmp_path: Path) -> None:
    """A volume that is unmounted: what was answered with success is there when it is back."""
    place = tmp_path / "store"
    registry = await open_registry(str(place))
    await registry.register("a", files(tmp_path, 1))
    place.rename(tmp_path / "away")
    for change in (
        registry.register("b", files(tmp_path, 2)),
        registry.register("a", files(tmp_path, 2)),
        registry.update("a", display_name="x"),
        registry.begin_delete("a"),
    ):
        with pytest.raises(StoreUnavailable, match="not the one that this server opened"):
            await change
    assert not place.exists()
    assert registry.resolve("a")
    (tmp_path / "away").rename(place)
    await registry.register("b", files(tmp_path, 2))
    await registry.close()
    again = await open_registry(str(place))
    assert [record.adapter_id for record in again.list_part()[0]] == ["a", "b"]
    await again.close()

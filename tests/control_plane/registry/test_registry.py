"""Names, versions and crashes."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.errors import (
    AdapterNotActive,
    AdapterNotFound,
    AdapterNotServed,
    AdapterVersionActive,
    BaseModelMismatch,
    EtagMismatch,
    Exhausted,
    InvalidRequest,
    StoreUnavailable,
)
from control_plane.registry.model.served_modules import ModuleKind, ServedModule, WorkerReport
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.name_index import NameIndex
from control_plane.registry.peft import packing
from control_plane.registry.records import AdapterState
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.remote_files import open_files
from control_plane.registry.store.store_files import LocalFiles, StoreFiles, StoreLocked
from tests.control_plane.registry.rig import SHAPES, Crash, base_model, files, open_registry


class FailingFiles(LocalFiles):
    """Fails at one mutation, before or after it took effect. A move is one, though it writes nothing."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fail_at: int | None = None
        self.is_after = False
        self.error: Callable[[], BaseException] = lambda: Crash()
        self.num_mutations = 0

    def _step(self, mutate: Callable[[], None]) -> None:
        self.num_mutations += 1
        is_now = self.num_mutations == self.fail_at
        if is_now and not self.is_after:
            raise self.error()
        if self.fail_at is not None and self.num_mutations > self.fail_at and isinstance(self.error(), Crash):
            raise Crash  # dead
        mutate()
        if is_now:
            raise self.error()

    def write(self, path: str, data: bytes) -> None:
        self._step(lambda: LocalFiles.write(self, path, data))

    def write_file(self, path: str, source: Path) -> None:
        self._step(lambda: LocalFiles.write_file(self, path, source))

    def move(self, path: str, new_path: str) -> None:
        self._step(lambda: LocalFiles.move(self, path, new_path))

    def delete(self, path: str) -> None:
        self._step(lambda: LocalFiles.delete(self, path))

    def delete_tree(self, path: str) -> None:
        self._step(lambda: LocalFiles.delete_tree(self, path))


class WatchedFiles(LocalFiles):
    """Remembers what was written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []

    def write(self, path: str, data: bytes) -> None:
        self.written.append(path)
        super().write(path, data)

    def write_file(self, path: str, source: Path) -> None:
        self.written.append(path)
        super().write_file(path, source)


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    return open_files(str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}")


@pytest.fixture
async def registry(storage: StoreFiles) -> AsyncIterator[Registry]:
    opened = await open_registry(storage)
    yield opened
    await opened.close()


async def test_a_name_points_to_versions_and_rolls_back(registry: Registry, tmp_path: Path) -> None:
    first = (await registry.register("a", files(tmp_path, 1), display_name="A", labels={"team": "x"})).record
    second = (await registry.register("a", files(tmp_path, 2))).record
    assert [v.digest for v in second.versions] == [second.active_digest, first.active_digest]
    assert (second.display_name, second.labels, second.uid) == ("A", {"team": "x"}, first.uid)
    assert registry.resolve("a").version.digest == second.active_digest
    assert registry.resolve("a", first.active_digest).version.digest == first.active_digest
    back = await registry.activate("a", first.active_digest)
    assert registry.resolve("a").ref.digest == first.active_digest
    assert len({first.etag, second.etag, back.etag}) == 3
    assert registry.stats().num_stored == 2


async def test_the_same_bytes_again_change_nothing_or_become_active(registry: Registry, tmp_path: Path) -> None:
    first = (await registry.register("a", files(tmp_path, 1))).record
    assert (await registry.register("a", files(tmp_path, 1))).record is first
    await registry.register("a", files(tmp_path, 2))
    again = (await registry.register("a", files(tmp_path, 1))).record
    assert (again.active_digest, len(again.versions)) == (first.active_digest, 2)


async def test_registering_returns_the_record_that_was_there_before(registry: Registry, tmp_path: Path) -> None:
    created = await registry.register("a", files(tmp_path, 1))
    assert created.previous is None
    added = await registry.register("a", files(tmp_path, 2))
    assert added.previous is created.record
    same = await registry.register("a", files(tmp_path, 2))
    assert same.previous is same.record is added.record
    checked = await registry.register("a", files(tmp_path, 1), validate_only=True)
    assert checked.previous is added.record and checked.record.active_digest == created.record.active_digest
    assert registry.get("a") is added.record


async def test_validate_only_stores_nothing(registry: Registry, tmp_path: Path) -> None:
    record = (await registry.register("a", files(tmp_path), validate_only=True)).record
    assert record.active_version is not None
    assert (registry.stats().num_registered, registry.stats().num_stored) == (0, 0)


async def test_unknown_names_get_the_nearest_ones(registry: Registry, tmp_path: Path) -> None:
    await registry.register("customer-support-v1", files(tmp_path))
    for typo in ("customer-suport-v1", "kustomer-support-v1", "customer-support-v2"):
        with pytest.raises(AdapterNotFound, match="did you mean 'customer-support-v1'") as caught:
            registry.resolve(typo)
        assert caught.value.resource == f"adapters/{typo}"
    with pytest.raises(AdapterNotFound, match="no version"):
        registry.resolve("customer-support-v1", "0" * 64)


BAD_IDS = ["", "A", "../x", "a/b", "a..b", ".a", "a" * 64, "a\n", "ä", "a\0", "-a", "a b"]


@pytest.mark.parametrize("adapter_id", BAD_IDS)
async def test_path_like_names_never_reach_the_store(registry: Registry, tmp_path: Path, adapter_id: str) -> None:
    for call in (registry.register(adapter_id, {}), registry.set_pinned(adapter_id)):
        with pytest.raises(InvalidRequest, match="adapter id"):
            await call
    with pytest.raises(InvalidRequest, match="adapter id"):
        registry.resolve(adapter_id)


async def test_labels_and_display_names_have_limits(registry: Registry, tmp_path: Path) -> None:
    await registry.register("a", files(tmp_path))
    bad = [{"Key": "v"}, {"k": "v" * 257}, {f"k{i}": "v" for i in range(65)}]
    for labels in bad:
        with pytest.raises(InvalidRequest, match="labels"):
            await registry.update("a", labels=labels)
    with pytest.raises(InvalidRequest, match="display_name"):
        await registry.update("a", display_name="ä" * 129)
    changed = await registry.update("a", labels={"k": "v"}, display_name="x")
    assert (await registry.update("a", labels={})).display_name == "x"
    assert changed.labels == {"k": "v"}


async def test_of_two_changes_with_one_etag_one_wins(registry: Registry, tmp_path: Path) -> None:
    etag = (await registry.register("a", files(tmp_path))).record.etag
    calls = [registry.update("a", display_name=str(turn), etag=etag) for turn in range(5)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(result, EtagMismatch) for result in results) == 4


async def test_deleting_takes_two_steps_and_spares_shared_blobs(registry: Registry, tmp_path: Path) -> None:
    shared = (await registry.register("a", files(tmp_path, 1))).record.active_digest
    own = (await registry.register("a", files(tmp_path, 2))).record.active_digest
    await registry.register("b", files(tmp_path, 1))
    with pytest.raises(EtagMismatch):
        await registry.begin_delete("a", "stale")
    assert await registry.begin_delete("a") == sorted([shared, own])
    assert (registry.is_named(shared), registry.is_named(own)) == (True, False)
    with pytest.raises(AdapterNotFound, match="being deleted"):
        registry.resolve("a")
    for call in (registry.register("a", files(tmp_path, 3)), registry.set_pinned("a"), registry.finish_delete("b")):
        with pytest.raises(AdapterNotActive):
            await call
    await registry.finish_delete("a")
    with pytest.raises(AdapterNotFound):
        registry.get("a")
    assert registry.resolve("b").version.digest == shared
    assert registry.stats().num_stored == 1


async def test_pinned_digests_are_the_active_versions_of_pinned_names(registry: Registry, tmp_path: Path) -> None:
    await registry.register("a", files(tmp_path))
    await registry.set_pinned("a")
    assert registry.pinned_digests() == [registry.get("a").active_digest]
    await registry.clear_pinned("a")
    assert registry.pinned_digests() == []


async def test_pages_follow_the_names_through_changes(registry: Registry, tmp_path: Path) -> None:
    for name in ("d", "b", "a", "c"):
        await registry.register(name, files(tmp_path))
    page, token = registry.list_page(2)
    assert [record.adapter_id for record in page] == ["a", "b"]
    await registry.register("bb", files(tmp_path))
    rest, end = registry.list_page(100, token)
    assert ([record.adapter_id for record in rest], end) == (["bb", "c", "d"], "")
    for bad in ((1001, ""), (-1, ""), (1, "../x")):
        with pytest.raises(InvalidRequest, match="page_"):
            registry.list_page(*bad)


async def test_versions_are_paged_newest_first(registry: Registry, tmp_path: Path) -> None:
    digests = [(await registry.register("a", files(tmp_path, seed))).record.active_digest for seed in range(3)]
    page, token = registry.versions_page("a", 2)
    rest, end = registry.versions_page("a", 2, token)
    assert ([v.digest for v in page + rest], end) == (digests[::-1], "")
    with pytest.raises(InvalidRequest, match="page_token"):
        registry.versions_page("a", 2, "x")


async def test_concurrent_registrations_and_deletions_stay_whole(
    registry: Registry, storage: StoreFiles, tmp_path: Path
) -> None:
    """The same bytes under many names, some deleted meanwhile: what is listed can be read."""
    source = files(tmp_path)

    async def come_and_go(name: str) -> None:
        await registry.register(name, source)
        await registry.begin_delete(name)
        await registry.finish_delete(name)

    await asyncio.gather(
        *(come_and_go(f"t{i}") for i in range(6)), *(registry.register(f"k{i}", source) for i in range(6))
    )
    digest = registry.resolve("k0").version.digest
    assert registry.stats().num_registered == 6
    assert ArtifactStore(storage).has_blob(digest)
    assert registry.stats().num_locks == 0


async def test_a_hundred_thousand_names_are_listed_page_by_page() -> None:
    index = NameIndex(f"adapter-{number:06d}" for number in range(100_000) if number != 50_001)
    index.add("adapter-050001")
    index.add("adapter-050001x")
    index.remove("adapter-050001x")
    assert len(index) == 100_000
    assert index.page("adapter-050000", 2) == (["adapter-050001", "adapter-050002"], True)
    assert "adapter-012345" in index.nearest("adapter-O12345")


# ---- versions ----


async def test_versions_are_deleted_but_for_the_active_one(
    registry: Registry, storage: StoreFiles, tmp_path: Path
) -> None:
    first, second, third = [
        (await registry.register("a", files(tmp_path, seed))).record.active_digest for seed in range(3)
    ]
    await registry.register("b", files(tmp_path, 0))
    etag = registry.get("a").etag
    with pytest.raises(AdapterVersionActive, match=f"version {third} is the active one .*activate another version"):
        await registry.begin_delete_version("a", third)
    with pytest.raises(EtagMismatch):
        await registry.begin_delete_version("a", first, "stale")
    with pytest.raises(AdapterNotFound, match="no version"):
        await registry.begin_delete_version("a", "0" * 64)
    with pytest.raises(InvalidRequest, match="digest"):
        await registry.begin_delete_version("a", "../x")
    await registry.begin_delete_version("a", first, etag)
    with pytest.raises(AdapterNotFound, match="no version"):
        registry.resolve("a", first)
    assert ArtifactStore(storage).has_blob(first)  # until the streams that use it have ended
    await registry.finish_delete_version(first)
    assert registry.resolve("b", first) and ArtifactStore(storage).has_blob(first)  # another name has the same weights
    await registry.begin_delete_version("a", second)
    await registry.finish_delete_version(second)
    assert not ArtifactStore(storage).has_blob(second)
    record = registry.get("a")
    assert [version.digest for version in record.versions] == [third] and record.etag != etag
    again = (await registry.register("a", files(tmp_path, 1))).record
    assert [(version.digest, version.number) for version in again.versions] == [(second, 4), (third, 3)]


async def test_a_version_that_is_registered_again_while_it_is_deleted_keeps_its_weights(
    registry: Registry, storage: StoreFiles, tmp_path: Path
) -> None:
    first = (await registry.register("a", files(tmp_path, 1))).record.active_digest
    await registry.register("a", files(tmp_path, 2))
    await registry.begin_delete_version("a", first)
    await registry.register("a", files(tmp_path, 1))
    await registry.finish_delete_version(first)
    assert registry.resolve("a").version.digest == first and ArtifactStore(storage).has_blob(first)


async def test_a_full_name_says_how_to_make_room_and_takes_its_own_versions(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.registry.registry.MAX_VERSIONS", 2)
    first = (await registry.register("a", files(tmp_path, 1))).record.active_digest
    await registry.register("a", files(tmp_path, 2))
    with pytest.raises(Exhausted, match=r"has 2 versions, the limit; delete .*DeleteAdapterVersion"):
        await registry.register("a", files(tmp_path, 3))
    assert (await registry.register("a", files(tmp_path, 1))).record.active_digest == first
    await registry.begin_delete_version("a", registry.get("a").versions[0].digest)
    await registry.register("a", files(tmp_path, 3))


async def test_a_change_of_a_name_writes_no_version_anew(tmp_path: Path) -> None:
    storage = WatchedFiles(tmp_path / "store")
    registry = await open_registry(storage)
    for seed in range(5):
        await registry.register("a", files(tmp_path, seed))
    storage.written.clear()
    await registry.update("a", labels={"k": "v"})
    await registry.activate("a", registry.get("a").versions[3].digest)
    await registry.set_pinned("a")
    assert storage.written == ["adapters/a.json"] * 3
    storage.written.clear()
    digest = (await registry.register("a", files(tmp_path, 5))).record.active_digest
    documents = [path for path in storage.written if not path.startswith("blobs/")]
    assert documents == [f"versions/a/{digest}.json", "adapters/a.json"]
    storage.written.clear()
    await registry.begin_delete_version("a", registry.get("a").versions[2].digest)
    assert storage.written == ["adapters/a.json"]
    await registry.close()


# ---- what survives ----


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    first = await open_registry(str(tmp_path / "store"))
    await first.register("a", files(tmp_path, 1), labels={"k": "v"})
    record = await first.set_pinned("a")
    with pytest.raises(StoreLocked):
        await open_registry(str(tmp_path / "store"))
    await first.close()
    second = await open_registry(str(tmp_path / "store"))
    assert second.get("a") == record
    assert second.incarnation == first.incarnation + 1
    await second.close()


@pytest.mark.parametrize("is_after", [False, True])
async def test_a_crash_at_any_step_leaves_all_or_nothing(tmp_path: Path, is_after: bool) -> None:
    """Register, register anew, delete a version, delete: after a crash at any step what is listed is whole."""
    for step in range(1, 60):
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
        storage.close()
        again = await open_registry(str(root))
        assert again.resolve("kept").version.digest == kept
        named = {version.digest for record in again.list_page()[0] for version in record.versions}
        for record in again.list_page()[0]:
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


async def test_another_base_model_or_type_is_reported_and_undone_by_going_back(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    registry = await open_registry(place)
    await registry.register("a", files(tmp_path))
    await registry.close()
    for other in (base_model(fingerprint="cd" * 32), base_model("bfloat16")):
        registry = await open_registry(place, other)
        assert registry.get("a").state is AdapterState.FAILED
        with pytest.raises(BaseModelMismatch, match="register it again"):
            registry.resolve("a")
        await registry.close()
    registry = await open_registry(place)
    assert registry.resolve("a")
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
        patch.setattr(packing, "ingest", fail)
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
    listed = [record.adapter_id for record in registry.list_page()[0]]
    stored = ArtifactStore(str(tmp_path / "store")).list_names().records
    assert tuple(listed) == stored


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
async def test_registering_the_same_bytes_again_repairs_a_damaged_blob(
    registry: Registry, storage: StoreFiles, tmp_path: Path, damage: str
) -> None:
    digest = (await registry.register("a", files(tmp_path))).record.active_digest
    chunk, manifest = f"blobs/{digest}/00001.safetensors", f"blobs/{digest}/manifest.json"
    good = {path: storage.read(path) for path in (chunk, manifest)}
    if damage == "flip":
        storage.write(chunk, good[chunk][:-1] + bytes([good[chunk][-1] ^ 1]))
    elif damage == "cut":
        storage.write(chunk, good[chunk][:-1])
    elif damage == "missing":
        storage.delete(chunk)
    else:
        storage.write(manifest, b"{}")
    record = registry.get("a")
    registered = await registry.register("a", files(tmp_path))
    assert registered.record is record and registered.is_repaired  # nothing of the name changes
    assert {path: storage.read(path) for path in good} == good
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

    class FullDisk(LocalFiles):
        is_full = False

        def _write(self, path: str, fill: Any) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "no space")
            super()._write(path, fill)

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
    assert [record.adapter_id for record in again.list_page()[0]] == ["a", "b"]
    await again.close()


def served(*without: str, reason: str = "it sees only some of the tokens") -> WorkerReport:
    """The report of a worker that serves all modules but those whose names end so."""
    return WorkerReport(
        64,
        {
            name: ServedModule(ModuleKind.LINEAR, columns, rows, reason if name.endswith(without) else "")
            for name, (rows, columns) in SHAPES.items()
        },
    )


async def test_an_adapter_that_the_workers_cannot_serve_says_so_until_one_can(tmp_path: Path) -> None:
    """Registered before a worker was there to tell: its requests fail for good, by name, and not as "try again"."""
    reports = WorkerReports()
    registry = await open_registry(str(tmp_path / "store"), reports=reports)
    await registry.register("a", files(tmp_path))
    digest = registry.resolve("a").version.digest
    reports.update([served("v_proj")])
    reason = "it changes model.layers.0.self_attn.v_proj, which takes no adapters: it sees only some of the tokens"
    record = registry.get("a")
    assert (record.state, record.state_reason) == (AdapterState.FAILED, reason)
    assert registry.list_page()[0][0] == record
    for ask in (lambda: registry.resolve("a"), lambda: registry.resolve("a", digest)):
        with pytest.raises(AdapterNotServed, match=r"model\.layers\.0\.self_attn\.v_proj, which takes no adapters"):
            ask()
    with pytest.raises(AdapterNotServed, match="v_proj"):
        await registry.activate("a", digest)
    with pytest.raises(InvalidRequest, match="takes no adapters: it sees only some of the tokens"):
        await registry.register("b", files(tmp_path))
    with pytest.raises(InvalidRequest, match="takes no adapters"):
        await registry.register("b", files(tmp_path), validate_only=True)
    reports.update([served("v_proj"), served()])  # one of two workers can
    assert registry.get("a").state is AdapterState.ACTIVE
    assert registry.resolve("a").version.digest == digest
    await registry.register("b", files(tmp_path))
    await registry.close()


async def test_changes_of_an_adapter_that_is_not_served_are_kept(tmp_path: Path) -> None:
    reports = WorkerReports()
    reports.update([served()])
    registry = await open_registry(str(tmp_path / "store"), reports=reports)
    await registry.register("a", files(tmp_path))
    reports.update([served("q_proj")])
    assert (await registry.update("a", display_name="A")).state is AdapterState.FAILED
    reports.update([served()])
    record = registry.get("a")
    assert (record.display_name, record.state, record.state_reason) == ("A", AdapterState.ACTIVE, "")
    assert (await registry.register("a", files(tmp_path))).record.revision == record.revision, "nothing changed"
    await registry.close()


async def test_judging_many_adapters_again_costs_each_a_look_when_it_is_read(tmp_path: Path) -> None:
    """A worker that attaches must not hold up the server: nothing goes over all records then."""
    reports = WorkerReports()
    registry = await open_registry(str(tmp_path / "store"), reports=reports)
    for index in range(3):
        await registry.register(f"a{index}", files(tmp_path, index))
    looks: list[object] = []
    plain = reports.module_error
    reports.module_error = lambda names: looks.append(names) or plain(names)  # type: ignore[method-assign,func-returns-value]
    reports.update([served()])
    assert looks == []
    for _ in range(5):
        assert registry.resolve("a1")
    assert len(looks) == 1
    await registry.close()

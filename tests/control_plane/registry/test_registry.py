"""Names, versions, labels and pages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from control_plane.errors import (
    AdapterNotActive,
    AdapterNotFound,
    AdapterVersionActive,
    BaseModelMismatch,
    EtagMismatch,
    Exhausted,
    InvalidRequest,
)
from control_plane.registry.catalog import versions_page
from control_plane.registry.name_index import NameIndex, nearest
from control_plane.registry.records import AdapterState
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.store import FencedStore, StoreLocked
from tests.control_plane.registry.rig import base_model, files, open_registry
from tests.control_plane.registry.watched_files import WatchedFiles


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


async def test_a_pin_is_set_and_cleared_and_lasts(registry: Registry, tmp_path: Path) -> None:
    await registry.register("a", files(tmp_path))
    await registry.set_pinned("a")
    assert registry.get("a").is_pinned
    await registry.clear_pinned("a")
    assert not registry.get("a").is_pinned


async def test_pages_follow_the_names_through_changes(registry: Registry, tmp_path: Path) -> None:
    for name in ("d", "b", "a", "c"):
        await registry.register(name, files(tmp_path))
    page, after = registry.list_part(count=2)
    assert [record.adapter_id for record in page] == ["a", "b"]
    await registry.register("bb", files(tmp_path))
    rest, end = registry.list_part(after)
    assert ([record.adapter_id for record in rest], end) == (["bb", "c", "d"], "")
    with pytest.raises(InvalidRequest, match="page_token"):
        registry.list_part("../x")


async def test_versions_are_paged_newest_first(registry: Registry, tmp_path: Path) -> None:
    digests = [(await registry.register("a", files(tmp_path, seed))).record.active_digest for seed in range(3)]
    page, token = versions_page(registry.get("a"), 2)
    rest, end = versions_page(registry.get("a"), 2, token)
    assert ([v.digest for v in page + rest], end) == (digests[::-1], "")
    with pytest.raises(InvalidRequest, match="page_token"):
        versions_page(registry.get("a"), 2, "x")


async def test_concurrent_registrations_and_deletions_stay_whole(
    registry: Registry, storage: FencedStore, tmp_path: Path
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
    assert index.page("adapter-050000", 2) == ["adapter-050001", "adapter-050002"]
    assert index.page("adapter-099990", 100, prefix="adapter-09999") == [
        f"adapter-09999{last}" for last in range(1, 10)
    ]
    assert index.page("", 2, prefix="adapter-05000") == ["adapter-050000", "adapter-050001"]
    assert index.page("adapter-1", 2) == index.page("", 0) == index.page("", 2, prefix="b") == []
    assert "adapter-012345" in nearest([index], "adapter-O12345")


async def test_versions_are_deleted_but_for_the_active_one(
    registry: Registry, storage: FencedStore, tmp_path: Path
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
    registry: Registry, storage: FencedStore, tmp_path: Path
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
    monkeypatch.setattr("control_plane.registry.new_version.MAX_VERSIONS", 2)
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

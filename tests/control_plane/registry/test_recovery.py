"""Opening a store: what an older control plane, a crash or somebody else left there."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest

from control_plane.errors import AdapterNotActive, StoreUnavailable
from control_plane.registry.records import AdapterState
from control_plane.registry.recovery import recover
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.bucket import Bucket, memory_store
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.store import Entry
from control_plane.registry.versions.rollout import NO_ROLLOUT
from tests.control_plane.registry.rig import CALLS, Crash, files, open_registry


def make_old(store: Path, adapter_id: str, **fields: Any) -> None:
    """Write a record and its versions as control planes did when records held their versions."""
    path = store / "adapters" / f"{adapter_id}.json"
    document = json.loads(path.read_bytes())
    versions = []
    for digest in document.pop("version_digests"):
        version = json.loads((store / "versions" / adapter_id / f"{digest}.json").read_bytes())
        del version["format"], version["number"]
        versions.append(version)
        (store / "versions" / adapter_id / f"{digest}.json").unlink()
    (store / "versions" / adapter_id).rmdir()
    for name in ("last_number", "owner", "visibility", "shared_with"):
        del document[name]
    document.pop("rollout", None)
    old = {"format": 1, "state": "active", "state_reason": "", "versions": versions}
    path.write_text(json.dumps(document | old | fields))


async def test_an_older_store_is_read_and_written_anew(tmp_path: Path) -> None:
    store = tmp_path / "store"
    registry = await open_registry(str(store))
    for seed in range(3):
        await registry.register("a", files(tmp_path, seed), labels={"k": "v"})
    await registry.register("gone", files(tmp_path, 1))
    before = registry.get("a")
    await registry.close()
    make_old(store, "a")
    make_old(store, "gone", state="deleting")
    for _ in range(2):  # as the older one left it, and as this one wrote it
        registry = await open_registry(str(store))
        assert registry.list_part()[0] == [replace(before, rollout=NO_ROLLOUT)]
        assert registry.resolve("a", before.versions[2].digest)
        await registry.close()
        assert sorted(path.stem for path in (store / "versions" / "a").iterdir()) == sorted(
            version.digest for version in before.versions
        )
    assert [path.name for path in (store / "versions").iterdir()] == ["a"]
    assert json.loads((store / "adapters" / "a.json").read_bytes())["format"] == 3


@pytest.mark.parametrize("damage", ["damaged", ""])
@pytest.mark.parametrize("broken", ["adapters/b.json", "versions/b/{digest}.json"])
async def test_weights_of_what_cannot_be_read_are_kept(tmp_path: Path, broken: str, damage: str) -> None:
    """A record that is damaged, or one of its versions that is not the active one, names weights all the same."""
    store = tmp_path / "store"
    registry = await open_registry(str(store))
    for seed in range(2):
        await registry.register("b", files(tmp_path, seed))
    [_, first] = registry.get("b").versions
    await registry.close()
    path = store / broken.format(digest=first.digest)
    whole = path.read_bytes()
    path.write_text(damage)
    await (await open_registry(str(store))).close()
    path.write_bytes(whole)
    registry = await open_registry(str(store))
    assert registry.resolve("b", first.digest).version == first
    await registry.close()
    assert (store / "blobs" / first.digest / "manifest.json").exists()


async def test_a_crash_while_an_older_record_is_written_anew_loses_nothing(tmp_path: Path) -> None:
    """Versions are written first, and the old record holds them until the last one is there."""
    store = tmp_path / "store"
    registry = await open_registry(str(store))
    for seed in range(2):
        await registry.register("a", files(tmp_path, seed))
    before = registry.get("a")
    await registry.close()
    for fail_at in (1, 2, 3):
        make_old(store, "a") if json.loads((store / "adapters" / "a.json").read_bytes())["format"] != 1 else None

        class CrashingStore(DirectoryStore):
            num_writes = 0
            crash_at = fail_at

            def put_if_absent(self, key: str, content: bytes | Path) -> str:
                self._crash()
                return super().put_if_absent(key, content)

            def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
                if "incarnation" not in key:
                    self._crash()
                return super().replace_if_match(key, content, tag)

            def _crash(self) -> None:
                self.num_writes += 1
                if self.num_writes == self.crash_at:
                    raise Crash

        opened = CrashingStore(store)
        with pytest.raises(Crash):
            await open_registry(opened)
        registry = await open_registry(str(store))
        assert registry.list_part()[0] == [replace(before, rollout=NO_ROLLOUT)]
        await registry.close()


async def test_small_files_are_read_many_at_a_time(tmp_path: Path) -> None:
    """Each read of a record, a version or a blob's manifest waits until eight of them are under way."""

    class SlowFiles(DirectoryStore):
        barrier: threading.Barrier | None = None

        def _meet(self, key: str) -> None:
            if self.barrier is not None and key not in ("incarnation.json", "format.json"):
                self.barrier.wait(60)

        def get(self, key: str, start: int = 0, size_bytes: int | None = None) -> tuple[bytes, str]:
            self._meet(key)
            return super().get(key, start, size_bytes)

        def head(self, key: str) -> Entry | None:
            self._meet(key)
            return super().head(key)

    registry = await open_registry(str(tmp_path / "store"))
    for number in range(16):
        await registry.register(f"n{number}", files(tmp_path, number))
    await registry.close()
    slow = SlowFiles(tmp_path / "store")
    slow.barrier = threading.Barrier(8)
    registry = await open_registry(slow)
    assert registry.stats().num_registered == 16
    slow.barrier = None
    await registry.close()


async def test_a_lost_document_fails_the_active_version_and_drops_another(tmp_path: Path) -> None:
    store = tmp_path / "store"
    registry = await open_registry(str(store))
    first = (await registry.register("a", files(tmp_path, 1))).record.active_digest
    second = (await registry.register("a", files(tmp_path, 2))).record.active_digest
    await registry.close()
    documents = {digest: store / "versions" / "a" / f"{digest}.json" for digest in (first, second)}
    saved = documents[second].read_bytes()
    documents[second].write_bytes(saved.replace(second.encode(), first.encode()))
    registry = await open_registry(str(store))
    assert registry.get("a").state is AdapterState.FAILED
    with pytest.raises(AdapterNotActive, match="document of its active version"):
        registry.resolve("a")
    assert registry.resolve("a", first)
    assert (await registry.activate("a", first)).state is AdapterState.ACTIVE
    await registry.close()
    registry = await open_registry(str(store))
    assert [version.digest for version in registry.get("a").versions] == [first]
    assert (await registry.register("a", files(tmp_path, 2))).record.versions[
        0
    ].number == 3  # a number is never given twice
    await registry.close()


async def test_a_store_that_others_reach_keeps_what_they_may_be_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second control plane opened the store while the first one wrote a blob: it removed what was there."""
    place = f"memory://{tmp_path.name}"
    memory = Bucket(memory_store(tmp_path.name))
    memory.put_if_absent(f"blobs/{'a' * 64}/00000.safetensors", b"half")
    memory.put_if_absent(f"blobs/{'b' * 64}/manifest.json", b"whole, not named yet")
    registry = await open_registry(place)
    await registry.close()
    assert [entry.name for entry in memory.list("blobs")] == ["a" * 64, "b" * 64]
    assert registry.stats().num_stored == 0
    monkeypatch.setattr(ArtifactStore, "may_be_written", lambda self, digest: False)  # a day later
    registry = await open_registry(place)
    await registry.close()
    assert memory.list("blobs") == []


async def test_what_an_earlier_version_was_deleting_is_deleted_or_kept(tmp_path: Path) -> None:
    """It renamed the record; on an object store that is a copy, and a rename that broke off left both."""
    place, memory = f"memory://{tmp_path.name}", Bucket(memory_store(tmp_path.name))
    registry = await open_registry(place)
    for seed, name in enumerate(("kept", "gone")):
        await registry.register(name, files(tmp_path, seed))
    await registry.close()
    for name in ("kept", "gone"):
        memory.put_if_absent(f"adapters/{name}.deleting", memory.get(f"adapters/{name}.json")[0])
    memory.delete("adapters/gone.json")
    registry = await open_registry(place)
    assert [record.adapter_id for record in registry.list_part()[0]] == ["kept"] and registry.resolve("kept")
    assert [entry.name for entry in memory.list("adapters")] == ["kept.json"]
    await registry.close()


async def test_a_deletion_that_could_not_begin_deletes_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, memory = f"memory://{tmp_path.name}", Bucket(memory_store(tmp_path.name))
    registry = await open_registry(place)
    await registry.register("a", files(tmp_path, 1))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no response")

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", fail)
        with pytest.raises(StoreUnavailable):
            await registry.begin_delete("a")
    await registry.update("a", display_name="still here")
    await registry.close()
    registry = await open_registry(place)
    assert registry.get("a").display_name == "still here" and registry.resolve("a")
    await registry.begin_delete("a")
    await registry.close()
    registry = await open_registry(place)  # killed before the deletion ended
    assert registry.list_part()[0] == []
    assert memory.list("adapters") == []
    await registry.close()


async def test_two_stores_on_one_bucket_do_not_meet(tmp_path: Path) -> None:
    """The case that lost acknowledged adapters: B recovers between A's first chunk and A's manifest."""
    place = f"memory://{tmp_path.name}"
    first = ArtifactStore(place)
    first.acquire()
    source = tmp_path / "chunk"
    source.write_bytes(b"first")
    digest = "a" * 64
    first.put_chunk(digest, 0, source)
    second = ArtifactStore(place, is_exclusive=True)  # the operator was wrong
    await asyncio.to_thread(second.acquire)
    await recover(second, CALLS)
    assert second.read_range(digest, 0, 0, 10) == b"first"
    second.close()
    first.close()


async def test_a_deeply_nested_document_does_not_end_the_start(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    await registry.register("good", files(tmp_path))
    await registry.register("bad", files(tmp_path))
    await registry.close()
    nested = b'{"a":' * 100_000
    (tmp_path / "store" / "adapters" / "bad.json").write_bytes(nested)
    (tmp_path / "store" / "incarnation.json").write_bytes(nested)
    registry = await open_registry(str(tmp_path / "store"))
    assert registry.resolve("good")
    assert "nested too deeply" in registry.get("bad").state_reason
    await registry.close()

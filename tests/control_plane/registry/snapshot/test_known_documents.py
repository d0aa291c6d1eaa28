"""A start that knows what an earlier one read finds what a start without that knowledge finds, whatever happened."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.access.visibility import Ownership, Visibility
from control_plane.registry.records import AdapterRecord
from control_plane.registry.recovery import Recovered, recover
from control_plane.registry.snapshot import known_documents
from control_plane.registry.snapshot.known_documents import KnownDocuments
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.record_documents import encode_record, encode_version
from control_plane.registry.versions.rollout import Canary, Rollout
from control_plane.registry.versions.verification import Verification
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict
from tests.control_plane.api.fake_adapters import adapter_record, adapter_version
from tests.control_plane.registry.rig import CALLS

SIGNED = SignatureVerdict("release", SignatureMethod.CERTIFICATE, "0" * 64, 5.0, "CN=release")
VERIFIED = Verification(True, 0.1, 0.01, 2.0, 4, 92, 7.0, 1.5)


def digest_of(number: int) -> str:
    return f"{number:064x}"


def record(name: str, *numbers: int, revision: int = 1) -> AdapterRecord:
    """A name with versions of all sorts, the newest first."""
    versions = [
        replace(adapter_version(digest_of(number), number=number), base_fingerprint="ab" * 32) for number in numbers
    ]
    changes: list[dict[str, Any]] = [{"signature": SIGNED}, {"verification": VERIFIED}, {"labels": ("a", "b")}]
    for place, change in enumerate(changes):
        versions[place::3] = [replace(version, **change) for version in versions[place::3]]
    shared = Ownership("team-a", Visibility.SHARED, ("team-b",))
    rollout = Rollout({"stable": versions[-1].digest}, Canary(versions[-1].digest, 5), 7, None, (versions[-1].digest,))
    made = adapter_record(name, versions, versions[0].digest, revision=revision, labels={"team": name})
    return replace(made, ownership=shared, rollout=rollout) if len(numbers) > 1 else made


class World:
    """A store in a directory that is written by hand, and starts on it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "store"
        self.path = directory / "registry.snapshot"
        for name in ("adapters", "versions", "blobs"):
            (self.root / name).mkdir(parents=True)

    def write(self, record: AdapterRecord) -> None:
        store = ArtifactStore(str(self.root))
        for version in record.versions:
            store.write_version(record.adapter_id, version.digest, encode_version(version))
            blob = self.root / "blobs" / version.digest
            blob.mkdir(exist_ok=True)
            (blob / "manifest.json").write_bytes(b"{}")
        store.write_record(record.adapter_id, encode_record(record), expected=lambda _: True)

    def delete(self, name: str) -> None:
        store = ArtifactStore(str(self.root))
        store.delete_record(name, expected=lambda _: True)
        store.delete_versions(name)

    async def start(self, *, min_read: int = 1, store: str | None = None) -> tuple[Recovered, KnownDocuments]:
        known = KnownDocuments(self.path, store or str(self.root), min_read=min_read)
        recovered = await recover(ArtifactStore(str(self.root)), CALLS, known)
        known.wait()
        return recovered, known

    async def check(self, **options: object) -> KnownDocuments:
        """Start with the file and without, compare, and return the first."""
        recovered, known = await self.start(**options)  # type: ignore[arg-type]
        assert recovered == await recover(ArtifactStore(str(self.root)), CALLS)
        return known


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.write(record("a", 3, 2, 1))
    made.write(record("b", 4))
    made.write(record("c", 7, 6, 5))
    return made


NUM_DOCUMENTS = 3 + 7


async def test_a_start_reads_nothing_that_the_start_before_it_read(world: World) -> None:
    first = await world.check()
    assert (first.num_known, first.num_read) == (0, NUM_DOCUMENTS)
    for _ in range(2):
        again = await world.check()
        assert (again.num_known, again.num_read) == (NUM_DOCUMENTS, 0)
    assert world.path.stat().st_mode & 0o777 == 0o600


async def test_what_was_written_since_is_read(world: World) -> None:
    await world.check()
    world.write(record("b", 8, 4, revision=2))
    assert (await world.check(min_read=100)).num_read == 3  # the record, and both versions: 4 was written again
    assert (await world.check(min_read=100)).num_read == 3, "the file was not written"
    assert (await world.check(min_read=3)).num_read == 3
    assert (await world.check()).num_read == 0, "it was"


def edit_in_place(path: Path) -> None:
    """Other bytes of the same number, under the same inode, as an operator's editor may do it."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"team-a", b"team-z").replace(b'"kind": "lora"', b'"kind": "dora"'))


def edit_unseen(path: Path) -> None:
    """As above, and with the time of before."""
    found = path.stat()
    edit_in_place(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def put_back(path: Path) -> None:
    """Other bytes of the same number and time, as a copy from a backup has them."""
    found, content = path.stat(), path.read_bytes()
    path.rename(path.with_name("kept"))
    path.write_bytes(content.replace(b"team-a", b"team-z").replace(b'"kind": "lora"', b'"kind": "dora"'))
    path.with_name("kept").unlink()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def spoil(path: Path) -> None:
    path.write_bytes(b"{")


@pytest.mark.parametrize("change", [edit_in_place, edit_unseen, put_back, spoil, Path.unlink])
@pytest.mark.parametrize("which", ["record", "version"])
async def test_a_document_that_was_changed_by_hand_is_noticed(
    world: World, change: Callable[[Path], None], which: str
) -> None:
    await world.check()
    before = (await world.start())[0]
    path = world.root / ("adapters/a.json" if which == "record" else f"versions/b/{digest_of(4)}.json")
    change(path)
    known = await world.check()
    assert known.num_known <= NUM_DOCUMENTS - 1
    assert (await world.start())[0] != before


@pytest.mark.parametrize("place", [0, 20, 60, 200, -1, "empty", "short", "long", "text"])
async def test_a_damaged_file_is_left_out_and_written_anew(world: World, place: int | str) -> None:
    await world.check()
    content = bytearray(world.path.read_bytes())
    match place:
        case int():
            content[place] ^= 1
        case "empty":
            content.clear()
        case "short":
            del content[-7:]
        case "long":
            content += b"\0\0\0\0"
        case "text":
            content[:] = b"not a snapshot\n" * 100
    world.path.write_bytes(content)
    assert (await world.check()).num_read == NUM_DOCUMENTS
    assert (await world.check()).num_read == 0


async def test_a_file_of_another_store_or_of_other_fields_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.check()
    assert (await world.check(store="/elsewhere")).num_read == NUM_DOCUMENTS
    assert (await world.check()).num_read == NUM_DOCUMENTS, "it was written for the other store"
    monkeypatch.setattr(known_documents, "FIELDS", ("a field more",))
    assert (await world.check()).num_read == NUM_DOCUMENTS


async def test_a_file_that_cannot_be_written_or_read_costs_time_only(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.path.mkdir()
    (world.path / "full").touch()
    for _ in range(2):
        assert (await world.check()).num_read == NUM_DOCUMENTS
    assert "snapshot not written" in caplog.text and "snapshot not read" in caplog.text


async def test_a_store_that_others_may_write_to_is_read_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.check()
    store = ArtifactStore(str(world.root))
    monkeypatch.setattr(store, "is_sole", False)
    known = KnownDocuments(world.path, str(world.root))
    await recover(store, CALLS, known)
    assert known.num_known == 0


@pytest.mark.parametrize("seed", range(5))
async def test_random_changes_between_starts_are_found(tmp_path: Path, seed: int) -> None:
    world, generator, numbers = World(tmp_path), random.Random(seed), iter(range(1, 10_000))
    present: dict[str, AdapterRecord] = {}
    for start in range(12):
        for _ in range(generator.randrange(6)):
            name = generator.choice("abcdefgh")
            match generator.randrange(4):
                case 0 if name in present:
                    world.delete(name)
                    del present[name]
                case 1 if name in present:
                    edit_in_place(world.root / f"adapters/{name}.json")
                case 2 if name in present:
                    version = generator.choice(present[name].versions)
                    spoil(world.root / f"versions/{name}/{version.digest}.json")
                case _:
                    made = record(name, *(next(numbers) for _ in range(generator.randrange(1, 5))), revision=start + 1)
                    world.write(made)
                    present[name] = made
        await world.check(min_read=generator.choice((1, 4, 1000)))

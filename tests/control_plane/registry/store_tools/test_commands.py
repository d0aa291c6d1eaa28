"""`motet store`: what it says of a store, and what it carries from one to another."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from motet.cli.main import main

from control_plane.registry.records import AdapterRecord
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.store_format import STORE_FORMAT
from tests.control_plane.registry.rig import files, open_registry
from tests.control_plane.registry.store.buckets import s3_server
from tests.control_plane.registry.test_recovery import make_old

OK, REFUSED, UNAVAILABLE, CORRUPT = 0, 3, 6, 8
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `motet store`: its exit code, and what it printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["store", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def fill(place: Path | str, tmp_path: Path, **seeds: tuple[int, ...]) -> list[AdapterRecord]:
    """Register adapters by name, a version for each seed; everything that is registered there then."""

    async def register() -> list[AdapterRecord]:
        registry = await open_registry(str(place))
        try:
            for name, of_versions in seeds.items():
                for seed in of_versions:
                    await registry.register(name, files(tmp_path, seed), labels={"seed": str(seed)})
            return registry.list_part()[0]
        finally:
            await registry.close()

    return asyncio.run(register())


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["directory", "s3"])
def other(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A second store, which is empty."""
    if request.param == "directory":
        (tmp_path / "other").mkdir()
        return str(tmp_path / "other")
    url: str = request.getfixturevalue("s3_url")
    return f"{url}/{tmp_path.name}"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of two adapters with three versions of two blobs."""
    fill(tmp_path / "store", tmp_path, a=(0, 1), b=(1,))
    return tmp_path / "store"


def test_adapters_move_to_another_store_as_they_are(store: Path, other: str, tmp_path: Path, run: Command) -> None:
    archive = tmp_path / "all.tar"
    code, out, _ = run("export", archive, "--store", store)
    assert code == OK and out.startswith("exported 2 adapters with 2 blobs of ")
    code, out, _ = run("import", archive, "--store", other)
    assert code == OK and out.startswith("imported 2 adapters with 2 blobs of ")
    assert run("verify", "--store", other)[1].endswith(": 0 problems\n")
    assert fill(other, tmp_path) == fill(store, tmp_path), "a server finds the same records and versions"
    # Once more changes nothing, and says so.
    code, out, _ = run("import", archive, "--store", other, "--json")
    assert code == OK and json.loads(out) == {
        "adapters": [],
        "present": ["a", "b"],
        "num_blobs": 0,
        "size_bytes": 0,
    }
    again = tmp_path / "again.tar"
    assert run("export", again, "--store", other)[0] == OK
    assert again.read_bytes() == archive.read_bytes(), "equal stores give equal files"


def test_single_adapters_are_carried_through_pipes(
    store: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: Any
) -> None:
    assert main(["store", "export", "-", "b", "--store", str(store)]) == OK
    written = capsysbinary.readouterr()
    assert b"exported 1 adapter with 1 blob of " in written.err
    (tmp_path / "other").mkdir()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(written.out)))
    assert main(["store", "import", "-", "--store", str(tmp_path / "other")]) == OK
    assert [record.adapter_id for record in fill(tmp_path / "other", tmp_path)] == ["b"]


def test_some_adapters_of_an_archive(store: Path, tmp_path: Path, run: Command) -> None:
    archive, other = tmp_path / "all.tar", tmp_path / "other"
    other.mkdir()
    assert run("export", archive, "--store", store)[0] == OK
    assert run("import", archive, "c", "--store", other)[::2] == (
        CORRUPT,
        "motet store: there is no adapter 'c' in the archive\n",
    )
    assert run("import", archive, "b", "--store", other)[0] == OK
    assert [record.adapter_id for record in fill(other, tmp_path)] == ["b"]
    assert run("gc", "--dry-run", "--store", other)[1] == "0 blobs removed, 0 left that no adapter uses\n"


def test_a_name_of_another_adapter_is_never_replaced(store: Path, tmp_path: Path, run: Command) -> None:
    archive, other = tmp_path / "all.tar", tmp_path / "other"
    before = fill(other, tmp_path, a=(5,))
    assert run("export", archive, "--store", store)[0] == OK
    code, _, error = run("import", archive, "--store", other)
    assert code == REFUSED and "has other adapters under these names: a; delete them" in error
    assert fill(other, tmp_path) == before
    assert run("import", archive, "b", "--store", other)[0] == OK


def members(archive: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(archive) as tar:
        return [(member, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]


def write_members(archive: Path, content: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(archive, "w") as tar:
        for member, data in content:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_an_archive_that_was_bent_registers_nothing(store: Path, tmp_path: Path, run: Command) -> None:
    """Cut off anywhere, a member gone, doubled or moved, a bit of any member changed."""
    archive, other = tmp_path / "all.tar", tmp_path / "other"
    assert run("export", archive, "--store", store)[0] == OK
    whole, found = archive.read_bytes(), members(archive)
    bent: list[bytes] = [whole[: len(whole) * part // 16] for part in range(16)]
    bent.append(whole[: whole.index(b"end.json")])
    variants = [found[:index] + found[index + 1 :] for index in range(len(found))]
    variants += [[*found[: index + 1], *found[index:]] for index in range(len(found))]
    variants += [[*found[:index], found[index + 1], found[index], *found[index + 2 :]] for index in range(3, 7)]
    for index, (member, data) in enumerate(found):
        for position in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[position] ^= 0x11
            variants.append([*found[:index], (member, bytes(changed)), *found[index + 1 :]])
    for variant in variants:
        write_members(tmp_path / "variant.tar", variant)
        bent.append((tmp_path / "variant.tar").read_bytes())
    for number, data in enumerate(bent):
        shutil.rmtree(other, ignore_errors=True)
        other.mkdir()
        (tmp_path / "bent.tar").write_bytes(data)
        code, _, error = run("import", tmp_path / "bent.tar", "--store", other)
        if code == OK:  # a change of a record that is still one, such as another label: nothing else protects those
            assert run("verify", "--store", other)[0] == OK, number
            continue
        assert code == CORRUPT and error.count("\n") == 1, (number, error)
        assert not list((other / "adapters").glob("*")), number
        assert run("gc", "--store", other)[0] == OK
        assert not list((other / "blobs").glob("*")), number


def test_members_that_are_no_plain_files_of_their_size_leave_nothing_outside(
    store: Path, tmp_path: Path, run: Command
) -> None:
    """Names that climb, links, devices, and a sparse file that claims 32 TiB in a few bytes."""
    archive, other, outside = tmp_path / "all.tar", tmp_path / "other", tmp_path / "outside"
    assert run("export", archive, "--store", store)[0] == OK
    found = members(archive)
    place = next(index for index, (member, _) in enumerate(found) if member.name.endswith("00000.safetensors"))
    name = found[place][0].name
    climbing = [tarfile.TarInfo(text) for text in (f"blobs/../../{outside.name}", str(outside), f"./{name}")]
    link, device, sparse = (tarfile.TarInfo(name) for _ in range(3))
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)
    device.type = tarfile.CHRTYPE
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": name}
    sparse.pax_headers["GNU.sparse.realsize"] = str(1 << 45)
    for member in [*climbing, link, device, sparse]:
        data = b"0\n".ljust(512, b"\0") if member is sparse else b"" if member in (link, device) else b"x"
        write_members(tmp_path / "bent.tar", [*found[:place], (member, data), *found[place + 1 :]])
        other.mkdir(exist_ok=True)
        code, _, error = run("import", tmp_path / "bent.tar", "--store", other)
        assert code == CORRUPT and error.count("\n") == 1, (member.name, error)
        assert not list((other / "adapters").glob("*")) and not outside.exists()


def test_a_store_says_what_is_wrong_with_it(store: Path, run: Command) -> None:
    code, out, _ = run("verify", "--store", store)
    assert code == OK and out.startswith("2 adapters, 3 versions, 2 blobs of ")
    assert out.endswith(" bytes: 0 problems\n")
    digests = [json.loads(path.read_bytes())["version_digests"] for path in sorted((store / "adapters").glob("*"))]
    [_, oldest], [shared] = digests
    chunk = store / "blobs" / shared / "00000.safetensors"
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    (store / "blobs" / oldest / "manifest.json").unlink()
    code, out, _ = run("verify", "--store", store)
    assert code == CORRUPT
    assert f"blobs/{shared}: file 0 is missing or damaged; adapter " in out
    assert f"blobs/{oldest}: it is not there, and adapter a has it; register these weights again\n" in out
    code, out, _ = run("verify", "--store", store, "b", "nobody", "--json")
    found = json.loads(out)
    assert (found["num_adapters"], found["num_blobs"], len(found["problems"])) == (1, 1, 2)
    assert found["problems"][0] == {"resource": "adapters/nobody", "text": "there is no such adapter in the store"}
    # What is damaged is not carried elsewhere, and leaves no file.
    code, _, error = run("export", store.parent / "damaged.tar", "--store", store)
    assert (code == CORRUPT and "is damaged" in error) or "is not there" in error
    assert not list(store.parent.glob("damaged*"))
    (store / "versions" / "b" / f"{shared}.json").write_text("{}")
    (store / "adapters" / "a.json").write_text("nothing")
    code, out, _ = run("verify", "--store", store)
    assert code == CORRUPT and "adapters/a: its record cannot be read: " in out
    assert f"adapters/b: the document of its version {shared} cannot be read: " in out


def test_only_what_no_adapter_uses_is_removed(store: Path, tmp_path: Path, run: Command) -> None:
    stray = "ab" * 32
    for name in ("manifest.json", "00000.safetensors"):
        (store / "blobs" / stray).mkdir(exist_ok=True)
        (store / "blobs" / stray / name).write_text("{}")
    before = fill(tmp_path / "copy", tmp_path, a=(0, 1), b=(1,))
    assert run("gc", "--dry-run", "--store", store)[1].startswith(f"no adapter uses blobs/{stray}\n0 blobs removed")
    assert (store / "blobs" / stray).exists()
    record = (store / "adapters" / "b.json").read_bytes()
    (store / "adapters" / "b.json").write_bytes(b"")
    code, out, _ = run("gc", "--store", store)
    assert code == OK and "adapters/b cannot be read, and no blob is removed while that is so" in out
    (store / "adapters" / "b.json").write_bytes(record)
    code, out, _ = run("gc", "--store", store, "--json")
    assert code == OK
    assert json.loads(out) == {"removed": [stray], "left": {"blobs": [], "versions": [], "unreadable": []}}
    after = fill(store, tmp_path)
    assert [each.adapter_id for each in after] == [each.adapter_id for each in before] == ["a", "b"]
    assert run("verify", "--store", store)[0] == OK


def test_a_store_that_a_server_has_open_is_read_and_not_changed(store: Path, tmp_path: Path, run: Command) -> None:
    server = ArtifactStore(str(store))
    with contextlib.closing(server):
        server.acquire()
        assert run("verify", "--store", store)[0] == OK
        assert run("gc", "--dry-run", "--store", store)[0] == OK
        archive = tmp_path / "live.tar"
        assert run("export", archive, "--store", store)[0] == OK
        for command in (("gc",), ("import", archive)):
            code, _, error = run(*command, "--store", store)
            assert code == UNAVAILABLE and error.startswith(f"motet store: the store {store} is in use")


def test_a_newer_format_is_refused_by_name_and_left_alone(store: Path, tmp_path: Path, run: Command) -> None:
    path = store / "format.json"
    assert json.loads(path.read_bytes()) == {"format": STORE_FORMAT}
    path.write_text(json.dumps({"format": STORE_FORMAT + 1}))
    incarnation = (store / "incarnation.json").read_bytes()
    text = f"the store has format {STORE_FORMAT + 1}, and this version of Motet knows formats up to {STORE_FORMAT}"
    for command in ("verify", "gc"):
        code, _, error = run(command, "--store", store)
        assert code == REFUSED and text in error
    with pytest.raises(ValueError, match=text):
        fill(store, tmp_path, c=(3,))
    assert (store / "incarnation.json").read_bytes() == incarnation
    path.write_text('{"format": "1"}')
    assert "format.json cannot be read" in run("verify", "--store", store)[2]


def test_a_store_from_before_there_was_a_format_is_brought_to_it(store: Path, tmp_path: Path, run: Command) -> None:
    (store / "format.json").unlink()
    make_old(store, "a")
    assert run("verify", "--store", store)[1].startswith("2 adapters, 3 versions, 2 blobs of "), "old records are read"
    old = tmp_path / "old.tar"
    assert run("export", old, "--store", store)[0] == OK
    fill(store, tmp_path)
    assert json.loads((store / "format.json").read_bytes()) == {"format": STORE_FORMAT}
    assert json.loads((store / "adapters" / "a.json").read_bytes())["format"] > 1
    # An archive with an old record is registered as it is; the next start of a server brings it to the format.
    (tmp_path / "other").mkdir()
    assert run("import", old, "--store", tmp_path / "other")[0] == OK
    assert len(fill(tmp_path / "other", tmp_path)) == 2
    assert json.loads((tmp_path / "other" / "adapters" / "a.json").read_bytes())["format"] > 1


def test_mistakes_are_named(store: Path, tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOTET_STORE", raising=False)
    monkeypatch.delenv("MOTET_DATA_DIR", raising=False)
    assert run("verify")[::2] == (
        REFUSED,
        "motet store: no store is named; give --store PLACE, or set MOTET_STORE or MOTET_DATA_DIR\n",
    )
    assert "is not a directory; make it first" in run("verify", "--store", tmp_path / "nowhere")[2]
    assert not (tmp_path / "nowhere").exists()
    monkeypatch.setenv("MOTET_DATA_DIR", str(store.parent))
    assert run("verify")[0] == OK
    taken = tmp_path / "taken.tar"
    taken.write_text("mine")
    code, _, error = run("export", taken)
    assert code == REFUSED and "taken.tar exists; name a new file" in error and taken.read_text() == "mine"
    assert run("import", taken)[0] == CORRUPT
    assert run("import", tmp_path / "none.tar")[0] == UNAVAILABLE
    assert "there is no adapter 'zzz' in the store" in run("export", tmp_path / "new.tar", "zzz")[2]


def test_a_blob_that_is_damaged_in_the_target_is_whole_afterwards(store: Path, tmp_path: Path, run: Command) -> None:
    archive, other = tmp_path / "all.tar", tmp_path / "other"
    assert run("export", archive, "a", "--store", store)[0] == OK
    [record] = fill(other, tmp_path, c=(0,))
    chunk = other / "blobs" / record.active_digest / "00000.safetensors"
    chunk.write_bytes(b"nothing")
    assert run("import", archive, "--store", other)[0] == OK
    assert run("verify", "--store", other)[1].endswith(": 0 problems\n")


def test_formats_are_noted_once(tmp_path: Path) -> None:
    class Counting(DirectoryStore):
        num_formats = 0

        def put_if_absent(self, key: str, content: bytes | Path) -> str:
            Counting.num_formats += key == "format.json"
            return super().put_if_absent(key, content)

    (tmp_path / "store").mkdir()
    for _ in range(3):
        ArtifactStore(Counting(tmp_path / "store")).format.mark()
    assert Counting.num_formats == 1

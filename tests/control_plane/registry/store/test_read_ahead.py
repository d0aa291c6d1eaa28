"""What a start reads with further processes is what it reads alone, also where such a process dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from control_plane.registry.records import AdapterState
from control_plane.registry.recovery import Recovered, recover
from control_plane.registry.snapshot.known_documents import KnownDocuments
from control_plane.registry.store import read_ahead
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.store import Document
from tests.control_plane.registry.rig import CALLS, files, open_registry

# With their versions more than two processes send at a time, and not a multiple of that.
NUM_NAMES = 500


@pytest.fixture
async def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of many names, most of which share a blob, with damage of every kind."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    root = tmp_path / "store"
    registry = await open_registry(str(root))
    for seed in (0, 1):
        await registry.register("name-000", files(tmp_path, seed), labels={"team": "blau-grün"})
    first = registry.get("name-000")
    await registry.close()
    digests = [version.digest for version in first.versions]
    record = (root / "adapters" / "name-000.json").read_bytes()
    for number in range(1, NUM_NAMES):
        name = f"name-{number:03}"
        (root / "adapters" / f"{name}.json").write_bytes(record.replace(b"name-000", name.encode()))
        (root / "versions" / name).mkdir()
        for digest in digests:
            content = (root / "versions" / "name-000" / f"{digest}.json").read_bytes()
            (root / "versions" / name / f"{digest}.json").write_bytes(content)
    (root / "adapters" / "name-100.json").write_bytes(b"")
    (root / "adapters" / "name-101.json").write_bytes(b'{"format": 4, "version_digests": ["')
    (root / "versions" / "name-103" / f"{digests[0]}.json").unlink()
    (root / "versions" / "name-104" / f"{digests[1]}.json").write_bytes(b"[")
    (root / "versions" / "name-105" / f"{digests[1]}.json").write_bytes(b"")
    (root / "blobs" / digests[1] / "manifest.json").unlink()
    return root


async def start(root: Path, *, min_ahead: int, snapshot: Path | None = None) -> tuple[Recovered, KnownDocuments]:
    known = KnownDocuments(snapshot, str(root), min_read=1)
    recovered = await recover(ArtifactStore(str(root)), CALLS, known, min_ahead=min_ahead)
    known.wait()
    return recovered, known


async def test_three_processes_find_what_one_finds(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone, _ = await start(root, min_ahead=NUM_NAMES + 1)
    read_here: list[str] = []
    read = ArtifactStore.read_record

    def read_record(store: ArtifactStore, name: str, tag: str = "") -> Document:
        read_here.append(name)
        return read(store, name, tag)

    monkeypatch.setattr(ArtifactStore, "read_record", read_record)
    both, known = await start(root, min_ahead=NUM_NAMES, snapshot=tmp_path / "snapshot")
    assert both == alone
    assert read_here == ["name-100", "name-101"], "whatever is right was read by the other processes"
    assert len(alone.blobs) == 1
    failed = [record.adapter_id for record in alone.records if record.state is AdapterState.FAILED]
    assert failed == ["name-100", "name-101", "name-103"]
    (root / "adapters" / "name-007.json").touch()
    again, known_again = await start(root, min_ahead=NUM_NAMES, snapshot=tmp_path / "snapshot")
    assert again == alone
    # What is damaged is read at every start, and what was touched.
    assert (known.num_known, known_again.num_read, known_again.num_known) == (0, 1, known.num_read - 1)
    assert "reads the store ahead" not in caplog.text


# What the process does in place of its work.
BROKEN = {
    "ends at once": "",
    "ends after the request": "import sys; sys.stdin.buffer.read(100)",
    "breaks off within a length": "import sys; sys.stdout.buffer.write(b'abc')",
    "breaks off within a frame": "import sys; sys.stdout.buffer.write(b'\\x10' + bytes(7) + b'abc')",
    "ends after the first frame": (
        "import sys; from control_plane.registry.store import read_ahead_child as child\n"
        "write, child.write_frame = child.write_frame, lambda *frame: (write(*frame), sys.exit())\n"
        "sys.argv[1:] = [ROOT]; child.main()"
    ),
}


@pytest.mark.parametrize("program", BROKEN.values(), ids=BROKEN)
async def test_a_process_that_dies_costs_time_only(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, program: str
) -> None:
    alone, _ = await start(root, min_ahead=NUM_NAMES + 1)
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program.replace("ROOT", repr(str(root)))]
    monkeypatch.setattr(read_ahead, "module_command", lambda *_: (command, environment))
    assert (await start(root, min_ahead=1))[0] == alone
    assert "has ended, this one reads the rest" in caplog.text


async def test_a_process_that_cannot_be_started_costs_time_only(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(read_ahead, "module_command", lambda *_: (["/nowhere/python"], {}))
    assert (await start(root, min_ahead=1))[0] == (await start(root, min_ahead=NUM_NAMES + 1))[0]
    assert "no process reads the store ahead" in caplog.text

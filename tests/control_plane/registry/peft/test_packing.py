"""Packing whose files lie on a disk that hangs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from control_plane.errors import StoreUnavailable
from control_plane.registry.changes import Abandoned
from control_plane.registry.companions import packing
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.peft.ingest import CONFIG_FILE, ingest
from control_plane.registry.peft.packing import Packer, take_as_they_are
from control_plane.store_calls import StoreCalls
from tests.control_plane.registry.rig import base_model, pack, write_adapter

LONG_S = 60.0


class HungDisk:
    """Reading an adapter's files takes as long as the test likes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_back = threading.Event()
        self.ended: list[BaseException] = []
        self._ingest = ingest
        monkeypatch.setattr(packing, "ingest", self)

    def __call__(self, found: dict[str, Path], *arguments: object, **options: object) -> object:
        if "hung" not in str(found[CONFIG_FILE]):
            return self._ingest(found, *arguments, **options)  # type: ignore[arg-type]  # passed on as they came
        self.is_back.wait(LONG_S)
        try:
            options["check"]()  # type: ignore[operator]  # as ingest does every few MiB
        except BaseException as error:
            self.ended.append(error)
            raise
        raise AssertionError("the work goes on although nobody waits for it")


async def test_files_that_cannot_be_read_in_time_hold_up_no_other_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_adapter(tmp_path / "good")
    expected = pack(good)[0].digest
    disk = HungDisk(monkeypatch)
    reports = WorkerReports(tmp_path / "reports.json", limit=128)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    calls = StoreCalls(timeout_s=0.2, what="the disk with the adapter's files")
    packer = Packer(base_model(), reports, max_adapter_bytes=1 << 20, scratch_dir=scratch, calls=calls)

    async def packed_digest(files: dict[str, Path]) -> str:
        async with packer.packed(files, threading.Event(), take_as_they_are) as packed:
            return packed.digest

    hung = write_adapter(tmp_path / "hung")
    refused = await asyncio.gather(*(packed_digest(hung) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in refused] == [StoreUnavailable] * 3
    assert "the disk with the adapter's files did not respond within 0.2" in str(refused[0])
    calls.timeout_s = LONG_S  # this machine may be slow
    assert await packed_digest(good) == expected
    disk.is_back.set()
    async with asyncio.timeout(LONG_S):
        while calls.num_hung:
            await asyncio.sleep(0)
    assert [type(error) for error in disk.ended] == [Abandoned] * 3
    assert not list(scratch.iterdir())
    await packer.close()

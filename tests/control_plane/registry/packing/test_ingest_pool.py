"""Packing in child processes: the same result and errors as in this one, limits, and no process left over."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.child_process import ChildProcess
from control_plane.errors import InvalidAdapter, StoreUnavailable
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.packing.ingest_child import HEADER, read_result
from control_plane.registry.packing.ingest_pool import IngestLimits, IngestPool
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from tests.control_plane.registry.rig import CALLS, base_model, files, pack, safetensors_bytes, tensors, write_adapter

STEP_S = 60.0


@pytest.fixture
async def pool() -> AsyncIterator[IngestPool]:
    opened = IngestPool()
    yield opened
    await opened.close()


async def packed(pool: IngestPool, adapter: dict[str, Path], directory: Path, max_adapter_bytes: int = 1 << 20) -> str:
    directory.mkdir(parents=True)
    info = await pool.pack(adapter, base_model(), directory=directory, max_adapter_bytes=max_adapter_bytes)
    assert all(chunk.path.stat().st_size == chunk.size_bytes for chunk in info.chunks)
    return info.digest


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_child_ends_without_a_word_where_its_server_is_gone() -> None:
    ours, its = socket.socketpair()
    with ours, its:
        command = [sys.executable, "-m", "control_plane.registry.packing.ingest_child"]
        child = subprocess.Popen(command, stdin=its.fileno(), stderr=subprocess.PIPE)
        job = {"files": {}, "base_model": base_model(), "arguments": {}, "cpu_s": 0.0}  # fails, and the child says so
        for frame in (pickle.dumps({}), pickle.dumps(job)):
            ours.sendall(HEADER.pack(len(frame)) + frame)
        assert ours.recv(1, socket.MSG_PEEK)
        ours.close()  # with what the child sent unread: its next reading fails
    _, said = child.communicate(timeout=STEP_S)
    assert (child.returncode, said) == (0, b"")


async def test_a_child_keeps_the_memory_of_one_block_for_the_next(pool: IngestPool, tmp_path: Path) -> None:
    await packed(pool, files(tmp_path), tmp_path / "chunks")
    environment = Path(f"/proc/{pool.pids[0]}/environ").read_bytes().split(b"\0")
    assert b"MALLOC_MMAP_THRESHOLD_=33554432" in environment


async def test_a_child_packs_as_this_process_does_one_adapter_after_the_other(pool: IngestPool, tmp_path: Path) -> None:
    for seed in range(3):
        adapter = files(tmp_path, seed)
        assert await packed(pool, adapter, tmp_path / "chunks" / str(seed)) == pack(adapter)[0].digest
    assert len(pool.pids) == 1
    await asyncio.gather(*(packed(pool, files(tmp_path), tmp_path / "both" / str(place)) for place in range(2)))
    assert len(pool.pids) == 2
    pids = pool.pids
    await pool.close()
    assert not pool.pids and not any(map(is_alive, pids))
    with pytest.raises(StoreUnavailable, match="shutting down"):
        await packed(pool, files(tmp_path), tmp_path / "later")


async def test_all_problems_of_an_adapter_come_back(pool: IngestPool, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "bad", r=5, lora_alpha=-1)
    with pytest.raises(InvalidAdapter) as here:
        pack(adapter)
    with pytest.raises(InvalidAdapter) as there:
        await packed(pool, adapter, tmp_path / "chunks")
    assert there.value.violations == here.value.violations and str(there.value) == str(here.value)
    with pytest.raises(FileNotFoundError):
        await packed(pool, dict.fromkeys(adapter, tmp_path / "gone"), tmp_path / "other")
    assert await packed(pool, files(tmp_path), tmp_path / "good")  # by the same child
    assert len(pool.pids) == 1


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (IngestLimits(cpu_s=1e-3, cpu_s_per_gib=0.0), "takes more than 0.001 s of CPU time to be packed, the server's"),
        (IngestLimits(memory_bytes=1), "takes more than 0 MiB of memory to be packed, the server's limit; save the"),
    ],
    ids=["CPU time", "memory"],
)
async def test_an_adapter_that_exceeds_a_limit_is_refused_and_leaves_no_process(
    tmp_path: Path, limits: IngestLimits, words: str
) -> None:
    pool = IngestPool(limits)
    adapter = write_adapter(tmp_path / "large", r=40_000, weights=safetensors_bytes(tensors(rank=40_000)))
    with pytest.raises(InvalidAdapter, match=words):
        await packed(pool, adapter, tmp_path / "chunks", 1 << 30)
    assert pool.pids == []
    await pool.close()


async def test_a_child_that_hangs_is_killed(tmp_path: Path) -> None:
    pool = IngestPool(IngestLimits(wall_s=3.0))
    await packed(pool, files(tmp_path), tmp_path / "chunks")
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match=r"took more than 3\.\d+ s; the server's disk may be slow: try again"):
        await packed(pool, files(tmp_path), tmp_path / "more")
    assert pool.pids == [] and not is_alive(pid)
    await pool.close()


async def test_a_kept_child_that_died_is_replaced_and_two_deaths_are_reported(
    pool: IngestPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await packed(pool, files(tmp_path), tmp_path / "chunks")
    os.kill(pool.pids[0], signal.SIGKILL)
    await packed(pool, files(tmp_path), tmp_path / "more")
    module = "control_plane.framed_child.child.module_command"
    monkeypatch.setattr(module, lambda _name: (["/bin/false"], {}))
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(StoreUnavailable, match="ended twice; try again"):
        await packed(pool, files(tmp_path), tmp_path / "again")
    assert pool.pids == []


async def test_a_program_that_cannot_be_run_is_reported(
    pool: IngestPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "control_plane.framed_child.child.module_command"
    monkeypatch.setattr(module, lambda _name: (["/nowhere/python"], {}))
    with pytest.raises(StoreUnavailable, match="could not be started; try again"):
        await packed(pool, files(tmp_path), tmp_path / "chunks")


async def test_a_registration_that_is_cancelled_kills_its_child(tmp_path: Path) -> None:
    pool = IngestPool()
    registry = await Registry.open(
        store=ArtifactStore(str(tmp_path / "store")),
        base_model=base_model(),
        calls=CALLS,
        max_adapter_bytes=1 << 20,
        reports=WorkerReports(),
        scratch_dir=tmp_path,
        pool=pool,
    )
    await registry.register("a", files(tmp_path))
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    registering = asyncio.create_task(registry.register("b", files(tmp_path, 2)))
    while not pool.num_busy:
        await asyncio.sleep(0)
    registering.cancel()
    await asyncio.wait([registering], timeout=STEP_S)
    while is_alive(pid):
        await asyncio.sleep(0)
    assert [record.adapter_id for record in registry.list_part()[0]] == ["a"]
    await registry.register("b", files(tmp_path, 2))
    assert list(tmp_path.glob("motet-pack-*")) == []
    await registry.close()
    await pool.close()


async def test_a_child_ends_with_its_server(pool: IngestPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the end of its socket."""
    monkeypatch.setattr(ChildProcess, "kill", lambda self: None)
    await packed(pool, files(tmp_path), tmp_path / "chunks")
    await asyncio.wait_for(pool.close(), STEP_S)


@pytest.mark.parametrize("value", [os.system, ChildProcess, print])
def test_a_result_cannot_name_anything_but_values(value: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is not a result of packing"):
        read_result(pickle.dumps({"result": value}))

"""Memory is read where Linux and the driver say it, and given back before it is counted."""

from __future__ import annotations

import gc
import logging
import mmap
from pathlib import Path

import pytest
import torch

from data_plane.engine.memory.device_memory import CudaMemory, HostFiles, HostMemory

GIB = 1 << 30


def host_files(tmp_path: Path, **cgroup: str) -> HostFiles:
    """A machine of 16 GiB with 8 free, and a process that takes 1."""
    files = HostFiles(*(tmp_path / name for name in ("meminfo", "status", "clear_refs", "cgroup")))
    files.meminfo.write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\n")
    files.status.write_text(f"Name: worker\nVmHWM: {2 << 20} kB\nVmRSS: {1 << 20} kB\n")
    files.cgroup.mkdir()
    for name, text in cgroup.items():
        (files.cgroup / f"memory.{name}").write_text(text)
    return files


def test_a_machine_without_a_limit_is_counted_by_linux(tmp_path: Path) -> None:
    memory = HostMemory(host_files(tmp_path, max="max\n", current="77"))
    assert (memory.total_bytes(), memory.free_bytes()) == (16 * GIB, 8 * GIB)
    assert (memory.own_bytes(), memory.peak_bytes()) == (GIB, 2 * GIB)


def test_a_container_has_what_its_limit_leaves_beside_pages_that_the_kernel_drops(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n"
    memory = HostMemory(host_files(tmp_path, max=str(6 * GIB), current=str(5 * GIB), stat=stat))
    assert (memory.total_bytes(), memory.free_bytes()) == (6 * GIB, 3 * GIB)


def test_a_system_without_these_files_has_half_of_its_memory_free(tmp_path: Path) -> None:
    missing = HostFiles(*(tmp_path / name for name in ("meminfo", "status", "clear_refs", "cgroup")))
    memory = HostMemory(missing, physical_bytes=lambda: 4 * GIB)
    assert (memory.total_bytes(), memory.free_bytes()) == (4 * GIB, 2 * GIB)
    assert memory.own_bytes() > 0


def take_and_give_back(size: int) -> None:
    """New pages of the kernel's own: malloc may take them from what earlier tests freed, which is resident already."""
    mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def test_the_peak_of_a_step_is_not_that_of_loading() -> None:
    gc.collect()  # so that no memory of earlier tests is given back between the two readings
    memory = HostMemory()
    take_and_give_back(64 << 20)
    memory.begin_peak()
    before = memory.own_bytes()
    assert memory.peak_bytes() - before < 16 << 20
    take_and_give_back(64 << 20)
    assert memory.peak_bytes() - before > 60 << 20


def test_a_peak_that_cannot_be_reset_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = host_files(tmp_path)
    files.clear_refs.mkdir()
    with caplog.at_level(logging.WARNING):
        HostMemory(files).begin_peak()
    assert "the peak of a step includes that of loading" in caplog.text


class FakeDriver:
    """A GPU of 1000 bytes: 100 of others, and what torch's allocator holds, freed or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.kept = 100, 0
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000 - self.used - self.kept, 1000))
        monkeypatch.setattr("torch.cuda.empty_cache", self.empty)
        monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)

    def empty(self) -> None:
        self.kept = 0

    def load(self) -> None:
        """Weights of 300 bytes, and 250 more that were freed on the way."""
        self.used, self.kept = 400, 250

    def step(self) -> None:
        """A step whose activations took 80 bytes at most."""
        self.kept = 80


def test_what_loading_left_is_given_back_before_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    memory = CudaMemory(torch.device("cuda", 0))
    driver.load()
    memory.release()
    assert memory.free_bytes() == 600
    assert (memory.total_bytes(), memory.own_bytes()) == (1000, 300)


def test_a_step_s_peak_on_a_gpu_is_what_the_allocator_kept_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    memory = CudaMemory(torch.device("cuda", 0))
    driver.load()
    memory.begin_peak()
    before = memory.own_bytes()
    driver.step()
    assert memory.peak_bytes() - before == 80
    memory.release()
    assert memory.own_bytes() == before

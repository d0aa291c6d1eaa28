"""How much memory the worker's device has, how much of it is free, and how much this process takes.

Read by build.py, which sizes the KV cache. A GPU's memory is the device's own. On the CPU it is the machine's, or that
of the container; the process's part is its resident memory.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """The memory in which weights, adapters and KV lie."""

    def total_bytes(self) -> int:
        """All of it."""

    def free_bytes(self) -> int:
        """What may still be taken. Memory that was freed and is kept for reuse does not count."""

    def release(self) -> None:
        """Give back to the device what was freed and is kept for reuse."""

    def own_bytes(self) -> int:
        """What this process takes at present, memory that it keeps for reuse included."""

    def begin_peak(self) -> None:
        """Measure the peak from here on."""

    def peak_bytes(self) -> int:
        """The most that this process took since `begin_peak`."""


def device_memory(device: torch.device) -> DeviceMemory:
    """That of a device. On a GPU, this process's part counts from this call on: its context is there already."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


class CudaMemory:
    """A GPU's memory, by the driver's count: torch's allocator, kernels and libraries alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._others_bytes = self._used_bytes()

    def total_bytes(self) -> int:
        """See DeviceMemory."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        """See DeviceMemory."""
        return torch.cuda.mem_get_info(self._device)[0]

    def release(self) -> None:
        """See DeviceMemory. Torch's allocator keeps what was freed."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def own_bytes(self) -> int:
        """See DeviceMemory."""
        return max(self._used_bytes() - self._others_bytes, 0)

    def begin_peak(self) -> None:
        """See DeviceMemory."""
        self.release()

    def peak_bytes(self) -> int:
        """See DeviceMemory. Torch's allocator keeps what a step freed, so what is used after it is the step's peak."""
        torch.cuda.synchronize(self._device)
        return self.own_bytes()

    def _used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Where Linux says what memory there is."""

    meminfo: Path = Path("/proc/meminfo")
    status: Path = Path("/proc/self/status")
    clear_refs: Path = Path("/proc/self/clear_refs")
    cgroup: Path = Path("/sys/fs/cgroup")


class HostMemory:
    """The machine's memory, or the container's where a cgroup limits it, and this process's resident memory."""

    def __init__(self, files: HostFiles | None = None, physical_bytes: Callable[[], int] | None = None) -> None:
        self._files = files or HostFiles()
        self._physical_bytes = physical_bytes or _physical_bytes

    def total_bytes(self) -> int:
        """See DeviceMemory."""
        machine = _kibibytes(self._files.meminfo, "MemTotal") or self._physical_bytes()
        limit = self._cgroup_limit()
        return machine if limit is None else min(machine, limit)

    def free_bytes(self) -> int:
        """See DeviceMemory: Linux's estimate of what is available without swapping. Elsewhere half of the machine's."""
        free = _kibibytes(self._files.meminfo, "MemAvailable")
        if free is None:
            free = self._physical_bytes() // 2
        limit, used = self._cgroup_limit(), self._cgroup_used()
        if limit is not None and used is not None:
            free = min(free, limit - used)
        return max(free, 0)

    def release(self) -> None:
        """See DeviceMemory. On the CPU nothing is kept for reuse that would count."""

    def own_bytes(self) -> int:
        """See DeviceMemory."""
        return _kibibytes(self._files.status, "VmRSS") or _most_resident_bytes()

    def begin_peak(self) -> None:
        """See DeviceMemory. Where the peak cannot be reset, it stays that of the whole process so far."""
        try:
            self._files.clear_refs.write_text("5")  # see proc(5): resets VmHWM
        except OSError as error:
            logger.warning("the peak of a step includes that of loading, so fewer KV blocks are made: %s", error)

    def peak_bytes(self) -> int:
        """See DeviceMemory."""
        return _kibibytes(self._files.status, "VmHWM") or _most_resident_bytes()

    def _cgroup_limit(self) -> int | None:
        try:
            text = (self._files.cgroup / "memory.max").read_text().strip()
            return None if text == "max" else int(text)
        except (OSError, ValueError):
            return None

    def _cgroup_used(self) -> int | None:
        """Without pages of files that the kernel drops when memory is short, such as those of a checkpoint."""
        try:
            used = int((self._files.cgroup / "memory.current").read_text())
            lines = (self._files.cgroup / "memory.stat").read_text().splitlines()
            droppable = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        except (OSError, ValueError):
            return None
        return max(used - droppable, 0)


def _kibibytes(path: Path, name: str) -> int | None:
    """Bytes that a line such as "VmRSS:   12 kB" names."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _most_resident_bytes() -> int:
    """Of a system without /proc: the most that the process ever took; in kilobytes there but for macOS."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if os.uname().sysname == "Darwin" else most << 10

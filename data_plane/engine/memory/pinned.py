"""Pinned host memory of exactly the size that is wanted: for KV blocks of swapped-out requests, and for adapters.

torch's own allocator rounds each pinned tensor up to a power of two, and keeps what was freed for tensors of that size
alone: 20.4 GiB that were wanted took 32. Here one mapping holds everything and is registered with the driver, for as
long as any tensor of it is alive.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from data_plane.engine.memory.device_memory import DeviceMemory, HostMemory
from data_plane.errors import ConfigError

# Each tensor begins at a multiple of so many bytes: rows of 16-bit and FP8 values are read 16 bytes at a time.
ALIGNMENT = 256
# Portable (for every context) and mapped (kernels read it by its address), see cudaHostRegister.
_FLAGS = 3


class HostRegistry(Protocol):
    """The driver's list of pinned memory."""

    def register(self, address: int, num_bytes: int) -> int:
        """Pin it. 0, or the driver's error."""

    def unregister(self, address: int) -> None:
        """Let go of it."""


class CudaRegistry:
    """CUDA's."""

    def register(self, address: int, num_bytes: int) -> int:
        """See HostRegistry."""
        return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _FLAGS))  # type: ignore[no-untyped-call]  # torch's stubs

    def unregister(self, address: int) -> None:
        """See HostRegistry."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch's stubs


def pinned_zeros(
    shapes: Sequence[tuple[Sequence[int], torch.dtype]], flag: str, registry: HostRegistry | None = None
) -> list[torch.Tensor]:
    """Tensors of zeros in pinned memory, which takes their bytes and less than a page and ALIGNMENT bytes each more.

    `flag` is what the operator lowers. Raises ConfigError where the host has not as much, or the driver refuses.
    """
    sizes = [dtype.itemsize * torch.Size(shape).numel() for shape, dtype in shapes]
    offsets, num_bytes = [], 0
    for size in sizes:
        offsets.append(num_bytes)
        num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
    whole = pinned_bytes(num_bytes, flag, registry)
    return [
        whole[offset : offset + size].view(dtype).view(torch.Size(shape))
        for offset, size, (shape, dtype) in zip(offsets, sizes, shapes, strict=True)
    ]


def pinned_bytes(
    num_bytes: int, flag: str, registry: HostRegistry | None = None, memory: DeviceMemory | None = None
) -> torch.Tensor:
    """Zeros uint8 [num_bytes] in pinned memory, and less than a page more. `memory`: the host's. Raises as above."""
    registry = registry or CudaRegistry()
    size = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    # Pinned pages are taken at once: where the host has fewer, Linux ends a process in place of an error.
    if size > (free := (memory or HostMemory()).free_bytes()):
        raise ConfigError(f"{flag}: {num_bytes} bytes of host memory are to be pinned, and {free} are free; lower it")
    try:
        mapping = mmap.mmap(-1, size)
    except OSError as error:
        raise ConfigError(f"{flag}: {num_bytes} bytes of host memory cannot be had: {error}; lower it") from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if (error_code := registry.register(address, size)) != 0:
        raise ConfigError(
            f"{flag}: CUDA cannot pin {size} bytes of host memory (error {error_code}); lower it, or raise the limit "
            "of locked memory (ulimit -l)"
        )
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    # Every part of it shares this storage: it goes when the last of them does, and the mapping after it.
    weakref.finalize(whole.untyped_storage(), _let_go, registry, address, mapping).atexit = False
    return whole[:num_bytes]


def _let_go(registry: HostRegistry, address: int, mapping: mmap.mmap) -> None:
    registry.unregister(address)
    del mapping  # was kept until its memory was no longer registered

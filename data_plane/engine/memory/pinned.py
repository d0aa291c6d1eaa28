"""Pinned host memory of exactly the size that is wanted, for KV blocks of swapped-out requests.

torch's own allocator rounds each pinned tensor up to a power of two: 20.4 GiB that were wanted took 32. Here one
mapping holds all tensors and is registered with the driver, for as long as any of the tensors is alive.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

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
    shapes: Sequence[tuple[Sequence[int], torch.dtype]], registry: HostRegistry | None = None
) -> list[torch.Tensor]:
    """Tensors of zeros in pinned memory, which takes their bytes and less than a page and ALIGNMENT bytes each more.

    Raises ConfigError where the driver refuses.
    """
    registry = registry or CudaRegistry()
    sizes = [dtype.itemsize * torch.Size(shape).numel() for shape, dtype in shapes]
    offsets, num_bytes = [], 0
    for size in sizes:
        offsets.append(num_bytes)
        num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
    num_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if (error := registry.register(address, num_bytes)) != 0:
        raise ConfigError(
            f"--host-kv-bytes: CUDA cannot pin {num_bytes} bytes of host memory (error {error}); lower it, or raise "
            "the limit of locked memory (ulimit -l)"
        )
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    # The tensors below share this storage: it goes when the last of them does, and the mapping after it.
    weakref.finalize(whole.untyped_storage(), _let_go, registry, address, mapping).atexit = False
    return [
        whole[offset : offset + size].view(dtype).view(torch.Size(shape))
        for offset, size, (shape, dtype) in zip(offsets, sizes, shapes, strict=True)
    ]


def _let_go(registry: HostRegistry, address: int, mapping: mmap.mmap) -> None:
    registry.unregister(address)
    del mapping  # was kept until its memory was no longer registered

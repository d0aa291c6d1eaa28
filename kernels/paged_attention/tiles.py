"""Launch parameters of the GPU kernels: what they may be, and what is safe where nobody measured."""

from __future__ import annotations

from dataclasses import dataclass

# A decode program reads at least so many keys, and a sequence is cut in at most so many parts: 64 sequences of 1k
# tokens with 8 key heads make 1024 programs, one of 128k tokens 512, for the 132 multiprocessors of an H200.
SPLIT_KEYS = 512
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """They depend on the model's shapes and the device alone, never on the batch."""

    block_m: int  # rows: queries x heads
    block_n: int  # keys
    num_warps: int
    num_stages: int


def decode_tiles(group: int, dim: int, itemsize: int) -> Tiles:
    """Rows for a whole group where 32 hold it, since a second tile reads the keys again."""
    block_m = 16 if group <= 16 else 32
    return Tiles(block_m, 64 if dim * itemsize <= 256 else 32, 4, 3 if dim * itemsize <= 512 else 2)


def prefill_tiles(dim: int, itemsize: int) -> Tiles:
    """One stage: ptxas before 13.3 miscompiles pipelined wgmma with a register operand (triton issue 9433), and
    weights @ values is such a product from 64 rows on."""
    if itemsize > 2:
        return Tiles(16, 32, 4, 1)
    return Tiles(128, 64, 8, 1) if dim <= 128 else Tiles(64, 64, 8, 1)

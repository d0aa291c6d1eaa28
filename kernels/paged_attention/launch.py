"""How the attention kernels are launched: safe defaults, and what `kernels.tuning` knows better.

A launch depends on the model's shapes and the device only, never on the batch: the tiles decide in which order a
sequence's keys are summed, and a sequence's output must not depend on the other sequences of the step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from kernels.buckets import check_power_of_two
from kernels.tuning import tuned


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Launch parameters of programs for one query of each sequence.

    A block has at most 32 rows: from 64 on products are wgmma, which gain nothing with so few. Larger groups take
    several.
    """

    block_m: int  # query heads of one key head
    block_n: int  # keys
    num_warps: int = 4
    num_stages: int = 3
    # A sequence is cut in even splits of about so many keys, at most so many of them, and each split in units. With 8
    # key heads, 64 sequences of 1k tokens make 1024 splits, one of 1k tokens 64 units, one of 128k tokens 256 units,
    # for the 396 programs that an H100 holds.
    split_keys: int = 512
    max_splits: int = 8
    units: int = 4  # of a split at most
    programs: int = 3  # on each multiprocessor; they share the splits of the step, or its units if there are few

    def __post_init__(self) -> None:
        check_power_of_two("block_m", self.block_m, 16, 32)
        check_power_of_two("block_n", self.block_n, 16, 256)
        check_power_of_two("num_warps", self.num_warps, 1, 16)
        check_power_of_two("max_splits", self.max_splits, 1, 1024)
        check_power_of_two("units", self.units, 1, 16)
        if not 1 <= self.programs <= 16:
            raise ValueError(f"programs is {self.programs}, want 1 to 16 on each multiprocessor")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages}, want 1 to 8")
        if self.split_keys < 1 or self.split_keys % self.block_n:
            raise ValueError(f"split_keys is {self.split_keys}, want a multiple of block_n, {self.block_n}")

    @classmethod
    def default(cls, sizes: Sizes) -> DecodeLaunch:
        """Rows for a whole group where 32 hold it, since a second tile reads the keys again.

        Products of float32 are not the tensor cores' and keep whole tiles in registers: larger ones spill on sm_90, and
        over FP8 keys, which take registers to be widened, already these or, of wide heads, loads that run ahead and
        units.
        """
        if sizes.dtype == "float32":
            is_widened = sizes.cache != sizes.dtype
            if sizes.dim <= 64:
                return cls(16, 32 if is_widened else 64)
            if sizes.dim <= 128:
                return cls(16, 16, 8)
            return cls(16, 16, 8, 1, units=1) if is_widened else cls(16, 16, 8, 2)
        return cls(16 if sizes.group <= 16 else 32, 64 if sizes.dim <= 128 else 32)


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Launch parameters of programs for several queries.

    Loads run ahead here too, while weights @ values, from 64 rows on a wgmma with a register operand, is waited for
    before anything else is queued: `triton_loop.attend` adds it to the sum by an operation of its own.
    """

    block_m: int  # queries x heads
    block_n: int  # keys
    num_warps: int = 4
    num_stages: int = 3  # from 3 on the next tile's keys and values are on their way while one is computed

    def __post_init__(self) -> None:
        check_power_of_two("block_m", self.block_m, 16, 256)
        check_power_of_two("block_n", self.block_n, 16, 256)
        check_power_of_two("num_warps", self.num_warps, 1, 16)
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages}, want 1 to 8")

    @classmethod
    def default(cls, sizes: Sizes) -> PrefillLaunch:
        """Larger tiles of such keys spill registers on sm_90, over FP8 keys where they have a scale for each token.

        Larger ones of wide heads take more than the 99 KiB of shared memory that sm_89 has.
        """
        if sizes.dtype == "float32":
            return cls(16, 32 if sizes.dim <= 128 else 16, num_stages=1)
        if sizes.dim <= 128:
            return cls(128, 32 if sizes.dim > 64 and sizes.cache != sizes.dtype else 64, 8)
        return cls(64, 16, 8)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a launch is chosen by. Its fields name the buckets of the tables."""

    dtype: str  # of the queries
    cache: str  # dtype of keys and values
    dim: int  # the greater of a key's and a value's
    group: int  # query heads of one key head

    @classmethod
    def of(cls, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> Sizes:
        """Sizes of query [T, Hq, D] over caches [num_blocks, block_size, Hkv, D] and [..., Dv]."""
        dim, group = max(query.shape[2], value_cache.shape[3]), query.shape[1] // key_cache.shape[2]
        return cls.of_model(query.dtype, key_cache.dtype, dim, group)

    @classmethod
    def of_model(cls, dtype: torch.dtype, cache: torch.dtype, dim: int, group: int) -> Sizes:
        """Sizes of these dtypes."""
        return cls(str(dtype).removeprefix("torch."), str(cache).removeprefix("torch."), dim, group)


@lru_cache(maxsize=256)
def decode_launch(device_name: str | None, sizes: Sizes) -> DecodeLaunch:
    """What was measured for such a model on the device, or the default."""
    return tuned("paged_attention_decode", DecodeLaunch.default(sizes), device_name, **asdict(sizes))


@lru_cache(maxsize=256)
def prefill_launch(device_name: str | None, sizes: Sizes) -> PrefillLaunch:
    """What was measured for such a model on the device, or the default."""
    return tuned("paged_attention_prefill", PrefillLaunch.default(sizes), device_name, **asdict(sizes))

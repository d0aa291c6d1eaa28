"""Shapes of paged_attention for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One step over one layer. Blocks of a sequence are a seeded choice unless is_consecutive."""

    name: str
    sequences: tuple[tuple[int, int], ...]  # (queries, keys with them)
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_slopes: bool = False  # ALiBi
    is_consecutive: bool = False


_MIXED = ((1, 1), (1, 40), (1, 17), (5, 5), (7, 39), (0, 12), (1, 16), (33, 64))

CASES = (
    Case("no sequence", ()),
    Case("one token", ((1, 1),)),
    Case("one decode", ((1, 37),)),
    Case("decodes of many lengths", tuple((1, n) for n in (1, 2, 15, 16, 17, 31, 33, 100, 101, 130))),
    Case("prefill", ((19, 19),)),
    Case("prefix and new tokens", ((3, 50), (20, 21))),
    Case("mixed", _MIXED),
    Case("mixed, consecutive blocks", _MIXED, is_consecutive=True),
    Case("MHA", _MIXED, num_heads=3, num_kv_heads=3),
    Case("MQA", _MIXED, num_heads=8, num_kv_heads=1),
    Case("odd sizes", _MIXED, num_heads=6, num_kv_heads=3, key_dim=7, value_dim=5, block_size=3),
    Case("wider keys than values", _MIXED, key_dim=24, value_dim=16),
    Case("window", _MIXED, sliding_window=9),
    Case("window of one", _MIXED, sliding_window=1),
    Case("window of a block", ((1, 64), (1, 65), (1, 70), (16, 64)), sliding_window=16),
    Case("window longer than all", _MIXED, sliding_window=1000),
    Case("soft cap", _MIXED, softcap=3.0),
    Case("sinks", _MIXED, has_sinks=True),
    Case("window, soft cap, sinks", _MIXED, sliding_window=9, softcap=2.0, has_sinks=True),
    Case("ALiBi", _MIXED, has_slopes=True),
    Case("ALiBi, window, soft cap, sinks", _MIXED, 3, 3, 16, 16, 16, 9, 2.0, True, True),
    Case("blocks of 64", _MIXED, block_size=64),
    Case("blocks of 32, heads of 80", _MIXED, key_dim=80, value_dim=80, block_size=32),
    Case("heads of 256", ((1, 20), (3, 18)), 2, 1, 256, 256),
)
DECODE_1K = Case("32 decodes of 1k tokens", ((1, 1024),) * 32, 16, 8, 64, 64)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one case. Cache entries that belong to no sequence are NaN, so that a stray read shows."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start: list[int]
    context_lens: list[int]
    sinks: torch.Tensor | None
    scale: float
    alibi_slopes: torch.Tensor | None = None


def make(case: Case, dtype: torch.dtype, *, seed: int = 0, poison: float = 0.0) -> Inputs:
    """Inputs of the case. `poison` fills cache entries past the sequences' tokens, and blocks of nobody."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-keys // case.block_size) for _, keys in case.sequences]
    num_blocks = sum(counts) + 3
    order = torch.arange(num_blocks) if case.is_consecutive else torch.randperm(num_blocks, generator=generator)
    tables = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
    shape = (num_blocks, case.block_size, case.num_kv_heads)
    key_cache = torch.full((*shape, case.key_dim), poison)
    value_cache = torch.full((*shape, case.value_dim), poison)
    used = 0
    for row, count in enumerate(counts):
        blocks = order[used : used + count]
        used += count
        tables[row, :count] = blocks
        tokens = torch.arange(case.sequences[row][1])
        where = (blocks[tokens // case.block_size], tokens % case.block_size)
        key_cache[where] = torch.randn(len(tokens), *key_cache.shape[2:], generator=generator)
        value_cache[where] = torch.randn(len(tokens), *value_cache.shape[2:], generator=generator)
    query_start = [0]
    for num_queries, _ in case.sequences:
        query_start.append(query_start[-1] + num_queries)
    query = torch.randn(query_start[-1], case.num_heads, case.key_dim, generator=generator)
    sinks = torch.randn(case.num_heads, generator=generator) if case.has_sinks else None
    slopes = torch.rand(case.num_heads, generator=generator) if case.has_slopes else None
    return Inputs(
        query.to(dtype),
        key_cache.to(dtype),
        value_cache.to(dtype),
        tables,
        query_start,
        [keys for _, keys in case.sequences],
        sinks,
        case.key_dim**-0.5,
        slopes,
    )


def make_one_hot(case: Case, dtype: torch.dtype) -> Inputs:
    """Integers of which one key takes all weight: exp(0) against exp(-256 or less), which is 0 in float32.

    Query heads of even number choose a sequence's first key, the others that at the place of its first query. Values
    are integers too, so that the output is exact in any order of sums. Keys have at most 256 values.
    """
    inputs = make(case, dtype)
    inputs.query.zero_()
    inputs.query[:, ::2, 0] = 4096
    inputs.query[:, 1::2, 1] = 4096
    inputs.key_cache.zero_()
    inputs.key_cache[..., :2] = -1
    inputs.value_cache.mul_(30).round_()
    for row, (num_queries, num_keys) in enumerate(case.sequences):
        for dim, key in ((0, 0), (1, num_keys - num_queries)):
            inputs.key_cache[int(inputs.block_tables[row, key // case.block_size]), key % case.block_size, :, dim] = 0
    return inputs

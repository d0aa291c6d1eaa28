"""Shapes of paged_attention for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kernels.fp8 import FP8, FP8_MAX, KVScale
from kernels.paged_attention.batch import AttentionBatch
from kernels.paged_attention.options import BlockSparsity, Options


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
    is_causal: bool = True  # False: cross attention
    sparsity: BlockSparsity | None = None
    cache: str = "as query"  # or "fp8", "fp8_per_token_head"


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
_FP8, _TOKEN_SCALES = "fp8", "fp8_per_token_head"
FP8_CASES = (
    Case("FP8", _MIXED, cache=_FP8),
    Case("FP8, window, soft cap, sinks", _MIXED, sliding_window=9, softcap=2.0, has_sinks=True, cache=_FP8),
    Case("FP8, odd sizes", _MIXED, num_heads=6, num_kv_heads=3, key_dim=7, value_dim=5, block_size=3, cache=_FP8),
    Case("FP8 per token and head", _MIXED, cache=_TOKEN_SCALES),
    Case("FP8 per token and head, MQA", _MIXED, num_heads=8, num_kv_heads=1, cache=_TOKEN_SCALES),
    Case("FP8 per token and head, soft cap, ALiBi", _MIXED, softcap=2.0, has_slopes=True, cache=_TOKEN_SCALES),
)
_CROSS = ((1, 40), (5, 3), (0, 0), (33, 1), (7, 64), (1, 1), (0, 12))
CROSS_CASES = (
    Case("cross", _CROSS, is_causal=False),
    Case("cross, GQA, soft cap", _CROSS, num_heads=6, softcap=2.0, is_causal=False),
    Case("cross, FP8 per token and head", _CROSS, is_causal=False, cache=_TOKEN_SCALES),
)
SPARSE_CASES = (
    Case("sparse, heads alike", _MIXED, sparsity=BlockSparsity(4, 2, 3)),
    Case("sparse, sliding over query heads", ((1, 100), (1, 3), (30, 77)), sparsity=BlockSparsity(8, 1, 4, 1)),
    Case("sparse, sliding over key heads", ((1, 100), (1, 64), (30, 77)), sparsity=BlockSparsity(16, 2, 3, -2)),
    Case("sparse, no vertical one in sight", ((1, 50), (4, 50)), sparsity=BlockSparsity(5, 2, 1000)),
    Case("sparse, everything visible", ((1, 50), (9, 50)), sparsity=BlockSparsity(4, 1, 1)),
    Case(
        "sparse, MQA, sinks, ALiBi", _MIXED, 4, 1, has_sinks=True, has_slopes=True, sparsity=BlockSparsity(3, 2, 2, 3)
    ),
    Case("sparse, FP8", _MIXED, cache=_TOKEN_SCALES, sparsity=BlockSparsity(4, 2, 3, 1)),
)
ALL_CASES = CASES + FP8_CASES + CROSS_CASES + SPARSE_CASES


@dataclass(frozen=True, slots=True)
class Inputs:
    """One case's arguments."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: AttentionBatch
    options: Options

    def to(self, device: torch.device) -> Inputs:
        """With every tensor but the batch's on the device."""

        def there(part: object) -> dict[str, object]:
            values = {field.name: getattr(part, field.name) for field in fields(part) if field.init}  # type: ignore[arg-type]  # a dataclass
            return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in values.items()}

        return Inputs(**{**there(self), "options": Options(**there(self.options))})  # type: ignore[arg-type]  # as they were

    def dense(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(query [Hq, Q, D], keys [Hkv, K, D], values [Hkv, K, Dv]) of one sequence; keys and values in float32."""
        start, end = self.batch.query_start[sequence : sequence + 2]
        context_len, block_size = self.batch.context_lens[sequence], self.key_cache.shape[1]
        blocks = self.batch.block_tables[sequence, : -(-context_len // block_size)].long()
        keys, values = (
            (cache[blocks].float() * (scale[blocks, ..., None] if isinstance(scale, torch.Tensor) else scale))
            .flatten(0, 1)[:context_len]
            .transpose(0, 1)
            for cache, scale in (
                (self.key_cache, self.options.key_scale),
                (self.value_cache, self.options.value_scale),
            )
        )
        return self.query[start:end].transpose(0, 1), keys, values


def make(case: Case, dtype: torch.dtype, *, seed: int = 0, poison: float = 0.0) -> Inputs:
    """Inputs of the case. `poison` fills cache entries past the sequences' tokens, and unused blocks."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-keys // case.block_size) for _, keys in case.sequences]
    num_blocks = sum(counts) + 3
    order = torch.arange(num_blocks) if case.is_consecutive else torch.randperm(num_blocks, generator=generator)
    tables = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
    shape = (num_blocks, case.block_size, case.num_kv_heads)
    dims = (case.key_dim, case.value_dim)
    caches = [torch.full((*shape, dim), poison) for dim in dims]
    scales = [torch.full(shape, poison) for _ in dims]
    used = 0
    for row, count in enumerate(counts):
        blocks = order[used : used + count]
        used += count
        tables[row, :count] = blocks
        tokens = torch.arange(case.sequences[row][1])
        where = (blocks[tokens // case.block_size], tokens % case.block_size)
        for cache, scale in zip(caches, scales, strict=True):
            cache[where] = torch.randn(len(tokens), *cache.shape[2:], generator=generator)
            if case.cache == _TOKEN_SCALES:
                scale[where] = torch.rand(len(tokens), case.num_kv_heads, generator=generator) + 0.5
    query_start = [0]
    for num_queries, _ in case.sequences:
        query_start.append(query_start[-1] + num_queries)
    query = torch.randn(query_start[-1], case.num_heads, case.key_dim, generator=generator)
    kept: dict[str, Sequence[KVScale]] = {_FP8: (0.7, 1.3), _TOKEN_SCALES: scales}
    key_scale, value_scale = kept.get(case.cache, (1.0, 1.0))
    options = Options(
        case.key_dim**-0.5,
        case.sliding_window,
        case.softcap,
        torch.randn(case.num_heads, generator=generator) if case.has_sinks else None,
        torch.rand(case.num_heads, generator=generator) if case.has_slopes else None,
        case.sparsity,
        key_scale,
        value_scale,
    )
    stored = dtype if case.cache == "as query" else FP8
    batch = AttentionBatch.build(tables, query_start, [keys for _, keys in case.sequences], is_causal=case.is_causal)
    if stored == FP8:
        caches = [cache.clamp(-FP8_MAX, FP8_MAX) for cache in caches]
    return Inputs(query.to(dtype), caches[0].to(stored), caches[1].to(stored), batch, options)


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
    inputs.value_cache.copy_((inputs.value_cache.float() * 30).round_())
    for row, (num_queries, num_keys) in enumerate(case.sequences):
        for dim, key in ((0, 0), (1, num_keys - num_queries)):
            block = int(inputs.batch.block_tables[row, key // case.block_size])
            inputs.key_cache[block, key % case.block_size, :, dim] = 0
    return inputs

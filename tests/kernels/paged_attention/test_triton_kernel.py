"""paged_attention's GPU kernels against their definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.paged_attention import (
    AttentionBatch,
    BlockSparsity,
    RowBatch,
    paged_attention,
    reference,
    triton_decode,
    triton_kernel,
)
from kernels.paged_attention.cases import ALL_CASES, Case, Inputs, make, make_one_hot
from kernels.paged_attention.launch import DecodeLaunch, PrefillLaunch
from kernels.paged_attention.options import Options
from kernels.triton_launch import forget_prepared
from tests.kernels.paged_attention.strategies import cases
from tests.kernels.tolerances import assert_close

# Small tiles, so that small cases cross their borders: several splits, tiles of keys with and without masks.
SMALL: dict[str, Any] = {"decode": DecodeLaunch(16, 32, split_keys=32), "prefill": PrefillLaunch(32, 32)}
TINY = DecodeLaunch(16, 16, split_keys=32)
NAN = float("nan")
case_name = attrgetter("name")


def case_named(name: str) -> Case:
    return next(case for case in ALL_CASES if case.name == name)


def define(inputs: Inputs) -> torch.Tensor:
    return reference.paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options)


def run(inputs: Inputs, device: torch.device, **launch: Any) -> torch.Tensor:
    """On the device; the result on the host."""
    there = inputs.to(device)
    return triton_kernel.paged_attention(
        there.query, there.key_cache, there.value_cache, there.batch, there.options, **{**SMALL, **launch}
    ).cpu()


def of_one(inputs: Inputs, row: int, *, first: int = 0, last: int | None = None) -> Inputs:
    """One sequence of the batch alone, or the queries first to last of it, as if the others had no keys yet."""
    batch = inputs.batch
    start, end = batch.query_start[row : row + 2]
    num_queries = end - start if last is None else last - first
    context_len = batch.context_lens[row] - (end - start - first - num_queries)
    alone = AttentionBatch.build(
        batch.block_tables[row : row + 1], [0, num_queries], [context_len], is_causal=batch.is_causal
    )
    return replace(inputs, query=inputs.query[start + first : start + first + num_queries], batch=alone)


def new_poisoned(self: torch.Tensor, *shape: int, **at: Any) -> torch.Tensor:
    return self.new_full(shape, NAN if self.is_floating_point() else 0, **at)


@pytest.mark.parametrize("case", [case for case in ALL_CASES if not case.is_consecutive], ids=case_name)
def test_equals_the_reference(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output is written, and no cache entry without an owner is read: both begin as NaN."""
    expected = define(make(case, torch.float32))
    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
    assert_close(run(make(case, torch.float32, poison=NAN), device), expected)


@settings(max_examples=12, database=None)
@given(case=cases(), block_m=st.sampled_from((16, 32)), block_n=st.sampled_from((16, 32)))
def test_random_cases_equal_the_reference(case: Case, block_m: int, block_n: int, device: torch.device) -> None:
    launch = {"decode": DecodeLaunch(block_m, block_n, split_keys=32), "prefill": PrefillLaunch(block_m, block_n)}
    expected = define(make(case, torch.float32))
    assert_close(run(make(case, torch.float32, poison=NAN), device, **launch), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["window, soft cap, sinks", "FP8", "FP8 per token and head"])
def test_short_floats_are_summed_in_float32(name: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = make(case_named(name), dtype)
    assert_close(run(inputs, device), define(inputs))


def test_scales_below_the_range_of_float16_are_kept(device: torch.device) -> None:
    """Values of about 1e-5: their scales are near 2e-8, and weights times scales less."""
    inputs = make(Case("small values", ((1, 40), (5, 40)), cache="fp8_per_token_head"), torch.float16)
    assert isinstance(inputs.options.value_scale, torch.Tensor)
    inputs.value_cache.copy_((inputs.value_cache.float() * 100).clamp(-448, 448))
    small = replace(inputs, options=replace(inputs.options, value_scale=inputs.options.value_scale * 1e-7))
    large = define(inputs).float()
    torch.testing.assert_close(run(small, device).float() * 1e7, large, rtol=0.05, atol=2.0)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 70, "softcap": 2.0, "has_sinks": True}], ids=str)
def test_splits_are_joined(options: dict[str, Any], device: torch.device) -> None:
    """From one split of one tile to five of two, and never more than max_splits."""
    case = Case("decodes", tuple((1, n) for n in (31, 32, 33, 65, 160)), 2, 1, **options)
    inputs = make(case, torch.float32, poison=NAN)
    expected = define(make(case, torch.float32))
    assert_close(run(inputs, device, decode=TINY), expected)
    assert_close(run(inputs, device, decode=replace(TINY, max_splits=2)), expected)


def test_splits_of_sparse_blocks_are_joined(device: torch.device) -> None:
    """Heads that see different numbers of blocks have different numbers of splits."""
    case = Case("sparse", ((1, 150), (1, 97)), 4, 1, sparsity=BlockSparsity(8, 2, 3, 1), cache="fp8")
    inputs = make(case, torch.float32, poison=NAN)
    assert_close(run(inputs, device, decode=TINY), define(make(case, torch.float32)))


@pytest.mark.parametrize("sparsity", [BlockSparsity(8, 2, 3, 1), BlockSparsity(8, 1, 4, -1)], ids=str)
def test_blocks_that_no_head_sees_are_not_read(sparsity: BlockSparsity, device: torch.device) -> None:
    case = Case("sparse", ((1, 150), (3, 150)), 4, 2, block_size=8, sparsity=sparsity)
    inputs = make(case, torch.float32)
    expected = run(inputs, device)
    offsets = sparsity.offsets(4, 2)[:, None, None]
    for row, first in ((0, 149), (1, 147)):
        # Sparse blocks are the cache's here.
        seen = sparsity.sees(torch.arange(first, 150)[:, None], torch.arange(150), offsets)
        is_seen = seen.view(2, 2, -1, 150).any(dim=2).any(dim=1)[:, ::8]  # by a query head of the key head
        assert not is_seen.all()
        for kv_head, block in (~is_seen).nonzero().tolist():
            for cache in (inputs.key_cache, inputs.value_cache):
                cache[int(inputs.batch.block_tables[row, block]), :, kv_head] = NAN
    assert torch.equal(run(inputs, device), expected)


@pytest.mark.parametrize(
    ("cache", "block_m", "block_n"),
    [("as query", block_m, block_n) for block_m in (16, 32, 64, 128) for block_n in (16, 64)]
    + [("as query", 32, 32), ("as query", 64, 128), ("as query", 128, 256), ("fp8", 16, 64), ("fp8", 128, 16)],
)
def test_one_key_takes_all_weight_bit_for_bit(cache: str, block_m: int, block_n: int, device: torch.device) -> None:
    case = Case("one hot", ((1, 40), (1, 7), (24, 40)), 6, 2, 16, 16, cache=cache)
    inputs = make_one_hot(case, torch.bfloat16)
    decode = DecodeLaunch(min(block_m, 32), block_n, split_keys=max(block_n, 64))
    assert torch.equal(run(inputs, device, decode=decode, prefill=PrefillLaunch(block_m, block_n)), define(inputs))


def test_equal_scores_average_bit_for_bit(device: torch.device) -> None:
    """Queries of zero over 1, 2, 4 .. 64 keys: sums of integers over powers of two are exact in any order."""
    inputs = make(Case("average", tuple((1, 1 << n) for n in range(7))), torch.float32)
    inputs.query.zero_()
    inputs.value_cache.mul_(50).round_()
    assert torch.equal(run(inputs, device, decode=TINY), define(inputs))


@pytest.mark.parametrize("name", ["mixed", "cross", "FP8 per token and head", "sparse, sliding over query heads"])
def test_a_sequence_has_the_same_bits_in_every_batch(name: str, device: torch.device) -> None:
    inputs = make(case_named(name), torch.float32)
    together = run(inputs, device)
    for row in (0, 1, len(inputs.batch.context_lens) - 2):
        start, end = inputs.batch.query_start[row : row + 2]
        assert torch.equal(run(of_one(inputs, row), device), together[start:end])


@pytest.mark.parametrize("sparsity", [None, BlockSparsity(4, 2, 3)], ids=str)
def test_a_prompt_in_chunks_has_the_values_of_a_prompt_at_once(
    sparsity: BlockSparsity | None, device: torch.device
) -> None:
    """Bit for bit where every key is visible; sparse blocks are summed in an order that depends on the chunk."""
    inputs = make(Case("prefill", ((40, 40),), sparsity=sparsity), torch.float32)
    whole = run(inputs, device)
    for first, last in ((0, 9), (9, 33), (33, 40)):
        chunk = run(of_one(inputs, 0, first=first, last=last), device)
        if sparsity is None:
            assert torch.equal(chunk, whole[first:last])
        else:
            assert_close(chunk, whole[first:last])


def test_queries_and_caches_are_read_by_their_strides(device: torch.device) -> None:
    """Queries as transformers leaves them, caches as slices of a wider tensor."""
    inputs = make(Case("strided", ((1, 20), (6, 20))), torch.float32)
    query = torch.full((4, 16, 7), NAN).permute(2, 0, 1)
    caches = [torch.full((7, 16, 2, 40), NAN)[..., 8:24] for _ in range(2)]
    strided = replace(
        inputs,
        query=query.copy_(inputs.query),
        key_cache=caches[0].copy_(inputs.key_cache),
        value_cache=caches[1].copy_(inputs.value_cache),
    )
    assert_close(run(strided, device), define(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoder_s_tokens_are_blocks_of_one(dtype: torch.dtype, device: torch.device) -> None:
    """Keys and values as slices of one projection, by their strides."""
    batch = AttentionBatch.ragged([3, 1, 0, 40])
    fused = torch.randn(44, 6, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs = Inputs(fused[:, :2], fused[:, None, 2:4], fused[:, None, 4:], batch, Options(0.25))
    assert_close(run(inputs, device), define(inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_block_past_2_to_the_31_values_is_found(dtype: torch.dtype, device: torch.device) -> None:
    """Of the cache of 2 to 4 GiB only the pages of one block are ever touched."""
    block_values = 16 * 16
    last = (1 << 31) // block_values + 1
    cache = torch.empty(last + 1, 16, 1, 16, dtype=dtype, device=device)
    rows = torch.arange(16, device=device)[:, None].expand(16, 16)
    cache[last] = rows.to(dtype).view(16, 1, 16)
    query = torch.zeros(4, 1, 16, dtype=torch.float16, device=device)
    batch = AttentionBatch.build(torch.full((2, 1), last, dtype=torch.int32), [0, 1, 4], [1, 3])
    output = triton_kernel.paged_attention(query, cache, cache, batch, Options(1.0), **SMALL).cpu()
    # The mean of the first n rows, each its own number throughout.
    assert torch.equal(output[:, 0].float(), torch.tensor([0.0, 0.0, 0.5, 1.0])[:, None].expand(4, 16))


def test_queries_and_heads_past_2_to_the_31_values_are_read(device: torch.device) -> None:
    """Queries far apart in one storage, key heads too; of each storage only the pages of four rows are touched."""
    inputs = make(Case("far", ((1, 3), (2, 3)), 2, 2, 16, 16, block_size=4), torch.bfloat16)
    stride = (1 << 30) + 8
    query = torch.empty(2 * stride + 32, dtype=torch.bfloat16, device=device).as_strided((3, 2, 16), (stride, 16, 1))
    head = (1 << 31) + 8
    size = head + inputs.key_cache.shape[0] * 64
    shape, strides = inputs.key_cache.shape, (64, 16, head, 1)
    caches = [torch.empty(size, dtype=torch.bfloat16, device=device).as_strided(shape, strides) for _ in range(2)]
    far = replace(
        inputs,
        query=query.copy_(inputs.query),
        key_cache=caches[0].copy_(inputs.key_cache),
        value_cache=caches[1].copy_(inputs.value_cache),
    )
    output = triton_kernel.paged_attention(far.query, far.key_cache, far.value_cache, far.batch, far.options, **SMALL)
    assert_close(output.cpu(), define(inputs))


def sums_of_parts(
    monkeypatch: pytest.MonkeyPatch, run_once: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, list[float]]:
    """The output, and the sums of weights of the first head that the parts to join have. Those are written once."""
    seen: list[torch.Tensor] = []
    usual = torch.Tensor.new_empty

    def kept(self: torch.Tensor, *shape: int, **at: Any) -> torch.Tensor:
        made = usual(self, *shape, **at)
        if len(shape) == 3 and shape[-1] == 2:
            seen.append(made.zero_())
        return made

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", kept)
        output = run_once()
    (parts,) = seen
    return output, [total for total in parts[:, 0, 1].tolist() if total]


@pytest.mark.parametrize(
    ("keys", "units"),
    [
        (767, [192, 192, 192, 191]),
        (1025, [192, 192, 192, 192, 192, 65]),
        (1300, [128, 128, 128, 64, 128, 128, 128, 64, 128, 128, 128, 20]),
        (129, [128, 1]),
        (128, []),
    ],
)
def test_splits_and_their_units_are_even(
    keys: int, units: list[int], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Each unit weighs all its keys alike where queries are zero, and leaves how many they are in its part."""
    inputs = make(Case("even", ((1, keys),), 2, 1), torch.float32)
    inputs.query.zero_()
    monkeypatch.setattr(triton_decode, "num_multiprocessors", lambda device: 12)
    forget_prepared()
    output, sums = sums_of_parts(monkeypatch, lambda: run(inputs, device, decode=DecodeLaunch(16, 64)))
    assert_close(output, define(inputs))
    assert sums == units


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 130, "softcap": 2.0, "has_sinks": True},
        {"cache": "fp8_per_token_head", "has_slopes": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_splits_have_the_bits_of_their_units(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """One program computes a whole split, or four its units: that depends on how many programs there are."""
    case = Case("decodes", tuple((1, n) for n in (160, 15, 64, 65, 113, 400)), 4, 2, **options)
    inputs = make(case, dtype)
    launch = DecodeLaunch(16, 16, split_keys=64)
    found = []
    for multiprocessors in (1, 1000):
        monkeypatch.setattr(triton_decode, "num_multiprocessors", lambda device, count=multiprocessors: count)
        forget_prepared()
        found.append(sums_of_parts(monkeypatch, lambda: run(inputs, device, decode=replace(launch, programs=1))))
    (of_splits, sums_of_splits), (of_units, sums_of_units) = found
    assert len(sums_of_splits) < len(sums_of_units)
    assert torch.equal(of_splits, of_units)
    assert_close(of_splits, define(inputs))


@pytest.mark.parametrize("name", ["mixed", "window, soft cap, sinks"])
def test_rows_of_tables_on_the_device_have_the_bits_of_a_table_of_the_step(name: str, device: torch.device) -> None:
    """The step's sequences lie in other rows of a larger table; the tables of the step itself are not read."""
    inputs = make(case_named(name), torch.float32)
    batch = inputs.batch
    num_seqs, width = batch.block_tables.shape
    rows = torch.randperm(3 * num_seqs, generator=torch.Generator().manual_seed(1))[:num_seqs]
    tables = torch.full((3 * num_seqs, width + 5), 1 << 30, dtype=torch.int32)
    tables[rows, :width] = batch.block_tables
    there = AttentionBatch.build(
        torch.full_like(batch.block_tables, 1 << 30),
        batch.query_start,
        batch.context_lens,
        device_tables=tables.to(device),
        table_rows=rows.numpy().astype(np.int32),
    )
    assert torch.equal(run(replace(inputs, batch=there), device), run(inputs, device))
    with pytest.raises(ValueError, match="want each other"):
        AttentionBatch.build(batch.block_tables, batch.query_start, batch.context_lens, device_tables=tables)


def row_batch(inputs: Inputs, device: torch.device, most: int) -> RowBatch:
    """Of a batch of decodes: each sequence's blocks in a row of its own, others between them, and a row of padding."""
    batch = inputs.batch
    num_seqs, width = batch.block_tables.shape
    tables = torch.full((2 * num_seqs, max(width, -(-most // 16))), 1 << 30, dtype=torch.int32)
    rows = torch.arange(num_seqs, dtype=torch.int32) * 2 + 1
    tables[rows.long(), :width] = batch.block_tables
    lens = torch.tensor([*batch.context_lens, 1 << 20], dtype=torch.int32)
    rows = torch.cat([rows, torch.full((1,), -1, dtype=torch.int32)])
    return RowBatch(tables.to(device), rows.to(device), lens.to(device), most)


DECODES = Case("decodes", ((1, 31), (1, 160), (1, 33), (1, 97)), 4, 2)


@pytest.mark.parametrize("window", [None, 70])
def test_rows_whose_lengths_the_host_does_not_know_have_the_same_bits(window: int | None, device: torch.device) -> None:
    inputs = make(replace(DECODES, sliding_window=window), torch.float32)
    expected = run(inputs, device, decode=TINY)
    query = torch.cat([inputs.query, torch.full_like(inputs.query[:1], NAN)]).to(device)
    there = inputs.to(device)
    for most in (160, 700):
        batch = row_batch(inputs, device, most)
        for _ in range(2):  # a second layer finds the list and the counts of the first
            output = triton_kernel.paged_attention(
                query, there.key_cache, there.value_cache, batch, there.options, decode=TINY
            )
            assert torch.equal(output[:-1].cpu(), expected)
    assert_close(run(inputs, device), define(inputs))


def test_rows_run_without_triton_too() -> None:
    inputs = make(DECODES, torch.float32)
    batch = row_batch(inputs, torch.device("cpu"), 160)
    output = paged_attention(
        torch.cat([inputs.query, inputs.query[:1]]),
        inputs.key_cache,
        inputs.value_cache,
        with_known_padding(batch),
        scale=inputs.options.scale,
    )
    assert_close(output[:-1], define(inputs))


def with_known_padding(batch: RowBatch) -> RowBatch:
    """The padding has a length of 0, and a table that may be read."""
    lens = batch.context_lens.clone()
    lens[-1] = 0
    return replace(batch, context_lens=lens, block_tables=batch.block_tables.where(batch.block_tables < 1 << 30, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_context_len": 0}, "max_context_len is 0, want at least 1"),
        ({"context_lens": torch.zeros(3, dtype=torch.int32)}, r"context_lens \(3,\)"),
        ({"context_lens": torch.zeros(5)}, "must be int32 tensors on one device"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    batch = row_batch(make(DECODES, torch.float32), torch.device("cpu"), 160)
    with pytest.raises(ValueError, match=message):
        replace(batch, **change)


def test_a_table_too_narrow_for_the_longest_row_is_refused() -> None:
    batch = row_batch(make(DECODES, torch.float32), torch.device("cpu"), 160)
    with pytest.raises(ValueError, match="1600 tokens need more than 11 blocks of 16"):
        replace(batch, max_context_len=1600).on_device(torch.device("cpu"), 16)

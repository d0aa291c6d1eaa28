"""paged_attention's GPU kernels against their definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from kernels.paged_attention import AttentionBatch, reference, triton_kernel
from kernels.paged_attention.cases import CASES, Case, Inputs, make, make_one_hot
from kernels.paged_attention.triton_kernel import Tiles
from tests.kernels.tolerances import assert_close

# Small tiles, so that small cases cross their borders: several splits, tiles of keys with and without masks.
SMALL: dict[str, Any] = {"decode": Tiles(16, 32, 4, 1), "prefill": Tiles(32, 32, 4, 1), "split_keys": 32}
NAN = float("nan")
by_name = {"ids": lambda case: case.name}


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def define(case: Case, inputs: Inputs) -> torch.Tensor:
    return reference.paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.query_start,
        inputs.context_lens,
        **options_of(case, inputs),
    )


def to(device: torch.device, inputs: Inputs) -> Inputs:
    values = [getattr(inputs, field.name) for field in fields(inputs)]
    return Inputs(*(value.to(device) if isinstance(value, torch.Tensor) else value for value in values))


def run(case: Case, inputs: Inputs, device: torch.device, **launch: Any) -> torch.Tensor:
    """On the device; the result on the host."""
    there = to(device, inputs)
    return triton_kernel.paged_attention(
        there.query,
        there.key_cache,
        there.value_cache,
        AttentionBatch.build(inputs.block_tables, inputs.query_start, inputs.context_lens),
        **options_of(case, there),
        **{**SMALL, **launch},
    ).cpu()


def options_of(case: Case, inputs: Inputs) -> dict[str, Any]:
    return {
        "scale": inputs.scale,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        "sinks": inputs.sinks,
        "alibi_slopes": inputs.alibi_slopes,
    }


def new_poisoned(self: torch.Tensor, *shape: int, **at: Any) -> torch.Tensor:
    return self.new_full(shape, NAN if self.is_floating_point() else 0, **at)


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_consecutive], **by_name)
def test_equals_the_reference(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output is written, and no cache entry of nobody is read: both begin as NaN."""
    inputs = make(case, torch.float32, poison=NAN)
    clean = make(case, torch.float32)
    expected = define(case, clean)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
    assert_close(run(case, inputs, device), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats_are_summed_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    case = case_named("window, soft cap, sinks")
    inputs = make(case, dtype)
    assert_close(run(case, inputs, device), define(case, inputs))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 70, "softcap": 2.0, "has_sinks": True}], ids=str)
def test_splits_are_joined(options: dict[str, Any], device: torch.device) -> None:
    """From one split of one tile to five of two, and never more than max_splits."""
    case = Case("decodes", tuple((1, n) for n in (31, 32, 33, 64, 65, 160, 150)), **options)
    inputs = make(case, torch.float32, poison=NAN)
    expected = define(case, make(case, torch.float32))
    assert_close(run(case, inputs, device, decode=Tiles(16, 16, 4, 1)), expected)
    assert_close(run(case, inputs, device, decode=Tiles(16, 16, 4, 1), max_splits=2), expected)


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("block_n", [16, 64])
def test_one_key_takes_all_weight_bit_for_bit(block_m: int, block_n: int, device: torch.device) -> None:
    case = Case("one hot", ((1, 40), (1, 7), (24, 40)), 6, 2, 16, 16)
    inputs = make_one_hot(case, torch.bfloat16)
    launch = {"decode": Tiles(min(block_m, 32), block_n, 4, 1), "prefill": Tiles(block_m, block_n, 4, 1)}
    assert torch.equal(run(case, inputs, device, split_keys=64, **launch), define(case, inputs))


def test_equal_scores_average_bit_for_bit(device: torch.device) -> None:
    """Queries of zero over 1, 2, 4 .. 64 keys: sums of integers over powers of two are exact in any order."""
    case = Case("average", tuple((1, 1 << n) for n in range(7)))
    inputs = make(case, torch.float32)
    inputs.query.zero_()
    inputs.value_cache.mul_(50).round_()
    assert torch.equal(run(case, inputs, device, decode=Tiles(16, 16, 4, 1)), define(case, inputs))


def test_a_sequence_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    case = case_named("mixed")
    inputs = make(case, torch.float32)
    together = run(case, inputs, device)
    for row in (1, 4, 7):
        start, end = inputs.query_start[row], inputs.query_start[row + 1]
        alone = Inputs(
            inputs.query[start:end],
            inputs.key_cache,
            inputs.value_cache,
            inputs.block_tables[row : row + 1],
            [0, end - start],
            inputs.context_lens[row : row + 1],
            None,
            inputs.scale,
        )
        assert torch.equal(run(case, alone, device), together[start:end])


def test_a_prompt_in_chunks_has_the_bits_of_a_prompt_at_once(device: torch.device) -> None:
    case = Case("prefill", ((40, 40),))
    inputs = make(case, torch.float32)
    whole = run(case, inputs, device)
    for start, end in ((0, 9), (9, 33), (33, 40)):
        chunk = Inputs(
            inputs.query[start:end],
            inputs.key_cache,
            inputs.value_cache,
            inputs.block_tables,
            [0, end - start],
            [end],
            None,
            inputs.scale,
        )
        assert torch.equal(run(case, chunk, device), whole[start:end])


def test_queries_and_caches_are_read_by_their_strides(device: torch.device) -> None:
    """Queries as transformers leaves them, caches as slices of a wider tensor."""
    case = Case("strided", ((1, 20), (6, 20)))
    inputs = make(case, torch.float32)
    expected = define(case, inputs)
    query = torch.full((4, 16, 7), NAN).permute(2, 0, 1)
    caches = [torch.full((7, 16, 2, 40), NAN)[..., 8:24] for _ in range(2)]
    strided = Inputs(
        query.copy_(inputs.query),
        caches[0].copy_(inputs.key_cache),
        caches[1].copy_(inputs.value_cache),
        inputs.block_tables,
        inputs.query_start,
        inputs.context_lens,
        None,
        inputs.scale,
    )
    assert_close(run(case, strided, device), expected)


def test_a_block_past_2_to_the_31_values_is_found(device: torch.device) -> None:
    """Of the 4 GiB cache only the pages of one block are ever touched."""
    block_values = 16 * 16
    last = (1 << 31) // block_values + 1
    cache = torch.empty(last + 1, 16, 1, 16, dtype=torch.float16, device=device)
    cache[last] = torch.arange(block_values, dtype=torch.float16, device=device).view(16, 1, 16)
    query = torch.zeros(4, 1, 16, dtype=torch.float16, device=device)
    batch = AttentionBatch.build(torch.full((2, 1), last, dtype=torch.int32), [0, 1, 4], [1, 3])
    options = options_of(Case("far", ()), Inputs(query, cache, cache, query, [], [], None, 1.0))
    output = triton_kernel.paged_attention(query, cache, cache, batch, **options, **SMALL).cpu()
    # The mean of n rows of 16 consecutive numbers each, 16 apart.
    first = torch.tensor([0.0, 0.0, 8.0, 16.0])
    assert torch.equal(output[:, 0].float(), first[:, None] + torch.arange(16))


def test_tiles_cover_every_query_once_and_the_longest_come_first() -> None:
    batch = AttentionBatch.build(torch.zeros(4, 10, dtype=torch.int32), [0, 5, 6, 6, 9], [5, 90, 3, 80])
    on_device = batch.on_device(torch.device("cpu"), 16)
    assert on_device.tiles(4).tolist() == [[3, 0], [0, 4], [0, 0]]
    assert on_device.decode_sequences.tolist() == [1]
    assert batch.on_device(torch.device("cpu"), 16) is on_device
    with pytest.raises(ValueError, match="90 tokens need more than 10 blocks of 8"):
        batch.on_device(torch.device("cpu"), 8)

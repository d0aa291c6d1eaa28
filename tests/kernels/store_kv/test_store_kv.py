"""store_kv against its definition."""

from __future__ import annotations

import pytest
import torch

from kernels.store_kv import reference, store_kv
from kernels.store_kv.cases import CASES, Case, make


def caches(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    nan = float("nan")
    return torch.full((*shape, case.key_dim), nan, dtype=dtype), torch.full((*shape, case.value_dim), nan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference_bit_for_bit(case: Case, dtype: torch.dtype) -> None:
    """Slots that nobody writes keep their NaN."""
    key, value, slots = make(case, torch.float32)
    actual, expected = caches(case, dtype), caches(case, dtype)
    store_kv(key, value, *actual, slots)
    reference.store_kv(key, value, *expected, slots)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours.nan_to_num(nan=1e4), theirs.nan_to_num(nan=1e4))
    written = int((slots >= 0).sum()) * case.num_kv_heads * case.key_dim
    assert int(actual[0].isfinite().sum()) == written


def test_wrong_shapes_are_refused() -> None:
    case = CASES[3]
    key, value, slots = make(case, torch.float32)
    key_cache, value_cache = caches(case, torch.float32)
    with pytest.raises(ValueError, match=r"key .* does not fit key_cache"):
        store_kv(value, value, key_cache, value_cache, slots)
    with pytest.raises(ValueError, match="want int64"):
        store_kv(key, value, key_cache, value_cache, slots.int())
    with pytest.raises(ValueError, match="must be contiguous"):
        store_kv(key, value, key_cache.transpose(0, 1).contiguous().transpose(0, 1), value_cache, slots)
    with pytest.raises(ValueError, match="disagree"):
        store_kv(key, value, key_cache[1:], value_cache, slots)

"""store_kv in native code; what it writes is compared with the definition in test_store_kv.py."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8 import FP8
from kernels.store_kv import cpu, native
from kernels.store_kv.cases import CASES, Case, make, make_fp8_caches
from tests.kernels.threads import in_threads


def codes_of(values: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """FP8 codes of tokens with one head, values [T, D]."""
    count, dim = values.shape
    cache = torch.zeros(count, 1, 1, dim).to(FP8)
    tokens, kv_positions = values[:, None], torch.arange(count)
    native.store_kv(tokens, tokens, cache, cache.clone(), kv_positions, scale, scale)
    return cache.view(torch.uint8)[:, 0, 0]


def test_every_float16_becomes_the_fp8_code_that_torch_gives_it() -> None:
    """All 65536 numbers of float16 and as many bfloat16 ones, and their neighbours in float32; each NaN is one."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    values = torch.cat([every.view(dtype).float() for dtype in (torch.float16, torch.bfloat16)])
    values = torch.cat([values, values * (1 + 2.0**-20), values * (1 - 2.0**-20)]).view(-1, 64)
    ours, theirs = codes_of(values, 1.0), values.clamp(-448, 448).to(FP8).view(torch.uint8)
    assert torch.equal(ours & 0x7F, theirs & 0x7F)
    assert torch.equal(ours[~values.isnan()], theirs[~values.isnan()])


@pytest.mark.parametrize("dim", [5, 16, 40])
def test_heads_that_are_not_finite_are_stored_as_torch_stores_them(dim: int) -> None:
    """A NaN makes its own head NaN, and an infinite number leaves zeros and a NaN; other heads stay finite."""
    values = torch.randn(4, dim, generator=torch.Generator().manual_seed(0))
    values[1, dim - 1], values[2, 3] = float("nan"), float("inf")
    values[3] = 0
    cache, ours, theirs = torch.zeros(4, 1, 1, dim).to(FP8), torch.ones(4, 1, 1), torch.ones(4, 1, 1)
    cpu.store_kv(values[:, None], values[:, None], cache, cache.clone(), torch.arange(4), theirs, theirs.clone())
    assert torch.equal(codes_of(values, ours) & 0x7F, cache.view(torch.uint8)[:, 0, 0] & 0x7F)
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_bits_do_not_depend_on_the_threads() -> None:
    case = Case("many", 700, 4, 32, 24, 60, 16, 5)
    key, value, kv_positions = make(case, torch.bfloat16)

    def run() -> list[torch.Tensor]:
        keys, values, key_scale, value_scale = make_fp8_caches(case, has_token_scales=True)
        assert isinstance(key_scale, torch.Tensor) and isinstance(value_scale, torch.Tensor)
        native.store_kv(key, value, keys, values, kv_positions, key_scale, value_scale)
        return [keys.view(torch.uint8), values.view(torch.uint8), key_scale, value_scale]

    one, *others = in_threads(run)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, one, strict=True))


def test_kv_positions_behind_the_cache_are_refused() -> None:
    key, value, kv_positions = make(CASES[3], torch.float32)
    caches = torch.zeros(9, 3, 3, 7), torch.zeros(9, 3, 3, 5)
    kv_positions[4] = 27
    with pytest.raises(IndexError, match="kv_positions has 27, the caches have 27 positions"):
        native.store_kv(key, value, *caches, kv_positions)


def test_what_the_op_does_not_serve_is_left_to_torch() -> None:
    key, value, _ = make(CASES[3], torch.float32)
    caches = torch.zeros(9, 3, 3, 7), torch.zeros(9, 3, 3, 5)
    assert native.can_serve(key, value, *caches)
    assert not native.can_serve(key, value.half(), *caches)
    assert not native.can_serve(key, value, caches[0], caches[1].half())
    assert not native.can_serve(key, value.transpose(1, 2).contiguous().transpose(1, 2), *caches)

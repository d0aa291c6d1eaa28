"""store_kv against its definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.fp8 import FP8, FP8_MAX, MIN_SCALE, KVScale, fp8_refusal, widen
from kernels.store_kv import cpu, reference, store_kv
from kernels.store_kv.cases import CASES, Case, make, make_fp8_caches


def caches(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    nan = float("nan")
    return torch.full((*shape, case.key_dim), nan, dtype=dtype), torch.full((*shape, case.value_dim), nan, dtype=dtype)


@pytest.mark.parametrize("run", [store_kv, cpu.store_kv], ids=["chosen", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference_bit_for_bit(case: Case, dtype: torch.dtype, run: Callable[..., None]) -> None:
    """Slots that nobody writes keep their NaN."""
    key, value, kv_positions = make(case, torch.float32)
    actual, expected = caches(case, dtype), caches(case, dtype)
    run(key, value, *actual, kv_positions)
    reference.store_kv(key, value, *expected, kv_positions)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours.nan_to_num(nan=1e4), theirs.nan_to_num(nan=1e4))
    written = int((kv_positions >= 0).sum()) * case.num_kv_heads * case.key_dim
    assert int(actual[0].isfinite().sum()) == written


@pytest.mark.parametrize("run", [store_kv, cpu.store_kv], ids=["chosen", "torch"])
@pytest.mark.parametrize("has_token_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fp8_equals_the_reference_bit_for_bit(
    case: Case, dtype: torch.dtype, run: Callable[..., None], *, has_token_scales: bool
) -> None:
    """Slots that nobody writes keep what they held."""
    key, value, kv_positions = make(case, dtype)
    actual, expected = (make_fp8_caches(case, has_token_scales=has_token_scales) for _ in range(2))
    run(key, value, *actual[:2], kv_positions, *actual[2:])
    reference.store_kv(key, value, *expected[:2], kv_positions, *expected[2:])
    for ours, theirs in zip(actual, expected, strict=True):
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            assert torch.equal(ours.float(), theirs.float())


def store_one(values: torch.Tensor, scale: KVScale) -> torch.Tensor:
    """The codes of one token with one head, as values without their scale."""
    cache = torch.zeros(1, 1, 1, len(values)).to(FP8)
    tokens = values[None, None]
    store_kv(tokens, tokens, cache, cache.clone(), torch.tensor([0]), scale, scale)
    return cache.float()[0, 0, 0]


def test_fp8_saturates_and_keeps_nan() -> None:
    values = torch.tensor([1e6, -1e6, 449.0, float("nan"), 2.0**-12, float("inf")])
    stored = store_one(values, 1.0)
    assert stored[[0, 1, 2, 4, 5]].tolist() == [448, -448, 448, 0, 448]
    assert stored[3].isnan()
    assert store_one(values, 2.0)[:3].tolist() == [448, -448, 224]


def test_a_scale_of_a_token_and_head_makes_its_largest_value_448() -> None:
    scale = torch.full((1, 1, 1), 9.0)
    stored = store_one(torch.tensor([0.01, -0.02, 0.005]), scale)
    assert stored.tolist() == [224, -448, 112]
    assert scale.item() == pytest.approx(0.02 / FP8_MAX)
    assert store_one(torch.zeros(3), scale).tolist() == [0, 0, 0]
    assert scale.item() == MIN_SCALE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_fp8_code_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(FP8)
    ours, theirs = widen(codes, dtype), codes.to(dtype)
    assert torch.equal(ours.nan_to_num(nan=1e4), theirs.nan_to_num(nan=1e4))


def test_wrong_scales_are_refused() -> None:
    case = CASES[3]
    key, value, kv_positions = make(case, torch.float32)
    keys, values, key_scale, _ = make_fp8_caches(case, has_token_scales=True)
    assert isinstance(key_scale, torch.Tensor)
    with pytest.raises(ValueError, match="of two kinds"):
        store_kv(key, value, keys, values, kv_positions, key_scale, 1.0)
    with pytest.raises(ValueError, match=r"value_scale is torch\.float32 \(3,\)"):
        store_kv(key, value, keys, values, kv_positions, key_scale, torch.ones(3))
    with pytest.raises(ValueError, match=r"key_scale is 0\.0, want a positive number"):
        store_kv(key, value, keys, values, kv_positions, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"only torch\.float8_e4m3fn caches have scales"):
        store_kv(key, value, *caches(case, torch.bfloat16), kv_positions, 1.0, 2.0)
    with pytest.raises(ValueError, match=r"want both torch\.float8_e4m3fn or neither"):
        store_kv(key, value, keys, values.float(), kv_positions)


def test_an_old_gpu_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    assert fp8_refusal(torch.device("cpu")) is None
    assert fp8_refusal(torch.device("cuda", 99)) == (  # what a device can do is kept
        "NVIDIA A100 has compute capability 8.0, FP8 KV caches need at least 8.9"
    )


def test_wrong_shapes_are_refused() -> None:
    case = CASES[3]
    key, value, kv_positions = make(case, torch.float32)
    key_cache, value_cache = caches(case, torch.float32)
    with pytest.raises(ValueError, match=r"key .* does not fit key_cache"):
        store_kv(value, value, key_cache, value_cache, kv_positions)
    with pytest.raises(ValueError, match="want int64"):
        store_kv(key, value, key_cache, value_cache, kv_positions.int())
    with pytest.raises(ValueError, match="must be contiguous"):
        store_kv(key, value, key_cache.transpose(0, 1).contiguous().transpose(0, 1), value_cache, kv_positions)
    with pytest.raises(ValueError, match="disagree"):
        store_kv(key, value, key_cache[1:], value_cache, kv_positions)


def test_codes_that_do_not_lie_in_pairs_are_widened_too() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    for part in (codes[1:], codes[1:100], codes[:7], codes[:0]):
        assert torch.equal(widen(part, torch.bfloat16).nan_to_num(), part.to(torch.bfloat16).nan_to_num())

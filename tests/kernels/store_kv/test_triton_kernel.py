"""store_kv's GPU kernel against its definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.cases import to_device
from kernels.fp8 import FP8, KVScale
from kernels.store_kv import reference, triton_kernel
from kernels.store_kv.cases import CASES, Case, make, make_fp8_caches

NAN = float("nan")
LARGEST = 13 if not torch.cuda.is_available() else 1 << 20  # tokens of a case; the interpreter is slow


def equal_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.cpu().nan_to_num(nan=1e4), theirs.nan_to_num(nan=1e4))


@pytest.mark.parametrize("from_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.num_tokens <= LARGEST], ids=lambda case: case.name)
def test_equals_the_reference_bit_for_bit(
    case: Case, from_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """Slots that nobody writes keep their NaN."""
    key, value, kv_positions = make(case, from_dtype)
    if device.type == "cpu" and dtype == torch.float16:
        # The interpreter cuts digits off where a GPU rounds: values that need neither.
        for tensor in (key, value):
            tensor.copy_(tensor.bfloat16().clamp(-3, 3))
    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    expected = [torch.full((*shape, dim), NAN, dtype=dtype) for dim in (case.key_dim, case.value_dim)]
    actual = [cache.to(device, copy=True) for cache in expected]
    reference.store_kv(key, value, expected[0], expected[1], kv_positions)
    there = [to_device(tensor, device) for tensor in (key, value)]
    triton_kernel.store_kv(there[0], there[1], actual[0], actual[1], kv_positions.to(device))
    for ours, theirs in zip(actual, expected, strict=True):
        assert equal_bits(ours, theirs)


@pytest.mark.parametrize("has_token_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.num_tokens <= LARGEST], ids=lambda case: case.name)
def test_fp8_equals_the_reference_bit_for_bit(
    case: Case, dtype: torch.dtype, device: torch.device, *, has_token_scales: bool
) -> None:
    """Sizes from 1e-4 to 1e4, so that both ends of the range are met. Slots that nobody writes keep their ones."""
    key, value, kv_positions = make(case, torch.float32)
    key, value = ((tensor * 10**tensor).to(dtype) for tensor in (key, value))
    expected = make_fp8_caches(case, has_token_scales=has_token_scales)
    actual = make_fp8_caches(case, has_token_scales=has_token_scales, device=device)
    reference.store_kv(key, value, *expected[:2], kv_positions, *expected[2:])
    there = [to_device(tensor, device) for tensor in (key, value)]
    triton_kernel.store_kv(there[0], there[1], *actual[:2], kv_positions.to(device), *actual[2:])
    for ours, theirs in zip(actual, expected, strict=True):
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            assert torch.equal(ours.cpu().float(), theirs.float())


@settings(max_examples=15, database=None)
@given(data=st.data())
def test_random_cases_equal_the_reference_bit_for_bit(data: st.DataObject, device: torch.device) -> None:
    """Any layout of the tokens in memory: their three dimensions in any order, and values apart."""
    num_tokens = data.draw(st.integers(1, 5))
    case = Case(
        "random",
        num_tokens,
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(2, 4)),
        data.draw(st.integers(3, 5)),
        data.draw(st.integers(0, num_tokens)),
    )
    order = data.draw(st.permutations(range(3)))
    step = data.draw(st.integers(1, 2))
    key, value, kv_positions = make(case, torch.float32)
    key, value = (permuted(tensor.bfloat16(), order, step) for tensor in (key, value))
    kind = data.draw(st.sampled_from(("bfloat16", "fp8", "fp8 per token and head")))
    expected, actual = (caches_of(case, kind, place) for place in (torch.device("cpu"), device))
    reference.store_kv(key, value, *expected[:2], kv_positions, *expected[2:])
    there = [to_device(tensor, device) for tensor in (key, value)]
    triton_kernel.store_kv(there[0], there[1], *actual[:2], kv_positions.to(device), *actual[2:])
    for ours, theirs in zip(actual, expected, strict=True):
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            assert equal_bits(ours.float(), theirs.float())


def permuted(tokens: torch.Tensor, order: Sequence[int], step: int) -> torch.Tensor:
    """The same values, with dimensions that lie in memory in this order and every step-th value used."""
    shape = [tokens.shape[axis] for axis in order]
    spread = torch.full((*shape[:2], shape[2] * step), NAN, dtype=tokens.dtype)[..., ::step]
    return spread.permute([order.index(axis) for axis in range(3)]).copy_(tokens)


def caches_of(case: Case, kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, KVScale, KVScale]:
    if kind != "bfloat16":
        return make_fp8_caches(case, has_token_scales=kind != "fp8", device=device)
    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    keys, values = (
        torch.full((*shape, dim), NAN, dtype=torch.bfloat16, device=device) for dim in (case.key_dim, case.value_dim)
    )
    return keys, values, 1.0, 1.0


def test_fp8_saturates_and_keeps_nan(device: torch.device) -> None:
    values = torch.tensor([1e6, -1e6, 449.0, NAN, 2.0**-12, 1.0], device=device)[None, None]
    cache = torch.zeros(1, 1, 1, 6, device=device).to(FP8)
    triton_kernel.store_kv(values, values, cache, cache.clone(), torch.tensor([0], device=device))
    stored = cache.cpu().float()[0, 0, 0]
    assert stored[[0, 1, 2, 4, 5]].tolist() == [448, -448, 448, 0, 1]
    assert stored[3].isnan()


def test_a_token_wider_than_one_chunk_is_written_whole(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "MAX_CHUNK", 16)
    key, value = torch.randn(3, 5, 7, device=device), torch.randn(3, 5, 3, device=device)
    caches = [torch.full((2, 4, 5, dim), NAN, device=device) for dim in (7, 3)]
    triton_kernel.store_kv(key, value, caches[0], caches[1], torch.tensor([6, -1, 1], device=device))
    assert torch.equal(caches[0].view(8, 5, 7)[[6, 1]], key[[0, 2]])
    assert torch.equal(caches[1].view(8, 5, 3)[[6, 1]], value[[0, 2]])
    assert int(caches[0].isfinite().sum()) == 2 * 35


def test_slices_of_a_fused_projection_are_read_by_their_strides(device: torch.device) -> None:
    key, value, kv_positions = make(Case("strided", 5, 2, 16, 16, 2, 16, 1, is_strided=True), torch.float32)
    fused = torch.empty_strided((5, 2, 16), key.stride(), device=device)
    caches = [torch.zeros(2, 16, 2, 16, device=device) for _ in range(2)]
    expected = [cache.cpu().clone() for cache in caches]
    reference.store_kv(key, value, expected[0], expected[1], kv_positions)
    triton_kernel.store_kv(fused.copy_(key), value.to(device), caches[0], caches[1], kv_positions.to(device))
    assert torch.equal(caches[0].cpu(), expected[0])
    assert torch.equal(caches[1].cpu(), expected[1])


def test_a_kv_position_past_2_to_the_31_values_is_found(device: torch.device) -> None:
    """Its offset needs 64 bits. Of the 4 GiB cache only the pages of two KV positions are ever touched."""
    width = 64
    kv_position = (1 << 31) // width + 1
    cache = torch.empty(1, kv_position + 1, 1, width, dtype=torch.float16, device=device)
    cache[0, [1, kv_position]] = 0
    key = torch.ones(1, 1, width, dtype=torch.float16, device=device)
    triton_kernel.store_kv(key, key, cache, cache, torch.tensor([kv_position], device=device))
    assert cache[0, kv_position].eq(1).all()
    assert cache[0, 1].eq(0).all()


def test_a_token_past_2_to_the_31_values_is_read(device: torch.device) -> None:
    """Tokens far apart, of which only three pages are ever touched, for both kernels. The stride itself has 32 bits."""
    stride = (1 << 30) + 5
    storage = torch.empty(2 * stride + 8, dtype=torch.bfloat16, device=device)
    tokens = storage.as_strided((3, 1, 8), (stride, 8, 1))
    tokens.copy_(torch.arange(24).view(3, 1, 8))
    for has_token_scales in (False, True):
        caches = make_fp8_caches(Case("far", 3, 1, 8, 8, 1, 4, 0), has_token_scales=has_token_scales, device=device)
        expected = make_fp8_caches(Case("far", 3, 1, 8, 8, 1, 4, 0), has_token_scales=has_token_scales)
        kv_positions = torch.tensor([1, 0, 3], device=device)
        triton_kernel.store_kv(tokens, tokens, *caches[:2], kv_positions, *caches[2:])
        reference.store_kv(tokens.cpu(), tokens.cpu(), *expected[:2], kv_positions.cpu(), *expected[2:])
        assert torch.equal(caches[0].cpu().float(), expected[0].float())


@pytest.mark.parametrize("dtype", [torch.float16, FP8], ids=str)
def test_a_kv_position_past_2_to_the_31_values_is_written(dtype: torch.dtype, device: torch.device) -> None:
    """Of the caches of 2 to 4 GiB only the pages of two tokens are ever touched."""
    far = (1 << 31) // 8 + 5
    keys, values = (torch.empty(far // 16 + 1, 16, 1, 8, dtype=dtype, device=device) for _ in range(2))
    key = torch.arange(16.0, device=device).view(2, 1, 8)
    kv_positions = torch.tensor([far, 3], device=device)
    if dtype is FP8:
        triton_kernel.store_kv(key, -key, keys, values, kv_positions, 1.0, 1.0)
    else:
        triton_kernel.store_kv(key, -key, keys, values, kv_positions)
    for token, position in enumerate((far, 3)):
        assert torch.equal(keys[position // 16, position % 16].float(), key[token])
        assert torch.equal(values[position // 16, position % 16].float(), -key[token])

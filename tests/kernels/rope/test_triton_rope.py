"""apply_rope's GPU kernel against its definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.rope import reference, triton_kernel
from kernels.rope.cases import CASES, Case, Inputs, make
from kernels.store_kv.reference import store_kv
from tests.kernels.tolerances import assert_close


def run_reference(inputs: Inputs) -> None:
    reference.apply_rope(inputs.query, inputs.key, inputs.positions, inputs.cos, inputs.sin, inputs.norm)
    store_kv(inputs.key, inputs.value, inputs.key_cache, inputs.value_cache, inputs.kv_positions)


def run_kernel(inputs: Inputs, *, has_cache: bool = True) -> None:
    store = inputs.store() if has_cache else None
    triton_kernel.apply_rope(inputs.query, inputs.key, inputs.positions, inputs.cos, inputs.sin, inputs.norm, store)


def check(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    """Rotation and caches; KV positions that no token has keep their NaN."""
    ours, theirs = make(case, dtype, device=device.type, seed=seed), make(case, dtype, seed=seed)
    run_reference(theirs)
    run_kernel(ours)
    for mine, other in zip(ours.changed(), theirs.changed(), strict=True):
        assert torch.equal(mine.cpu().isnan(), other.isnan())
        assert_close(mine.cpu().nan_to_num(), other.nan_to_num(), magnitude=4.0 if case.has_norm else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_equals_the_reference(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    check(case, dtype, device)


@pytest.mark.parametrize("case", [CASES[3], CASES[6]], ids=lambda case: case.name)
def test_without_a_cache_the_same_bits_are_rotated(case: Case, device: torch.device) -> None:
    stored, alone = make(case, torch.float32, device=device.type), make(case, torch.float32, device=device.type)
    run_kernel(stored)
    run_kernel(alone, has_cache=False)
    assert torch.equal(alone.query, stored.query)
    assert torch.equal(alone.key, stored.key)
    assert alone.key_cache.isnan().all()


@settings(max_examples=6)
@given(
    num_tokens=st.integers(1, 3),
    num_kv_heads=st.integers(1, 5),
    group=st.integers(1, 3),
    dim=st.integers(2, 24),
    value_dim=st.integers(1, 20),
    rotated=st.floats(0.1, 1.0),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_random_shapes_equal_the_reference(
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    dim: int,
    value_dim: int,
    rotated: float,
    flags: tuple[bool, bool, bool],
    seed: int,
) -> None:
    rotary_dim = max(int(dim * rotated) // 2, 1) * 2
    heads = (num_kv_heads * group, num_kv_heads)
    case = Case("random", num_tokens, *heads, dim, value_dim, rotary_dim, num_tokens // 2, flags[0], flags[1])
    check(
        Case(**{name: getattr(case, name) for name in case.__slots__} | {"has_positions": flags[2]}),
        torch.float32,
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        seed,
    )


def test_quarter_turns_are_exact(device: torch.device) -> None:
    """cos 0, sin 1: (a, b) becomes (-b, a)."""
    query = torch.arange(16.0, device=device).view(1, 2, 8)
    key = query[:, :1].clone()
    zeros, ones = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    expected = torch.cat([-query[..., 4:], query[..., :4]], dim=-1)
    triton_kernel.apply_rope(query, key, torch.zeros(1, dtype=torch.int64, device=device), zeros, ones, None, None)
    assert torch.equal(query, expected)
    assert torch.equal(key, expected[:, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_powers_of_two_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    """Heads of +-2^n have a mean square of 4^n, and a quarter turn swaps the halves: bit for bit."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (3, 8, 16), generator=generator) * 2.0 - 1
    heads = (signs * torch.tensor([0.5, 1.0, 8.0])[:, None, None]).to(dtype)
    weights = torch.arange(1.0, 17.0).to(dtype)
    normed = (signs * weights.float()).to(dtype)
    expected = torch.cat([-normed[..., 8:], normed[..., :8]], dim=-1)
    query, key = heads.to(device, copy=True), heads[:, :4].to(device, copy=True)
    turn = (torch.zeros(3, 8, device=device), torch.ones(3, 8, device=device))
    norm = reference.HeadNorm(weights.to(device), weights.to(device), 0.0)
    triton_kernel.apply_rope(query, key, None, *turn, norm, None)
    assert torch.equal(query.cpu(), expected)
    assert torch.equal(key.cpu(), expected[:, :4])


def test_a_tokens_bits_do_not_depend_on_the_batch(device: torch.device) -> None:
    case = CASES[7]
    batch, alone = make(case, torch.float32, device=device.type), make(case, torch.float32, device=device.type)
    run_kernel(batch)
    last = case.num_tokens - 1
    query, key = alone.query[last:].clone(), alone.key[last:].clone()
    triton_kernel.apply_rope(query, key, None, alone.cos[last:], alone.sin[last:], alone.norm, None)
    assert torch.equal(query, batch.query[last:])
    assert torch.equal(key, batch.key[last:])


def test_a_token_past_2_to_the_31_values_is_found(device: torch.device) -> None:
    """Its offset needs 64 bits, the stride does not. Of the 4 GiB only the pages of three tokens are ever touched."""
    far = torch.empty((1 << 31) + 64, dtype=torch.float16, device=device).as_strided((3, 1, 8), (1 << 30, 8, 1))
    far.copy_(torch.arange(24.0).view(3, 1, 8))
    key = far.clone()
    turn = (torch.zeros(3, 4, device=device), torch.ones(3, 4, device=device))
    triton_kernel.apply_rope(far, key, None, *turn, None, None)
    assert torch.equal(far, key)
    assert far[2, 0].tolist() == [-20, -21, -22, -23, 16, 17, 18, 19]


def test_a_kv_position_past_2_to_the_31_values_is_written(device: torch.device) -> None:
    """Of the caches of 4 GiB only the pages of two tokens are ever touched."""
    far = (1 << 31) // 8 + 5
    keys, values = (torch.empty(far // 16 + 1, 16, 1, 8, dtype=torch.float16, device=device) for _ in range(2))
    key = torch.arange(16.0, device=device).half().view(2, 1, 8)
    value = -key
    turn = (torch.ones(2, 4, device=device), torch.zeros(2, 4, device=device))  # by nothing
    store = (value, keys, values, torch.tensor([far, 3], device=device))
    triton_kernel.apply_rope(key.clone(), key, None, *turn, None, store)
    for token, position in enumerate((far, 3)):
        assert torch.equal(keys[position // 16, position % 16], key[token])
        assert torch.equal(values[position // 16, position % 16], value[token])

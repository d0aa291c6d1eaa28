"""apply_rope in native code, alone and with the cache write, against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.fp8 import FP8
from kernels.native import Step, run_one
from kernels.rope import native, reference
from kernels.rope.cases import CASES, Case, Inputs, make
from kernels.store_kv import reference as stores
from tests.kernels.threads import in_threads
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run_reference(inputs: Inputs) -> None:
    reference.apply_rope(inputs.query, inputs.key, inputs.positions, inputs.cos, inputs.sin, inputs.norm)
    stores.store_kv(inputs.key, inputs.value, inputs.key_cache, inputs.value_cache, inputs.kv_positions)


def run_native(inputs: Inputs) -> None:
    assert native.can_serve(inputs.query, inputs.key, inputs.cos, inputs.sin, inputs.norm)
    native.apply_rope(inputs.query, inputs.key, inputs.positions, inputs.cos, inputs.sin, inputs.norm, inputs.store())


def check(case: Case, dtype: torch.dtype, seed: int = 0, *, table_dtype: torch.dtype = torch.float32) -> None:
    """Rotation and caches; what lies beside the heads and KV positions that no token has stay."""
    ours, theirs = make(case, dtype, seed=seed), make(case, dtype, seed=seed)
    for inputs in (ours, theirs):
        inputs.cos, inputs.sin = inputs.cos.to(table_dtype), inputs.sin.to(table_dtype)
    run_reference(theirs)
    run_native(ours)
    for mine, other in zip((*ours.changed(), ours.value), (*theirs.changed(), theirs.value), strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
        assert_close(mine.nan_to_num(), other.nan_to_num(), magnitude=4.0 if case.has_norm else 1.0)
    kept = ours.kv_positions >= 0
    kv_positions = ours.kv_positions[kept]
    assert torch.equal(ours.key_cache.flatten(0, 1)[kv_positions], ours.key[kept])
    assert torch.equal(ours.value_cache.flatten(0, 1)[kv_positions], ours.value[kept])


@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_native_op_equals_the_reference(case: Case, dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    check(case, dtype, table_dtype=table_dtype)


@settings(max_examples=40)
@given(
    num_tokens=st.integers(1, 20),
    num_kv_heads=st.integers(1, 5),
    group=st.integers(1, 3),
    dim=st.integers(2, 80),
    value_dim=st.integers(1, 70),
    rotated=st.floats(0.1, 1.0),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtype=st.sampled_from(DTYPES),
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
    dtype: torch.dtype,
    seed: int,
) -> None:
    is_strided, has_norm, has_positions = flags
    case = Case(
        "random",
        num_tokens,
        num_kv_heads * group,
        num_kv_heads,
        dim,
        value_dim,
        max(int(dim * rotated) // 2 * 2, 2),
        num_tokens // 3,
        is_strided,
        has_norm,
        1.0,
        has_positions,
    )
    check(case, dtype, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [CASES[3], CASES[6]], ids=lambda case: case.name)
def test_without_a_cache_the_same_bits_are_rotated(case: Case, dtype: torch.dtype) -> None:
    stored, alone = make(case, dtype), make(case, dtype)
    run_native(stored)
    native.apply_rope(alone.query, alone.key, alone.positions, alone.cos, alone.sin, alone.norm, None)
    assert torch.equal(alone.query, stored.query)
    assert torch.equal(alone.key, stored.key)
    assert alone.key_cache.isnan().all()


@pytest.mark.parametrize("has_token_scales", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_caches_take_the_bits_that_the_reference_makes_of_the_rotated_keys(
    dtype: torch.dtype, *, has_token_scales: bool
) -> None:
    inputs = make(Case("FP8", 7, dim=40, value_dim=19, num_skipped=2, is_strided=True, has_norm=True), dtype)
    shapes = [cache.shape for cache in (inputs.key_cache, inputs.value_cache)]
    ours, theirs = ([torch.ones(shape).to(FP8) for shape in shapes] for _ in range(2))
    scales = [[torch.full(shape[:3], 7.0) if has_token_scales else 0.03 for shape in shapes] for _ in range(2)]
    assert inputs.positions is not None
    tables = inputs.cos[inputs.positions], inputs.sin[inputs.positions]
    of = native.problem(
        inputs.query,
        inputs.key,
        tables[0].shape[1],
        value=inputs.value,
        key_cache=ours[0],
        value_cache=ours[1],
        key_scale=scales[0][0],
        value_scale=scales[0][1],
        norm=inputs.norm,
    )
    rotation = native.rotation(*tables, inputs.kv_positions)
    run_one("rotate_store", of, Step(num_tokens=7, rotation=rotation.address))
    key_cache, value_cache = theirs
    stores.store_kv(inputs.key, inputs.value, key_cache, value_cache, inputs.kv_positions, *scales[1])
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    for mine, other in zip(*scales, strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_threads_or_the_batch(dtype: torch.dtype) -> None:
    case = Case("rows", 30, num_heads=12, num_kv_heads=4, dim=64, rotary_dim=64, is_strided=True, has_norm=True)

    def run() -> Inputs:
        inputs = make(case, dtype)
        run_native(inputs)
        return inputs

    one, *others = in_threads(run)
    for other in others:
        for mine, first in zip(other.changed(), one.changed(), strict=True):
            assert torch.equal(mine.nan_to_num(), first.nan_to_num())
    whole = make(case, dtype)
    assert whole.positions is not None
    alone = replace(
        whole,
        query=whole.query[11:12],
        key=whole.key[11:12],
        value=whole.value[11:12],
        positions=whole.positions[11:12],
        kv_positions=whole.kv_positions[11:12],
    )
    run_native(alone)
    assert torch.equal(alone.query[0], one.query[11])
    assert torch.equal(alone.key[0], one.key[11])


def test_a_number_that_is_not_finite_spoils_its_pair_alone() -> None:
    case = Case("pairs", 3, dim=20, rotary_dim=12)
    expected, actual = make(case, torch.float32), make(case, torch.float32)
    run_native(expected)
    actual.query[1, 2, 3], actual.key[2, 0, 19] = float("nan"), float("nan")
    run_native(actual)
    is_spoiled = actual.query.isnan()
    assert is_spoiled.nonzero().tolist() == [[1, 2, 3], [1, 2, 9]]
    assert torch.equal(actual.query[~is_spoiled], expected.query[~is_spoiled])
    assert actual.key.isnan().nonzero().tolist() == [[2, 0, 19]]


def test_layers_may_rotate_in_several_ways() -> None:
    """Step.rotation has two tables of two widths; each problem names its own."""
    first, second = make(CASES[7], torch.float32), make(CASES[7], torch.float32)
    half = first.cos.shape[1]
    rotations = native.Rotations(None, (first.cos[:, :3], first.sin[:, :3]), (first.cos, first.sin))
    for inputs, index, width in ((first, 0, 3), (second, 1, half)):
        of = native.problem(inputs.query, inputs.key, width, rotation_index=index)
        expected = make(CASES[7], torch.float32)
        reference.apply_rope(expected.query, expected.key, None, expected.cos[:, :width], expected.sin[:, :width], None)
        run_one("rotate_store", of, Step(num_tokens=len(inputs.query), rotation=rotations.address))
        assert_close(inputs.query, expected.query)
        assert_close(inputs.key, expected.key)


def test_what_the_op_does_not_serve_is_left_to_torch() -> None:
    inputs = make(CASES[5], torch.bfloat16)
    assert inputs.norm is not None
    tables = inputs.cos, inputs.sin
    assert native.can_serve(inputs.query, inputs.key, *tables, inputs.norm)
    wide = replace(inputs.norm, key_weight=inputs.norm.key_weight.float())
    assert not native.can_serve(inputs.query, inputs.key, *tables, wide)
    assert not native.can_serve(inputs.query.double(), inputs.key.double(), *tables, None)
    assert not native.can_serve(inputs.query, inputs.key, inputs.cos, inputs.sin.double(), None)

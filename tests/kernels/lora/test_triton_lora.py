"""Shrink and expand in Triton against their definitions, and the definitions against add_lora."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.cases import to_device
from kernels.lora import ModuleGroup, adapter_segments, launch, ops, reference, triton_expand, triton_shrink
from kernels.lora.cases import CASES, Case, GroupInputs, make_group
from kernels.lora.launch import ExpandLaunch, ShrinkLaunch
from kernels.lora.segments import AdapterSegments, blocks_of_one, segments_in_torch
from kernels.triton_launch import forget_prepared
from tests.kernels.tolerances import assert_close

GROUP = (32, 48, 16)  # unequal, as with grouped queries
MIXED = Case("mixed", (1, 0, -1, 2, 2, 1, -1, 0, 3), (8, 17, 3, 40))
SMALL = Case("small", (1, 0, -1, 1), (17, 3))
# Slot 0 has a token more than a block of 16.
CROWDED = Case("crowded", (1, -1, 0, 1) + (0,) * 16, (17, 3))
NAN = float("nan")
# The interpreter needs a millisecond for each step of a program: ranks of every kind instead of all 64.
RANKS = (1, 2, 7, 8, 9, 16, 17, 33, 64)
TRITON_CASES = [case for case in CASES if case.name not in ("all ranks", "large rank")]
TRITON_CASES += [Case("ranks", tuple(range(len(RANKS))), RANKS), Case("large ranks", (0, 1, 2, 1), (3, 257, 512))]


def segments_of(inputs: GroupInputs, block_tokens: int = 16) -> AdapterSegments:
    return segments_in_torch(inputs.token_slots, inputs.group.num_slots, block_tokens)


def empty_h(inputs: GroupInputs, planes: int = 1) -> torch.Tensor:
    shape = (planes, inputs.group.num_modules, len(inputs.token_slots), inputs.max_rank)
    return torch.full(shape, NAN, device=inputs.x.device)


def shrunk(inputs: GroupInputs, segments: AdapterSegments, planes: int = 1, **options: Any) -> torch.Tensor:
    h = empty_h(inputs, planes)
    triton_shrink.shrink(inputs.x, h, inputs.group, segments, **options)
    return h


def defined(inputs: GroupInputs, *, add_inputs: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """h and y of the definitions, one token at a time."""
    h, y, segments = (
        empty_h(inputs),
        to_device(inputs.y, inputs.y.device),
        blocks_of_one(inputs.token_slots, inputs.group.num_slots),
    )
    reference.shrink(inputs.x, h[0], inputs.group, segments)
    reference.expand(h[0], y, inputs.group, segments, add_inputs=add_inputs)
    return h, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", TRITON_CASES, ids=lambda case: case.name)
def test_one_module_equals_the_definition(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """h begins as NaN and stays so where no adapter has a rank: all of the rest is written."""
    inputs = to_device(make_group(case, (case.out_features,), dtype), device)
    expected_h, expected = defined(inputs)
    segments = segments_of(inputs)
    h = shrunk(inputs, segments)
    torch.testing.assert_close(h, expected_h, rtol=2e-5, atol=2e-5, equal_nan=True)
    y = to_device(inputs.y, device)
    triton_expand.expand(h, y, inputs.group, segments, add_inputs=True)
    assert_close(y, expected, magnitude=4.0)
    for token, slot in enumerate(case.token_slots):
        if slot < 0:
            assert torch.equal(y[token], inputs.y[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", [MIXED, *(case for case in CASES if case.is_strided)], ids=lambda case: case.name)
def test_unequal_modules_in_one_launch(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    inputs = to_device(make_group(case, GROUP, dtype), device)
    _, expected = defined(inputs)
    segments = segments_of(inputs)
    y = to_device(inputs.y, device)
    triton_expand.expand(shrunk(inputs, segments), y, inputs.group, segments, add_inputs=True)
    assert_close(y, expected, magnitude=4.0)


@pytest.mark.parametrize(
    ("ranks", "in_columns", "out_columns", "tile_width", "block_tokens"),
    [
        (16, 16, 16, 16, 16),
        (16, 128, 128, 128, 1),
        (32, 64, 32, 48, 32),
        (32, 64, 64, 192, 16),
        (64, 32, 16, 5, 1),
        (64, 64, 128, 64, 32),
        (128, 128, 512, 100, 16),
        (128, 64, 256, 64, 16),
    ],
    ids=str,
)
def test_exact_sums_have_the_same_bits_in_every_tiling(
    ranks: int, in_columns: int, out_columns: int, tile_width: int, block_tokens: int, device: torch.device
) -> None:
    """Of small integers every sum is exact, so that nothing but the right one will do. Some widths end in a tile."""
    case = SMALL if block_tokens == 1 else CROWDED  # every block takes the interpreter a while
    sized = replace(case, in_features=150, tile_width=tile_width)
    inputs = to_device(make_group(sized, (2 * tile_width, tile_width), torch.bfloat16, is_exact=True), device)
    expected_h, expected = defined(inputs)
    is_changed = (expected != inputs.y).view(len(expected), 3, tile_width).any(2)
    for token, slot in enumerate(case.token_slots):  # otherwise a product that is left out would not be seen
        assert is_changed[token].tolist() == [slot == 1, slot == 1, slot == 0]
    segments = segments_of(inputs, block_tokens)
    for planes, parts in ((1, 2), (2, 2)):
        h = shrunk(inputs, segments, planes, parts=parts, launch=ShrinkLaunch(ranks, in_columns))
        assert torch.equal(h.sum(0).nan_to_num(nan=99.0), expected_h[0].nan_to_num(nan=99.0))
        y = to_device(inputs.y, device)
        triton_expand.expand(h, y, inputs.group, segments, add_inputs=True, launch=ExpandLaunch(out_columns))
        assert torch.equal(y, expected)


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_blocks_of_any_number_of_tokens_have_the_same_bits(
    block_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, up to half of a block's rows, and more are computed otherwise, by programs of one step or of several."""
    slots = (0,) + (1,) * 8 + (2,) * 9 + (-1,) * 2 + (3,) * 17
    case = Case("blocks", slots, (5, 16, 8, 3), 40, tile_width=32)
    inputs = to_device(make_group(case, (96, 64), torch.bfloat16), device)
    h = torch.randn(1, 2, len(slots), 16, generator=torch.Generator().manual_seed(0)).to(device)

    def run(rows: int, fewest_programs: int, columns: int) -> torch.Tensor:
        monkeypatch.setattr(launch, "FEWEST_PROGRAMS", fewest_programs)
        forget_prepared()
        y = inputs.y.clone()
        choice = ExpandLaunch(columns)
        triton_expand.expand(h, y, inputs.group, segments_of(inputs, rows), add_inputs=True, launch=choice)
        return y

    expected = run(1, 768, 32)
    assert not torch.equal(expected, inputs.y)
    for fewest_programs, columns in ((768, 32), (1, 32), (1, 16), (6, 64)):
        assert torch.equal(run(block_tokens, fewest_programs, columns), expected)


@pytest.mark.parametrize(
    ("blocks", "steps", "of_program"), [(0, 32, 1), (1, 112, 1), (23, 32, 1), (48, 32, 2), (64, 112, 8), (1000, 112, 8)]
)
def test_programs_take_several_steps_where_there_are_many(blocks: int, steps: int, of_program: int) -> None:
    assert launch.steps_of_program(blocks, steps) == of_program


def test_a_token_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    """Alone, beside others of its slot or of others, in another order, in parts or whole, tiled otherwise."""
    inputs = to_device(make_group(replace(MIXED, in_features=150), (32,), torch.bfloat16), device)

    def run(tokens: torch.Tensor, block_tokens: int, planes: int, in_columns: int = 128) -> torch.Tensor:
        part = replace(inputs, x=inputs.x[tokens], y=inputs.y[tokens], token_slots=inputs.token_slots[tokens])
        segments = segments_of(part, block_tokens)
        h = shrunk(part, segments, planes, parts=2, launch=ShrinkLaunch(64, in_columns))
        triton_expand.expand(h, part.y, part.group, segments, add_inputs=True)
        return part.y

    everyone = torch.arange(len(MIXED.token_slots), device=device)
    together = run(everyone, 16, 1)
    assert torch.equal(run(everyone, 16, 2), together)
    assert torch.equal(run(everyone, 1, 2, 64), together)
    assert torch.equal(run(everyone.flip(0), 16, 1).flip(0), together)
    for token in (0, 8):
        assert torch.equal(run(everyone[token : token + 1], 16, 2), together[token : token + 1])


def test_any_strides(device: torch.device) -> None:
    """Inputs whose columns lie apart, outputs between columns of another tensor, ranks in rows of a wider h."""
    inputs = to_device(make_group(SMALL, GROUP, torch.bfloat16, is_exact=True), device)
    _, expected = defined(inputs)
    x = inputs.x.T.contiguous().T
    wide = torch.full((len(inputs.y), 3 * inputs.y.shape[1]), 7.0, dtype=torch.bfloat16, device=device)
    y = wide[:, 1::3]
    y.copy_(inputs.y)
    h = torch.full((3, *empty_h(inputs).shape[1:3], inputs.max_rank + 5), NAN, device=device)[
        1:2, ..., : inputs.max_rank
    ]
    segments = segments_of(inputs)
    triton_shrink.shrink(x, h, inputs.group, segments)
    triton_expand.expand(h, y, inputs.group, segments, add_inputs=True)
    assert torch.equal(y, expected)
    assert (wide[:, 0::3] == 7.0).all()
    assert (wide[:, 2::3] == 7.0).all()


def test_offsets_past_two_to_the_31_elements(device: torch.device) -> None:
    """Of rows and columns of x, rows of y, planes of h, and pages. The memory between is never touched."""
    inputs = to_device(make_group(replace(SMALL, in_features=32), (16,), torch.bfloat16, is_exact=True), device)
    _, expected = defined(inputs)
    far = 2**31 + 32

    def apart(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, strides, strict=True))
        return torch.empty(size, dtype=value.dtype, device=device).as_strided(value.shape, strides).copy_(value)

    def run(x: torch.Tensor, y: torch.Tensor, group: ModuleGroup = inputs.group) -> torch.Tensor:
        segments = segments_in_torch(inputs.token_slots[: len(x)], group.num_slots, 16)
        h = torch.full((1, 1, len(x), inputs.max_rank), NAN, device=device)
        triton_shrink.shrink(x, h, group, segments)
        triton_expand.expand(h, y, group, segments, add_inputs=True)
        return y

    for stride in (far, far // 2):  # past it by the stride alone, and by the row's number
        assert torch.equal(run(apart(inputs.x, (stride, 1)), inputs.y.clone()), expected)
        assert torch.equal(run(inputs.x, apart(inputs.y, (stride, 1))), expected)
    assert torch.equal(run(apart(inputs.x, (1, far // 16)), inputs.y.clone()), expected)
    group, page = inputs.group, inputs.group.pages[0].numel()
    pages = torch.empty(far // page + len(group.pages), *group.pages.shape[1:], dtype=torch.bfloat16, device=device)
    pages[far // page :] = group.pages
    moved = replace(group, pages=pages, page_ids=group.page_ids + far // page)
    assert torch.equal(run(inputs.x, inputs.y.clone(), moved), expected)


def test_without_inputs_the_output_is_overwritten(device: torch.device) -> None:
    inputs = to_device(make_group(MIXED, GROUP, torch.float32), device)
    inputs.y.fill_(NAN)
    _, expected = defined(inputs, add_inputs=False)
    segments = segments_of(inputs)
    triton_expand.expand(shrunk(inputs, segments), inputs.y, inputs.group, segments, add_inputs=False)
    assert_close(inputs.y, expected, magnitude=4.0)
    assert not inputs.y[2].any()


def test_a_rank_above_the_width_is_nan(device: torch.device) -> None:
    """Rather than cut off; the other slots are whole, and nothing is written past the width."""
    inputs = to_device(make_group(Case("rank", (0, 1), (8, 20)), (32,), torch.float32), device)
    wide = torch.full((1, 1, 2, 32), 7.0, device=device)
    segments = segments_of(inputs)
    triton_shrink.shrink(inputs.x, wide[..., :12], inputs.group, segments)
    assert wide[0, 0, 1, :12].isnan().all()
    assert (wide[..., 12:] == 7.0).all()
    triton_expand.expand(wide[..., :12], inputs.y, inputs.group, segments, add_inputs=True)
    assert inputs.y[1].isnan().all()
    assert inputs.y[0].isfinite().all()


@pytest.mark.parametrize("width", [0, 12])
def test_an_expand_does_not_cut_ranks_off(width: int, device: torch.device) -> None:
    """h holds numbers here, and the slot has more ranks than h. Tokens whose ranks fit are added, or have none."""
    inputs = to_device(make_group(Case("rank", (0, 1, 2), (0, 20, 12)), (32,), torch.float32), device)
    y = to_device(inputs.y, device)
    h = torch.ones(1, 1, 3, width, device=device)
    triton_expand.expand(h, y, inputs.group, segments_of(inputs), add_inputs=True)
    assert torch.equal(y[0], inputs.y[0])
    assert y[1].isnan().all()
    assert bool(y[2].isfinite().all()) == (width == 12)


@pytest.mark.parametrize("runs_triton", [False, True], ids=["torch", "triton"])
def test_slots_outside_the_table_have_no_adapter(
    runs_triton: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are ranks and pages read for them, which the table of two slots does not have."""
    monkeypatch.setattr(ops, "runs_triton", lambda tensor: runs_triton)
    inputs = to_device(make_group(Case("foreign", (0,) * 5, (8, 4)), (32,), torch.float32), device)
    module = inputs.group.module(0)
    slots = torch.tensor([2, 1, 2**31 - 1, -7, 10**6], dtype=torch.int32, device=device)
    h, y = torch.full((5, 8), NAN, device=device), to_device(inputs.y, device)
    ops.bgmv_shrink(inputs.x, module, h, slots)
    assert h[1, :4].isfinite().all()
    ops.bgmv_expand(h, module, y, slots)
    assert not torch.equal(y[1], inputs.y[1])
    others = [0, 2, 3, 4]
    assert h[others].isnan().all()
    assert torch.equal(y[others], inputs.y[others])


@settings(max_examples=10)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.data(),
    st.integers(1, 150),
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.integers(1, 40),
)
def test_random_groups(ranks: list[int], data: st.DataObject, num_in: int, num_out: list[int], page: int) -> None:
    """Exact; of any widths and pages, strided or not, in blocks and parts of any number."""
    slots = data.draw(st.lists(st.integers(-1, len(ranks) - 1), max_size=20))
    is_strided = data.draw(st.booleans())
    case = Case("random", tuple(slots), tuple(ranks), num_in, tile_width=page, is_strided=is_strided)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    inputs = to_device(make_group(case, tuple(num_out), dtype, is_exact=True), device)
    _, expected = defined(inputs)
    segments = segments_of(inputs, data.draw(st.sampled_from([1, 5, 16])))
    parts = data.draw(st.integers(1, 2))
    launch = ShrinkLaunch(data.draw(st.sampled_from([16, 64])), 64)
    h = shrunk(inputs, segments, data.draw(st.sampled_from([1, parts])), parts=parts, launch=launch)
    y = to_device(inputs.y, device)
    triton_expand.expand(h, y, inputs.group, segments, add_inputs=True)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("runs_triton", [False, True], ids=["torch", "triton"])
def test_the_six_operators(runs_triton: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sums, so that both families and both forms agree in every bit with a plain product."""
    monkeypatch.setattr(ops, "runs_triton", lambda tensor: runs_triton)
    case = replace(SMALL, in_features=64, tile_width=32)
    inputs = to_device(make_group(case, (32,), torch.float32, is_exact=True), device)
    module, slots = inputs.group.module(0), inputs.token_slots
    segments = adapter_segments(slots, inputs.group.num_slots)
    expected_h = torch.full((len(slots), inputs.max_rank + 2), NAN, device=device)
    delta = torch.zeros_like(inputs.y)
    for token, slot in enumerate(case.token_slots):
        if slot >= 0:
            a, b = reference.gather(module, slot)
            expected_h[token, : len(a)] = 2.0 * (a @ inputs.x[token])
            delta[token] = module.scaling[slot] * (expected_h[token, : len(a)] @ b)
    h = torch.full_like(expected_h, NAN)
    shrinks: list[tuple[Callable[..., None], object]] = [(ops.bgmv_shrink, slots), (ops.sgmv_shrink, segments)]
    for shrink, where in shrinks:
        h.fill_(NAN)
        shrink(inputs.x, module, h, where, scaling=2.0)
        assert torch.equal(h.nan_to_num(nan=99.0), expected_h.nan_to_num(nan=99.0))
    expands: list[tuple[Callable[..., None], object]] = [(ops.bgmv_expand, slots), (ops.sgmv_expand, segments)]
    for expand, where in expands:
        y = torch.cat([inputs.y, inputs.y], dim=1)
        expand(h, module, y, where, add_inputs=True)
        assert torch.equal(y, torch.cat([inputs.y + delta, inputs.y], dim=1))
        expand(h, module, y, where, add_inputs=False)
        assert torch.equal(y, torch.cat([delta, inputs.y], dim=1))
    expands = [(ops.bgmv_expand_slice, slots), (ops.sgmv_expand_slice, segments)]
    for expand, where in expands:
        y = torch.cat([inputs.y, inputs.y], dim=1)
        expand(h, module, y, where, slice_offset=20, slice_size=32, add_inputs=True)
        expected = torch.cat([inputs.y, inputs.y], dim=1)
        expected[:, 20:52] += delta
        assert torch.equal(y, expected)


@pytest.mark.parametrize("runs_triton", [False, True], ids=["torch", "triton"])
def test_add_lora_group_equals_add_lora(
    runs_triton: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts as well: the input is wide enough for three."""
    monkeypatch.setattr(ops, "runs_triton", lambda tensor: runs_triton)
    case = replace(SMALL, in_features=1536, tile_width=128)
    inputs = to_device(make_group(case, (256, 128), torch.float32), device)
    expected = to_device(inputs.y, device)
    for index, columns in enumerate((slice(0, 256), slice(256, 384))):
        reference.add_lora(expected[:, columns], inputs.x, inputs.group.module(index), inputs.token_slots)
    segments = adapter_segments(inputs.token_slots, inputs.group.num_slots)
    h = ops.lora_shrink(inputs.x, inputs.group, segments, max_rank=inputs.max_rank)
    assert h.shape[0] == (3 if runs_triton else 1)
    y = to_device(inputs.y, device)
    ops.add_lora_group(y, inputs.x, inputs.group, segments, max_rank=inputs.max_rank)
    assert_close(y, expected, magnitude=4.0)


def test_wrong_arguments_are_refused() -> None:
    inputs = make_group(MIXED, (32,), torch.float32)
    module, slots, h = inputs.group.module(0), inputs.token_slots, torch.zeros(9, 40)
    with pytest.raises(ValueError, match=r"x is torch\.float32 \[9, 47\], want torch\.float32 \[9, 48\]"):
        ops.bgmv_shrink(inputs.x[:, 1:], module, h, slots)
    with pytest.raises(ValueError, match=r"h is torch\.bfloat16"):
        ops.bgmv_shrink(inputs.x, module, h.bfloat16(), slots)
    with pytest.raises(ValueError, match="slot 3 has rank 40, h has room for 39"):
        ops.bgmv_shrink(inputs.x, module, h[:, :39], slots)
    with pytest.raises(ValueError, match=r"token_slots is torch\.int64"):
        ops.bgmv_shrink(inputs.x, module, h, slots.long())
    with pytest.raises(ValueError, match="columns 8 to 40 are not all in y, which has 32"):
        ops.bgmv_expand_slice(h, module, inputs.y, slots, slice_offset=8, slice_size=32)
    with pytest.raises(ValueError, match=r"y is torch\.float32 \[9, 31\]"):
        ops.bgmv_expand_slice(h, module, inputs.y, slots, slice_offset=0, slice_size=31)
    with pytest.raises(ValueError, match="slot 3 has rank 40, h has room for 39"):
        ops.bgmv_expand(h[:, :39], module, inputs.y, slots)
    with pytest.raises(ValueError, match="the segments are of 8 slots, the modules have 4"):
        ops.sgmv_shrink(inputs.x, module, h, adapter_segments(slots, 8))
    with pytest.raises(ValueError, match="order is on meta, x on cpu"):
        ops.bgmv_shrink(inputs.x, module, h, slots.to("meta"))
    with pytest.raises(ValueError, match="h is on meta, y on cpu"):
        ops.bgmv_expand(h.to("meta"), module, inputs.y, slots)
    with pytest.raises(ValueError, match="max_rank is -1"):
        ops.lora_shrink(inputs.x, inputs.group, adapter_segments(slots, 4), max_rank=-1)
    other = make_group(MIXED, (32,), torch.float32).group.module(0)
    with pytest.raises(ValueError, match="different arenas"):
        ModuleGroup.of([module, other])
    with pytest.raises(ValueError, match=r"read \[48, 16\] features"):
        ModuleGroup.of([module, replace(module, in_features=16)])

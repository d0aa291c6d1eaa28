"""The GPU's product of a few rows against its definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from data_plane.layers.packed_weight import unpacked_linear
from kernels.cases import to_device
from kernels.linear import MAX_ROWS, counters, rows_linear, serves_rows, triton_rows
from kernels.linear.cases import FEW_ROWS_CASES, Case, make
from kernels.linear.rows_launch import MAX_PARTS, MIN_PART, OWN_BYTES, SHARED_BYTES, RowsLaunch, Sizes, grid_of
from tests.kernels.tolerances import assert_close

DTYPES = [torch.bfloat16, torch.float16]
# Programs on the interpreter's two multiprocessors.
LAUNCHES = [
    RowsLaunch(block_out=64, block_in=16, programs=4, most_rows=MAX_ROWS),
    RowsLaunch(block_out=32, block_in=64, programs=4, most_rows=MAX_ROWS),
]


@pytest.fixture(autouse=True)
def _triton_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every launch leaves its counters at zero."""
    monkeypatch.setattr("kernels.linear.runs_triton", lambda tensor: True)
    monkeypatch.setattr("kernels.linear.launch_of", lambda *sizes: replace(LAUNCHES[0], most_rows=16))
    yield
    assert not any(tensor.any() for tensor in counters.by_stream.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FEW_ROWS_CASES, ids=lambda case: case.name)
def test_equals_the_definition_in_float64(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = make(case, dtype)
    actual = rows_linear(x.to(device), weight.to(device), None if bias is None else bias.to(device))
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert actual.dtype == dtype and actual.is_contiguous()
    assert_close(actual.cpu(), expected.to(dtype))


@pytest.mark.parametrize("launch", LAUNCHES, ids=["outputs first", "rows first"])
@pytest.mark.parametrize(
    ("num_out", "num_in", "programs"), [(64, 640, 1), (64, 1168, 2), (64, 2320, 4), (200, 640, 4), (700, 1168, 3)]
)
def test_parts_of_a_tile_are_joined(
    launch: RowsLaunch, programs: int, num_out: int, num_in: int, device: torch.device
) -> None:
    """Small integers, of which every sum is exact: tiles of one part, of two, of eight."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-3, 4, (rows, num_in), generator=generator).float() for rows in (5, num_out))
    launch = replace(launch, programs=programs)
    there = [tensor.to(device, torch.bfloat16) for tensor in (x, weight)]
    actual = triton_rows.rows_linear(there[0], there[1], None, launch)
    assert torch.equal(actual.cpu(), (x @ weight.T).bfloat16())
    assert torch.equal(actual, triton_rows.rows_linear(there[0], there[1], None, launch))


@pytest.mark.parametrize("launch", LAUNCHES, ids=["outputs first", "rows first"])
def test_a_rows_bits_depend_on_no_other_row(launch: RowsLaunch, device: torch.device) -> None:
    x, weight, bias = (to_device(tensor, device) for tensor in make(Case("", 64, 1040, 150, has_bias=True), DTYPES[0]))
    alone = [triton_rows.rows_linear(row[None], weight, bias, launch) for row in x]
    for count in (2, 3, 16, 17, 33, 64):
        together = triton_rows.rows_linear(x[-count:], weight, bias, launch)
        assert torch.equal(together, torch.cat(alone[-count:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bias_is_added_before_the_one_rounding(dtype: torch.dtype, device: torch.device) -> None:
    """A sum that was rounded first would lose its 1, which the bias leaves alone."""
    step = 2.0 ** {torch.bfloat16: 8, torch.float16: 11}[dtype]  # the first number whose successor cannot be held
    x = torch.ones(2, 2, dtype=dtype, device=device)
    weight = torch.tensor([[step, 1.0]], dtype=dtype, device=device)
    bias = torch.tensor([-step], dtype=dtype, device=device)
    assert rows_linear(x, weight, bias).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("num_in", [48, 1040])
def test_only_the_rows_are_read_and_all_outputs_written(
    num_in: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and weight are parts of larger ones that are full of NaN, and so is the memory of output and parts."""
    new_empty = torch.Tensor.new_empty

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = new_empty(*args, **kwargs)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    memory = torch.full((2, 9, num_in + 32), float("nan"), dtype=torch.bfloat16, device=device)
    x, weight = memory[0, 3:6, 16 : 16 + num_in].fill_(1.0), memory[1, 2:7, 16 : 16 + num_in].fill_(2.0)
    assert rows_linear(x, weight, None).tolist() == [[2.0 * num_in] * 5] * 3
    assert torch.isnan(memory[0, :3]).all() and torch.isnan(memory[1, 7:]).all()


def test_rows_past_2_to_the_31_values_are_found(device: torch.device) -> None:
    """Their offsets need 64 bits, the strides do not. Of each 4 GiB only the pages of three rows are ever touched."""
    memory = (torch.empty((1 << 31) + 16, dtype=torch.float16, device=device) for _ in range(2))
    x, weight = (tensor.as_strided((3, 16), (1 << 30, 1)) for tensor in memory)
    x.copy_(torch.tensor([[1.0], [3.0], [5.0]]).expand(3, 16))
    weight.copy_(torch.tensor([[2.0], [4.0], [6.0]]).expand(3, 16))
    assert rows_linear(x, weight, None).tolist() == [[32.0, 64.0, 96.0], [96.0, 192.0, 288.0], [160.0, 320.0, 480.0]]


def test_the_inputs_are_cut_so_that_all_multiprocessors_work() -> None:
    """For the linears of an 8B Llama on 132 multiprocessors: parts by the weight's sizes, and stages that fit."""
    sizes = {
        (4096, 6144): (192, 1),
        (4096, 4096): (128, 1),
        (4096, 28672): (448, 1),
        (14336, 4096): (64, 2),
        (4096, 128_256): (2004, 1),
    }
    for (num_in, num_out), (num_tiles, num_parts) in sizes.items():
        launch = RowsLaunch.default(Sizes("bfloat16", num_in, num_out))
        grids = [grid_of(launch, 132, torch.bfloat16, num_in, num_out, rows) for rows in (2, 16, 17, 64)]
        assert {(grid.num_tiles, grid.num_parts) for grid in grids} == {(num_tiles, num_parts)}
        assert [grid.block_rows for grid in grids] == ([16, 16, 32, 64] if launch.block_out >= 64 else [64] * 4)
        for grid in grids:
            step_bytes = 2 * (launch.block_out + grid.block_rows) * launch.block_in
            assert launch.programs * (grid.num_stages * step_bytes + OWN_BYTES) <= SHARED_BYTES
            assert grid.num_stages >= 3


def test_small_weights_take_few_parts() -> None:
    """Parts of a few inputs would cost more than they bring."""
    for num_in, num_parts in ((64, 1), (1024, 1024 // MIN_PART), (1 << 16, MAX_PARTS)):
        assert grid_of(LAUNCHES[0], 132, torch.bfloat16, num_in, 1024, 2).num_parts == num_parts


def test_streams_have_counters_of_their_own(device: torch.device) -> None:
    x = torch.empty(1, device=device)
    streams = range(1 << 40, (1 << 40) + 3 * counters.STREAMS)
    found = [counters.zero_counters(x, stream) for stream in streams]
    assert len({tensor.data_ptr() for tensor in found}) == len(found)
    assert all(len(tensor) == counters.MAX_COUNTERS and not tensor.any() for tensor in found)
    assert all(counters.zero_counters(x, stream) is tensor for stream, tensor in zip(streams, found, strict=True))


@pytest.mark.parametrize("shape", [(6, 64), (1, 6, 64), (2, 3, 64)], ids=str)
def test_a_linear_of_few_rows_runs_the_kernel(
    shape: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[torch.Tensor] = []
    multiply = triton_rows.rows_linear

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(x)
        return multiply(x, weight, bias)

    monkeypatch.setattr(triton_rows, "rows_linear", noted)
    x, weight, bias = (to_device(tensor, device) for tensor in make(Case("", 6, 64, 40, has_bias=True), DTYPES[0]))
    actual = unpacked_linear(x.view(shape), weight, bias)
    assert actual.shape == (*shape[:-1], 40)
    assert_close(actual.view(6, -1), torch.nn.functional.linear(x, weight, bias))
    assert [row.shape for row in rows] == [(6, 64)]


def test_other_linears_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = make(Case("", MAX_ROWS + 1, 64, 64), DTYPES[0])
    assert serves_rows(x[:2], weight) and serves_rows(x[:16], weight) and serves_rows(x[None, :2, :48], weight[:, :48])
    assert not serves_rows(x, weight) and not serves_rows(x[:17], weight)
    assert not serves_rows(x[:1], weight)
    assert not serves_rows(x[:0], weight)
    assert not serves_rows(x[0], weight)
    assert not serves_rows(x[:2].float(), weight.float())
    assert not serves_rows(x[:2].half(), weight)
    assert not serves_rows(x[:2], weight.T)
    assert not serves_rows(x[:2, ::2], weight[:, :32])
    assert not serves_rows(x[:2, :40], weight[:, :40])
    assert not serves_rows(torch.empty_strided((2, 64), (72, 1), dtype=DTYPES[0]), weight)
    assert torch.equal(unpacked_linear(x, weight, None), torch.nn.functional.linear(x, weight))
    monkeypatch.setattr("kernels.linear.is_hopper", lambda tensor: False)
    assert not serves_rows(x[:2], weight)


def test_wrong_arguments_are_refused() -> None:
    x, weight, _ = make(Case("", 2, 8, 8), torch.float32)
    for wrong in (x[0], x.new_empty(MAX_ROWS + 1, 8), x[:, :4], x[:0]):
        with pytest.raises(ValueError, match=rf"want \[1 to {MAX_ROWS}, in\] and \[out, in\]"):
            rows_linear(wrong, weight, None)
    with pytest.raises(ValueError, match=r"weight is torch\.float32, want torch\.float16"):
        rows_linear(x.half(), weight, None)
    with pytest.raises(ValueError, match="must follow one another"):
        rows_linear(x, weight.T, None)
    with pytest.raises(ValueError, match=r"bias is torch\.float32 \(7,\)"):
        rows_linear(x, weight, torch.zeros(7))
    with pytest.raises(ValueError, match="weight is on meta, x on cpu"):
        rows_linear(x, weight.to("meta"), None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_out": 48}, "block_out is 48, want a power of two from 16 to 256"),
        ({"block_in": 8}, "block_in is 8, want a power of two from 16 to 512"),
        ({"programs": 5}, "programs is 5, want 1 to 4 on each multiprocessor"),
        ({"most_rows": MAX_ROWS + 1}, f"most_rows is {MAX_ROWS + 1}, want 1 to {MAX_ROWS}"),
    ],
)
def test_wrong_launches_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAUNCHES[0], **wrong)

"""add_lora against its definition, and the definition against PEFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear

from kernels.lora import Route, StackedSite, add_lora, add_lora_sites, cpu, reference, stack_columns
from kernels.lora.cases import CASES, Case, Inputs, make
from kernels.lora.cpu import Machine
from tests.kernels.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
Form = Callable[[torch.Tensor, torch.Tensor, StackedSite, Route], None]


def dense(y: torch.Tensor, x: torch.Tensor, site: StackedSite, route: Route) -> None:
    cpu.add_dense(y, x, site, route)


def grouped(y: torch.Tensor, x: torch.Tensor, site: StackedSite, route: Route) -> None:
    cpu.add_grouped(y, x, [(slice(0, y.shape[1]), site)], route)


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def copy_of(inputs: Inputs) -> torch.Tensor:
    """A copy of y with y's strides, so that a strided case stays one."""
    copy = torch.empty_strided(inputs.y.shape, inputs.y.stride(), dtype=inputs.y.dtype)
    return copy.copy_(inputs.y)


def route_of(inputs: Inputs) -> Route:
    return Route.build(inputs.token_slots, CPU)


def define(inputs: Inputs) -> torch.Tensor:
    y = copy_of(inputs)
    reference.add_lora(y, inputs.x, inputs.paged, inputs.token_slots)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [dense, grouped, add_lora], ids=["dense", "grouped", "chosen"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case, form: Form, dtype: torch.dtype) -> None:
    inputs = make(case, dtype)
    y = copy_of(inputs)
    form(y, inputs.x, inputs.stacked, route_of(inputs))
    assert_close(y, define(inputs), magnitude=4.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_equals_lora_layers_of_peft(case: Case) -> None:
    inputs = make(case, torch.float32)
    actual = define(inputs)
    for row, slot in enumerate(case.token_slots):
        rank = case.ranks[slot] if slot >= 0 else 0
        if rank == 0:
            assert torch.equal(actual[row], inputs.y[row])
            continue
        a, b, scaling = inputs.matrices[slot]
        base = torch.nn.Linear(case.in_features, case.out_features, bias=False)
        config = LoraConfig(r=rank, lora_alpha=rank)
        alpha: Any = scaling * rank
        layer: Any = PeftLinear(base, "one", config, r=rank, lora_alpha=alpha)
        layer.lora_A["one"].weight.data.copy_(a)
        layer.lora_B["one"].weight.data.copy_(b.T)
        assert layer.scaling["one"] == pytest.approx(scaling)
        with torch.no_grad():
            delta = layer(inputs.x[row : row + 1]) - base(inputs.x[row : row + 1])
        assert_close(actual[row], inputs.y[row] + delta[0], magnitude=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [dense, grouped], ids=["dense", "grouped"])
def test_rows_without_adapter_keep_their_bits(form: Form, dtype: torch.dtype) -> None:
    """A negative zero stays one: adding zero to it would not."""
    inputs = make(by_name("mixed"), dtype)
    inputs.y[2] = -0.0
    y = copy_of(inputs)
    form(y, inputs.x, inputs.stacked, route_of(inputs))
    for row in (2, 6):
        assert torch.equal(y[row].view(torch.uint8), inputs.y[row].view(torch.uint8))


@pytest.mark.parametrize("form", [dense, grouped], ids=["dense", "grouped"])
def test_rows_do_not_depend_on_the_other_adapters(form: Form) -> None:
    """Beyond the order of summing."""
    inputs = make(by_name("mixed"), torch.float32)
    together = copy_of(inputs)
    form(together, inputs.x, inputs.stacked, route_of(inputs))
    for row in range(len(inputs.y)):
        alone = copy_of(inputs)
        only = inputs.token_slots.clone()
        only[torch.arange(len(only)) != row] = -1
        form(alone, inputs.x, inputs.stacked, Route.build(only, CPU))
        torch.testing.assert_close(together[row], alone[row], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", [dense, grouped], ids=["dense", "grouped"])
def test_an_adapter_that_overflows_spoils_its_own_rows_only(form: Form) -> None:
    inputs = make(by_name("mixed"), torch.float32)
    rows = inputs.stacked.columns.rows_by_slot[1]
    inputs.stacked.a[rows] = 1e38
    inputs.x.abs_().mul_(100)
    y = copy_of(inputs)
    form(y, inputs.x, inputs.stacked, route_of(inputs))
    for row, slot in enumerate(inputs.token_slots.tolist()):
        assert bool(y[row].isfinite().all()) == (slot != 1)


def test_rows_of_nobody_are_never_used() -> None:
    """A stack may hold rows whose adapter left its slot, as -2."""
    inputs = make(by_name("mixed"), torch.float32)
    stale = inputs.stacked.columns.rows_by_slot[3]
    inputs.stacked.columns.slot[stale] = -2
    del inputs.stacked.columns.rows_by_slot[3]
    for form in (dense, grouped):
        y = copy_of(inputs)
        form(y, inputs.x, inputs.stacked, route_of(inputs))
        assert torch.equal(y[8], inputs.y[8])
        assert_close(y[:8], define(inputs)[:8], magnitude=4.0)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).flatmap(
        lambda ranks: st.tuples(
            st.just(tuple(ranks)), st.lists(st.integers(-1, len(ranks) - 1), max_size=40).map(tuple)
        )
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 8),
)
def test_random_cases(sizes: tuple[tuple[int, ...], tuple[int, ...]], num_in: int, num_out: int, width: int) -> None:
    ranks, slots = sizes
    inputs = make(Case("random", slots, ranks, num_in * width, num_out * width, width), torch.float32)
    expected = define(inputs)
    for form in (dense, grouped):
        y = copy_of(inputs)
        form(y, inputs.x, inputs.stacked, route_of(inputs))
        assert_close(y, expected, magnitude=8.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fused_sites_equal_each_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense, grouped and one of each; the site between them is not targeted, and its columns keep their bits."""
    first, last = make(case, torch.float32), make(case, torch.float32, seed=1)
    route, width = route_of(first), case.out_features
    y = torch.randn(len(case.token_slots), 2 * width + 3, generator=torch.Generator().manual_seed(2))
    for choices in ((True, True), (False, False), (True, False)):
        chosen = {id(site): choice for site, choice in zip((first.stacked, last.stacked), choices, strict=True)}
        monkeypatch.setattr(cpu, "use_dense", lambda site, route, chosen=chosen: chosen[id(site)])
        expected = y.clone()
        add_lora(expected[:, :width], first.x, first.stacked, route)
        add_lora(expected[:, width + 3 :], first.x, last.stacked, route)
        actual = y.clone()
        add_lora_sites(actual, first.x, [(width, first.stacked), (3, None), (width, last.stacked)], route)
        assert_close(actual, expected, magnitude=4.0)
        assert torch.equal(actual[:, width : width + 3], y[:, width : width + 3])


def test_route_groups_tokens_by_slot() -> None:
    route = Route.build(torch.tensor([2, 2, -1, 0, 2], dtype=torch.int32), CPU)
    assert [(segment.slot, segment.num_tokens) for segment in route.segments] == [(0, 1), (2, 3)]
    assert route.segments[0].rows == slice(3, 4)
    assert isinstance(route.segments[1].rows, torch.Tensor)
    assert route.segments[1].rows.tolist() == [0, 1, 4]
    assert isinstance(route.rows, torch.Tensor)
    assert route.rows.tolist() == [0, 1, 3, 4]
    assert Route.build(torch.tensor([1, 1], dtype=torch.int32), CPU).rows == slice(0, 2)


BOTH = frozenset({torch.float32, torch.bfloat16})
AVX2 = Machine(has_avx512=False, has_amx=False, product_dtypes=frozenset({torch.float32}))
AVX512 = Machine(has_avx512=True, has_amx=False, product_dtypes=BOTH)
AMX = Machine(has_avx512=True, has_amx=True, product_dtypes=BOTH)


@pytest.mark.parametrize(
    ("machine", "dtype", "width", "num_tokens", "num_adapters", "rank", "expected"),
    [
        (AVX512, torch.float32, 1024, 32, 4, 16, True),
        (AVX512, torch.float32, 1024, 512, 4, 16, False),
        (AVX512, torch.float32, 4096, 64, 4, 16, False),  # four times the work for one call saved
        (AVX512, torch.float32, 256, 128, 4, 16, True),
        (AVX512, torch.float32, 1024, 512, 1, 32, True),
        (AVX512, torch.bfloat16, 1024, 32, 16, 32, False),
        (AMX, torch.bfloat16, 1024, 32, 16, 32, True),
        (AMX, torch.bfloat16, 2048, 512, 8, 16, True),
        (AMX, torch.float32, 1024, 32, 16, 32, False),
        (AVX2, torch.float32, 1024, 32, 2, 16, True),
        (AVX2, torch.float32, 1024, 32, 16, 16, False),
        (AVX2, torch.float32, 256, 32, 16, 16, True),
        (AVX2, torch.bfloat16, 1024, 2, 2, 16, False),
        (AVX2, torch.bfloat16, 1024, 2, 1, 16, True),
    ],
)
def test_few_tokens_are_dense_and_many_are_grouped(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    dtype: torch.dtype,
    width: int,
    num_tokens: int,
    num_adapters: int,
    rank: int,
    expected: bool,
) -> None:
    """As was measured on such machines."""
    monkeypatch.setattr(cpu, "MACHINE", machine)
    columns = stack_columns([(slot, rank, 1.0) for slot in range(num_adapters)], CPU)
    rows = torch.empty(num_adapters * rank, width, dtype=dtype, device="meta")
    slots = torch.tensor([token % num_adapters for token in range(num_tokens)], dtype=torch.int32)
    assert cpu.use_dense(StackedSite(rows, rows, columns), Route.build(slots, CPU)) is expected


def test_a_machine_is_what_torch_finds() -> None:
    machine = Machine.detect()
    assert torch.float32 in machine.product_dtypes
    assert machine.waste_of_slot(2048, torch.float32, is_gathered=True) > machine.waste_of_slot(
        2048, torch.float32, is_gathered=False
    )


def test_wrong_arguments_are_refused() -> None:
    inputs = make(by_name("mixed"), torch.float32)
    with pytest.raises(ValueError, match=r"y has 32 columns, the sites have \[32, 1\]"):
        add_lora_sites(inputs.y, inputs.x, [(32, inputs.stacked), (1, None)], route_of(inputs))
    with pytest.raises(ValueError, match=r"y is torch\.float32 \[9, 31\]"):
        add_lora_sites(inputs.y, inputs.x, [(1, None), (31, inputs.stacked)], route_of(inputs))
    with pytest.raises(ValueError, match=r"want torch\.float32 \[9, 48\]"):
        add_lora(inputs.y, inputs.x[:, 1:], inputs.stacked, route_of(inputs))
    with pytest.raises(ValueError, match=r"y is torch\.bfloat16 .* want torch\.float32 \[9, 32\] as the adapters are"):
        add_lora(inputs.y.bfloat16(), inputs.x.bfloat16(), inputs.stacked, route_of(inputs))
    with pytest.raises(ValueError, match="x is on meta, y on cpu"):
        add_lora(inputs.y, inputs.x.to("meta"), inputs.stacked, route_of(inputs))

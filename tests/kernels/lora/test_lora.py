"""LoRA products on a CPU, in native code and in torch, against the definition, and the definition against PEFT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear

from kernels.lora import ModuleGroup, adapter_segments, add_lora_group, ops, reference, segments_on_host
from kernels.lora.cases import CASES, Case, GroupInputs, Inputs, make, make_group
from kernels.lora.cpu import tokens_of_slots
from kernels.lora.segments import AdapterSegments
from tests.kernels.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = pytest.mark.usefixtures("lora_form")


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def copy_of(y: torch.Tensor) -> torch.Tensor:
    """With y's strides, so that a strided case stays one."""
    return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype).copy_(y)


def segments_of(inputs: Inputs | GroupInputs, num_slots: int, block_tokens: int = 32) -> AdapterSegments:
    return segments_on_host(inputs.token_slots.numpy(), num_slots, block_tokens)


def define(inputs: Inputs) -> torch.Tensor:
    y = copy_of(inputs.y)
    reference.add_lora(y, inputs.x, inputs.paged, inputs.token_slots)
    return y


def added(inputs: Inputs, block_tokens: int = 32) -> torch.Tensor:
    group, y = ModuleGroup.of([inputs.paged]), copy_of(inputs.y)
    segments = segments_of(inputs, group.num_slots, block_tokens)
    add_lora_group(y, inputs.x, group, segments, max_rank=int(inputs.paged.rank.max()))
    return y


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype)
    expected = define(inputs)
    for block_tokens in (32, 1, 3, 1000):
        assert_close(added(inputs, block_tokens), expected, magnitude=4.0)


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


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_adapter_keep_their_bits(dtype: torch.dtype) -> None:
    """A negative zero stays one: adding zero to it would not."""
    inputs = make(by_name("mixed"), dtype)
    inputs.y[2] = -0.0
    y = added(inputs)
    for row in (2, 6):
        assert torch.equal(y[row].view(torch.uint8), inputs.y[row].view(torch.uint8))


@FORMS
def test_rows_do_not_depend_on_the_other_adapters() -> None:
    """Beyond the order of summing."""
    inputs = make(by_name("mixed"), torch.float32)
    together = added(inputs)
    for row in range(len(inputs.y)):
        only = inputs.token_slots.clone()
        only[torch.arange(len(only)) != row] = -1
        alone = added(replace(inputs, token_slots=only))
        torch.testing.assert_close(together[row], alone[row], rtol=1e-6, atol=1e-6)


@FORMS
@pytest.mark.parametrize("wrong", [1e38, float("nan"), float("-inf")])
def test_an_adapter_that_overflows_spoils_its_own_rows_only(wrong: float) -> None:
    inputs = make(by_name("mixed"), torch.float32)
    first = int(inputs.paged.first[1])
    inputs.paged.pages[inputs.paged.page_ids[first].long(), :, 0] = wrong  # of A
    inputs.x.abs_().mul_(100)
    y = added(inputs)
    for row, slot in enumerate(inputs.token_slots.tolist()):
        assert bool(y[row].isfinite().all()) == (slot != 1)


@FORMS
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).flatmap(
        lambda ranks: st.tuples(
            st.just(tuple(ranks)), st.lists(st.integers(-1, len(ranks) - 1), max_size=40).map(tuple)
        )
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(1, 40),
)
def test_random_cases(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], num_in: int, num_out: int, width: int, block_tokens: int
) -> None:
    ranks, slots = sizes
    inputs = make(Case("random", slots, ranks, num_in * width, num_out * width, width), torch.float32)
    assert_close(added(inputs, block_tokens), define(inputs), magnitude=8.0)


@FORMS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fused_modules_equal_each_alone(case: Case) -> None:
    """Module i leaves slot i out, whose columns keep their bits."""
    inputs = make_group(case, (case.out_features, 3, case.out_features), torch.float32)
    num_slots, expected, column = inputs.group.num_slots, copy_of(inputs.y), 0
    for index, width in enumerate(inputs.group.out_features):
        columns = slice(column, column + width)
        column += width
        reference.add_lora(expected[:, columns], inputs.x, inputs.group.module(index), inputs.token_slots)
    actual = copy_of(inputs.y)
    add_lora_group(actual, inputs.x, inputs.group, segments_of(inputs, num_slots), max_rank=inputs.max_rank)
    assert_close(actual, expected, magnitude=4.0)
    left_out = inputs.token_slots == 1
    between = slice(case.out_features, case.out_features + 3)
    assert torch.equal(actual[left_out, between], inputs.y[left_out, between])


def test_segments_are_the_tokens_of_each_slot() -> None:
    """Blocks of one slot are joined, and tokens that follow one another are a slice."""
    slots = torch.tensor([2, 2, -1, 0, 2, 9], dtype=torch.int32)
    for segments in (segments_on_host(slots.numpy(), 4, 2), adapter_segments(slots, 4, block_tokens=1)):
        found = tokens_of_slots(segments)
        assert [slot for slot, _ in found] == [0, 2]
        assert found[0][1] == slice(3, 4)
        assert isinstance(found[1][1], torch.Tensor) and found[1][1].tolist() == [0, 1, 4]
    together = torch.tensor([1, 1], dtype=torch.int32)
    assert tokens_of_slots(segments_on_host(together.numpy(), 4)) == [(1, slice(0, 2))]


@FORMS
def test_wrong_arguments_are_refused() -> None:
    inputs = make_group(by_name("mixed"), (32, 16), torch.float32)
    segments, y, x = segments_of(inputs, 4), inputs.y, inputs.x

    def add(y: torch.Tensor, x: torch.Tensor, max_rank: int = inputs.max_rank) -> None:
        ops.add_lora_group(y, x, inputs.group, segments, max_rank=max_rank)

    with pytest.raises(ValueError, match=r"y is torch\.float32 \[9, 47\], want torch\.float32 \[9, 48\]"):
        add(y[:, 1:], x)
    with pytest.raises(ValueError, match=r"x is torch\.float32 \[9, 47\], want torch\.float32 \[9, 48\]"):
        add(y, x[:, 1:])
    with pytest.raises(
        ValueError, match=r"torch\.bfloat16 .* want torch\.float32 .* as the segments and the adapters are"
    ):
        add(y.bfloat16(), x.bfloat16())
    with pytest.raises(ValueError, match=r"x on meta; move one|x is on meta, y on cpu"):
        add(y, x.to("meta"))
    for table in ("page_ids", "first", "rank", "scaling"):
        elsewhere: dict[str, Any] = {table: getattr(inputs.group, table).to("meta")}
        with pytest.raises(ValueError, match=f"{table} is on meta, pages on cpu"):
            replace(inputs.group, **elsewhere)
    with pytest.raises(ValueError, match="slot 3 has rank 64, h has room for 32"):
        add(y, x, max_rank=32)
    with pytest.raises(ValueError, match="max_rank is -1"):
        add(y, x, max_rank=-1)

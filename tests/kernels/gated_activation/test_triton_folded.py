"""The gate of what an expand completes: the bits of two launches from one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import fp8_rows, gated_activation as package
from kernels.cases import to_device
from kernels.fp8_rows import reference
from kernels.gated_activation import ACTIVATIONS, gated_activation, gated_activation_fp8, triton_folded
from kernels.lora import launch, ops
from kernels.lora.cases import Case, GroupInputs, make_group
from kernels.lora.expansion import Expansion
from kernels.lora.segments import MAX_BLOCK_TOKENS, segments_in_torch
from kernels.triton_launch import forget_prepared
from tests.kernels.lora.vectors import with_every_vector
from tests.kernels.tolerances import assert_close

# NumPy's, of the interpreter: 1 / (1 + inf) is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

# Slot 0 has more tokens than a block, slot 2 has no rank at the up projection's module.
CASE = Case("gate", (0,) * 17 + (1, -1, 2, 1, 7), (17, 3, 8))


def of_gate(widths: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, has_vectors: bool) -> Expansion:
    inputs = make_group(CASE, widths, dtype)
    inputs, epilogue = with_every_vector(inputs) if has_vectors else (inputs, None)
    there: GroupInputs = to_device(inputs, device)
    segments = segments_in_torch(there.token_slots, there.group.num_slots, 16)
    h = torch.zeros(1, len(widths), len(CASE.token_slots), 32, device=device)
    ops.lora_shrink(there.x, there.group, segments, max_rank=inputs.max_rank)
    h.copy_(torch.randn(h.shape, generator=torch.Generator().manual_seed(1)))
    return Expansion(there.y, h, there.group, segments, None if epilogue is None else to_device(epilogue, device))


def both(expansion: Expansion, monkeypatch: pytest.MonkeyPatch, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate by one launch, and by those of the expand and the gate."""
    launched: list[Any] = []
    folded = triton_folded.gated_activation

    def noted(*arguments: Any) -> torch.Tensor | None:
        found = folded(*arguments)
        launched.extend([arguments] if found is not None else [])
        return found

    for module in (package, ops):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(triton_folded, "gated_activation", noted)
    before = expansion.y.clone()
    at_once = gated_activation(expansion.y, activation, expansion)
    assert len(launched) == 1
    expansion.y.copy_(before)
    expansion.add()
    assert not torch.equal(expansion.y, before)
    return at_once, gated_activation(expansion.y, activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("widths", "has_vectors"), [((48, 48), False), ((64,), False), ((32, 32), True)], ids=["two", "joint", "vectors"]
)
def test_one_launch_has_the_bits_of_two(
    widths: tuple[int, ...],
    has_vectors: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens without an adapter, of slots outside the table, and of slots without a rank at one module among them."""
    at_once, one_by_one = both(of_gate(widths, dtype, device, has_vectors=has_vectors), monkeypatch, "silu")
    assert at_once.isfinite().all()
    assert torch.equal(at_once, one_by_one)


def test_programs_of_several_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tiles of columns, of blocks of 16 tokens, of two and of one."""
    expected, _ = both(of_gate((48, 48), torch.bfloat16, device, has_vectors=False), monkeypatch, "silu")
    for fewest_programs in (1, 5):
        monkeypatch.setattr(launch, "FEWEST_PROGRAMS", fewest_programs)
        forget_prepared()
        at_once, one_by_one = both(of_gate((48, 48), torch.bfloat16, device, has_vectors=False), monkeypatch, "silu")
        assert torch.equal(at_once, expected) and torch.equal(one_by_one, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, one_by_one = both(of_gate((32, 32), torch.float32, device, has_vectors=False), monkeypatch, activation)
    assert torch.equal(at_once, one_by_one)


def test_the_definition_is_the_expand_and_then_the_gate(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    expansion = of_gate((48, 48), torch.float32, torch.device("cpu"), has_vectors=False)
    there = of_gate((48, 48), torch.float32, device, has_vectors=False)
    expected = gated_activation(expansion.y, "silu", expansion)
    at_once, _ = both(there, monkeypatch, "silu")
    assert_close(at_once.cpu(), expected, magnitude=8.0)


@pytest.mark.parametrize("widths", [(32, 64), (24, 24, 24), (40,)], ids=str)
def test_other_modules_are_expanded_first(widths: tuple[int, ...], device: torch.device) -> None:
    """Of unequal widths, of three, and where up begins inside of a tile."""
    expansion = of_gate(widths, torch.float32, device, has_vectors=False)
    assert triton_folded.gated_activation(expansion, "silu") is None


def test_an_expansion_of_another_tensor_is_refused(device: torch.device) -> None:
    expansion = of_gate((32, 32), torch.float32, device, has_vectors=False)
    for gate in (gated_activation, gated_activation_fp8):
        with pytest.raises(ValueError, match="the expansion is of another tensor than x"):
            gate(expansion.y.clone(), "silu", expansion)


@pytest.mark.parametrize("widths", [(32, 32), (32, 64)], ids=["in one launch", "expanded first"])
def test_fp8_rows_are_those_of_the_result(
    widths: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (package, fp8_rows, ops):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    one, other = (of_gate(widths, torch.bfloat16, device, has_vectors=False) for _ in range(2))
    y = gated_activation(one.y, "silu", one)
    same, rows = gated_activation_fp8(other.y, "silu", other)
    expected = reference.quantize_rows(y.cpu())
    assert torch.equal(same, y) and torch.equal(rows.scales.cpu(), expected.scales)
    assert torch.equal(rows.codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))


def test_blocks_of_many_tokens(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As prompts have them."""
    few = of_gate((32, 32), torch.bfloat16, device, has_vectors=False)
    slots = few.segments.token_slots
    assert slots is not None
    many = segments_in_torch(slots, few.group.num_slots, MAX_BLOCK_TOKENS)
    expected, _ = both(few, monkeypatch, "silu")
    y = of_gate((32, 32), torch.bfloat16, device, has_vectors=False).y
    assert torch.equal(gated_activation(y, "silu", Expansion(y, few.h, few.group, many)), expected)


def test_a_row_past_2_to_the_31_values_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offset needs 64 bits, the stride does not. Of the 4 GiB only the pages of three rows are ever touched."""
    every = of_gate((32, 32), torch.bfloat16, device, has_vectors=False)
    y = every.y[-4:-1]
    slots = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    segments = segments_in_torch(slots, every.group.num_slots, 16)
    far = torch.empty((1 << 31) + 64, dtype=y.dtype, device=device).as_strided(y.shape, (1 << 30, 1)).copy_(y)
    for module in (package, ops):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    near = y.clone()
    h = every.h[:, :, :3].contiguous()
    expected = gated_activation(near, "silu", Expansion(near, h, every.group, segments))
    assert torch.equal(gated_activation(far, "silu", Expansion(far, h, every.group, segments)), expected)

"""The residual's sum and the norm of what an expand completes: the bits of two launches from one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import rms_norm as package
from kernels.cases import to_device
from kernels.lora import ops
from kernels.lora.cases import Case, GroupInputs, make_group
from kernels.lora.expansion import MOST_TOKENS, Expansion
from kernels.lora.segments import segments_in_torch
from kernels.rms_norm import rms_norm, triton_folded
from tests.kernels.lora.vectors import with_every_vector
from tests.kernels.tolerances import assert_close

# Slot 3 has no rank at the module. Slot 7 is no slot.
CASE = Case("norm", (1, 0, -1, 2, 2, 7, 3), (8, 40, 3, 0))
EPS = 1e-5


def of_output(
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    case: Case = CASE,
    has_vectors: bool = False,
    is_uniform: bool = True,
) -> Expansion:
    inputs = make_group(case, (hidden,), dtype, is_uniform=is_uniform)
    inputs, epilogue = with_every_vector(inputs) if has_vectors else (inputs, None)
    there: GroupInputs = to_device(inputs, device)
    segments = segments_in_torch(there.token_slots, there.group.num_slots, 16)
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(1, 1, len(case.token_slots), 64, generator=generator).to(device)
    return Expansion(there.y, h, there.group, segments, None if epilogue is None else to_device(epilogue, device))


def norm_of(expansion: Expansion, *, is_folded: bool) -> list[torch.Tensor]:
    """The norm, the sum, and what is left in y."""
    y, generator = expansion.y, torch.Generator().manual_seed(2)
    weight, residual = (torch.randn(shape, generator=generator).to(y) for shape in (y.shape[1:], y.shape))
    if not is_folded:
        expansion.add()
    normed = rms_norm(y, weight, EPS, residual=residual, weight_offset=1.0, expansion=expansion if is_folded else None)
    return [normed, residual, y]


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU's kernels run. The calls of the folded one are noted."""
    for module in (package, ops):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    calls: list[Any] = []
    rms_norm = triton_folded.rms_norm

    def noted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return rms_norm(*arguments)

    monkeypatch.setattr(triton_folded, "rms_norm", noted)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden", "has_vectors"), [(64, False), (48, False), (100, True)], ids=str)
def test_one_launch_has_the_bits_of_two(
    hidden: int, has_vectors: bool, dtype: torch.dtype, device: torch.device, folded: list[Any]
) -> None:
    """Ranks of two steps, tokens without an adapter and a slot without a rank among them. The last tile is not full."""
    at_once = norm_of(of_output(hidden, dtype, device, has_vectors=has_vectors), is_folded=True)
    assert len(folded) == 1
    apart = of_output(hidden, dtype, device, has_vectors=has_vectors)
    before = apart.y.clone()
    expected = norm_of(apart, is_folded=False)
    assert len(folded) == 1
    assert not torch.equal(apart.y, before)
    assert at_once[0].isfinite().all()
    assert all(torch.equal(*pair) for pair in zip(at_once, expected, strict=True))


def test_the_definition_is_the_expand_and_then_the_norm(device: torch.device, folded: list[Any]) -> None:
    at_once = norm_of(of_output(64, torch.float32, device), is_folded=True)
    assert len(folded) == 1
    with pytest.MonkeyPatch.context() as patched:
        for module in (package, ops):
            patched.setattr(module, "runs_triton", lambda tensor: False)
        expected = norm_of(of_output(64, torch.float32, torch.device("cpu")), is_folded=True)
    for mine, theirs in zip(at_once[:2], expected[:2], strict=True):
        assert_close(mine.cpu(), theirs, magnitude=8.0)


def test_what_is_not_folded_is_expanded_first(device: torch.device, folded: list[Any]) -> None:
    """More tokens than a program of one each is for, and a norm without a residual's sum."""
    many = replace(CASE, token_slots=(0,) * (MOST_TOKENS + 1))
    assert triton_folded.tile_columns(of_output(64, torch.float32, device, case=many)) is None
    alone = of_output(64, torch.float32, device)
    weight = torch.ones(64, device=device)
    found = rms_norm(alone.y, weight, EPS, expansion=alone)
    apart = of_output(64, torch.float32, device)
    apart.add()
    assert torch.equal(found, rms_norm(apart.y, weight, EPS))
    assert not folded


def test_an_expansion_of_another_tensor_is_refused(device: torch.device) -> None:
    expansion = of_output(64, torch.float32, device)
    with pytest.raises(ValueError, match="the expansion is of another tensor than x"):
        rms_norm(expansion.y.clone(), expansion.y[0], EPS, residual=expansion.y, expansion=expansion)


def test_a_row_past_2_to_the_31_values_is_found(device: torch.device, folded: list[Any]) -> None:
    """Of the 4 GiB only the pages of two rows are ever touched."""
    case = replace(CASE, token_slots=(1, 2))
    near = of_output(64, torch.bfloat16, device, case=case)
    far = torch.empty((1 << 31) + 64, dtype=torch.bfloat16, device=device).as_strided((2, 64), (1 << 31, 1))
    there = replace(near, y=far.copy_(near.y))
    found, expected = norm_of(there, is_folded=True), norm_of(near, is_folded=True)
    assert len(folded) == 2
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

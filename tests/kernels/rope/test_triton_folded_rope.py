"""Rotation and cache write of what an expand completes: the bits of two launches from one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kernels import rope as package
from kernels.cases import to_device
from kernels.lora import ops
from kernels.lora.cases import Case, GroupInputs, make_group
from kernels.lora.expansion import MOST_TOKENS, Expansion
from kernels.lora.segments import segments_in_torch
from kernels.rope import HeadNorm, apply_rope_and_store_kv, triton_folded
from tests.kernels.lora.vectors import with_every_vector
from tests.kernels.tolerances import assert_close

# Slot 0 has no rank at the query's module, slot 1 none at the key's, slot 2 none at the value's. Slot 7 is no slot.
CASE = Case("rope", (1, 0, -1, 2, 2, 7, 0), (8, 17, 3))


@dataclass(slots=True)
class Call:
    """One call's tensors."""

    expansion: Expansion
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value [T, heads, size]
    tables: tuple[torch.Tensor, torch.Tensor]
    caches: tuple[torch.Tensor, torch.Tensor]
    kv_positions: torch.Tensor

    def run(self, *, with_expansion: bool = True, norm: HeadNorm | None = None) -> list[torch.Tensor]:
        """What it leaves in y and in the caches."""
        expansion = self.expansion if with_expansion else None
        apply_rope_and_store_kv(
            *self.parts, None, *self.tables, *self.caches, self.kv_positions, norm=norm, expansion=expansion
        )
        return [self.expansion.y.clone(), *(cache.nan_to_num(nan=99.0) for cache in self.caches)]


def call(
    dtype: torch.dtype,
    device: torch.device,
    *,
    heads: int = 6,
    kv_heads: int = 5,
    dim: int = 16,
    value_dim: int = 8,
    case: Case = CASE,
    is_joint: bool = False,
    has_vectors: bool = False,
) -> Call:
    """The last token has no KV position. Part of a head is not rotated."""
    widths = (heads * dim, kv_heads * dim, kv_heads * value_dim)
    inputs = make_group(case, (sum(widths),) if is_joint else widths, dtype)
    inputs, epilogue = with_every_vector(inputs) if has_vectors else (inputs, None)
    there: GroupInputs = to_device(inputs, device)
    segments = segments_in_torch(there.token_slots, there.group.num_slots, 16)
    generator = torch.Generator().manual_seed(1)
    num_tokens = len(case.token_slots)
    h = torch.randn(1, there.group.num_modules, num_tokens, 32, generator=generator).to(device)
    expansion = Expansion(there.y, h, there.group, segments, None if epilogue is None else to_device(epilogue, device))
    query, key, value = there.y.split(widths, dim=1)
    key, value = key.unflatten(1, (kv_heads, dim)), value.unflatten(1, (kv_heads, value_dim))
    angles = torch.rand(num_tokens, dim // 2 - 2, generator=generator) * 3
    tables = angles.cos().to(device), angles.sin().to(device)
    caches = [torch.full((4, 4, kv_heads, size), float("nan"), dtype=dtype, device=device) for size in (dim, value_dim)]
    kv_positions = torch.arange(num_tokens) * 2 % 15
    kv_positions[-1] = -1
    return Call(
        expansion,
        (query.unflatten(1, (heads, dim)), key, value),
        tables,
        (caches[0], caches[1]),
        kv_positions.to(device),
    )


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU's kernels run. The calls of the folded one are noted."""
    for module in (package, ops):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    calls: list[Any] = []
    apply_rope = triton_folded.apply_rope

    def noted(*arguments: Any) -> None:
        calls.append(arguments)
        apply_rope(*arguments)

    monkeypatch.setattr(triton_folded, "apply_rope", noted)
    return calls


def one_by_one(each: Call, norm: HeadNorm | None = None) -> list[torch.Tensor]:
    before = each.expansion.y.clone()
    each.expansion.add()
    assert not torch.equal(each.expansion.y, before)
    return each.run(with_expansion=False, norm=norm)


FORMS: dict[str, dict[str, Any]] = {
    "three modules": {},
    "one token": {"case": replace(CASE, token_slots=(1,))},
    "joint": {"is_joint": True, "heads": 4, "kv_heads": 4, "value_dim": 16},
    "vectors": {"has_vectors": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_one_launch_has_the_bits_of_two(
    form: dict[str, Any], dtype: torch.dtype, device: torch.device, folded: list[Any]
) -> None:
    """Heads that fill no tile among them, tokens without an adapter, and slots without a rank at one module."""
    at_once = call(dtype, device, **form).run()
    assert len(folded) == 1
    expected = one_by_one(call(dtype, device, **form))
    assert len(folded) == 1
    assert all(torch.equal(*pair) for pair in zip(at_once, expected, strict=True))


def test_the_definition_is_the_expand_and_then_the_rotation(device: torch.device, folded: list[Any]) -> None:
    at_once = call(torch.float32, device).run()
    assert len(folded) == 1
    with pytest.MonkeyPatch.context() as patched:
        for module in (package, ops):
            patched.setattr(module, "runs_triton", lambda tensor: False)
        expected = call(torch.float32, torch.device("cpu")).run()
    for mine, theirs in zip(at_once, expected, strict=True):
        assert_close(mine.cpu(), theirs, magnitude=8.0)


def test_what_is_not_folded_is_expanded_first(device: torch.device, folded: list[Any]) -> None:
    """Heads with a norm; more tokens than a program of one each is for; sizes that no tile divides."""
    weight = torch.ones(16, device=device)
    norm = HeadNorm(weight, weight, 1e-5)
    expected = one_by_one(call(torch.float32, device), norm)
    found = call(torch.float32, device).run(norm=norm)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    many = replace(CASE, token_slots=(0,) * (MOST_TOKENS + 1))
    others = (call(torch.float32, device, case=many), call(torch.float32, device, value_dim=3))
    for other in others:
        assert triton_folded.tile_columns(*other.parts, other.expansion, has_norm=False) is None
    apart = call(torch.float32, device)
    parts = (apart.parts[0].clone(), *apart.parts[1:])
    assert triton_folded.tile_columns(*parts, apart.expansion, has_norm=False) is None
    assert not folded


def test_a_token_past_2_to_the_31_values_is_found(device: torch.device, folded: list[Any]) -> None:
    """Of the 4 GiB only the pages of two rows are ever touched."""
    near = call(torch.bfloat16, device, case=replace(CASE, token_slots=(1, 2)))
    y = near.expansion.y
    far = torch.empty((1 << 31) + y.shape[1], dtype=y.dtype, device=device).as_strided(y.shape, (1 << 31, 1)).copy_(y)
    query, key, value = far.split([part.shape[1] * part.shape[2] for part in near.parts], dim=1)
    shapes = [part.shape[1:] for part in near.parts]
    parts = (query.unflatten(1, shapes[0]), key.unflatten(1, shapes[1]), value.unflatten(1, shapes[2]))
    expected = near.run()
    found = replace(near, expansion=replace(near.expansion, y=far), parts=parts).run()
    assert len(folded) == 2
    assert torch.equal(found[0], expected[0])

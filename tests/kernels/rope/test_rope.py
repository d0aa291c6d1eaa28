"""apply_rope: the definition against transformers, the GPU kernel against the definition."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels.rope import apply_rope, apply_rope_and_store_kv, triton_kernel
from kernels.rope.cases import CASES, Case, Inputs, make
from tests.kernels.tolerances import assert_close

NAMES = [field.name for field in fields(Inputs)]
by_name = {"ids": lambda case: case.name}


def tensors(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(inputs, name) for name in NAMES)


def test_equals_transformers() -> None:
    inputs = make(CASES[2], torch.float32)
    cos, sin = (torch.cat([table, table], dim=1)[inputs.positions][None] for table in (inputs.cos, inputs.sin))
    query, key = (x.transpose(0, 1)[None] for x in (inputs.query, inputs.key))
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    apply_rope(inputs.query, inputs.key, inputs.positions, inputs.cos, inputs.sin)
    for ours, theirs in zip((inputs.query, inputs.key), expected, strict=True):
        assert_close(ours, theirs[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, **by_name)
def test_the_gpu_kernel_equals_the_reference(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Rotation and caches; slots that nobody writes keep their NaN."""
    ours, theirs = make(case, dtype, device=device.type), make(case, dtype)
    apply_rope_and_store_kv(*tensors(theirs))
    store = (ours.value, ours.key_cache, ours.value_cache, ours.slot_mapping)
    triton_kernel.apply_rope(ours.query, ours.key, ours.positions, ours.cos, ours.sin, store)
    for mine, other in zip(tensors(ours), tensors(theirs), strict=True):
        if mine.is_floating_point():
            assert torch.equal(mine.cpu().isnan(), other.isnan())
            assert_close(mine.cpu().nan_to_num(), other.nan_to_num())
    alone = make(case, dtype, device=device.type)
    triton_kernel.apply_rope(alone.query, alone.key, alone.positions, alone.cos, alone.sin, None)
    assert torch.equal(alone.query, ours.query)
    assert torch.equal(alone.key, ours.key)
    assert alone.key_cache.isnan().all()


def test_quarter_turns_are_exact(device: torch.device) -> None:
    """cos 0, sin 1: (a, b) becomes (-b, a)."""
    query = torch.arange(16.0, device=device).view(1, 2, 8)
    key = query[:, :1].clone()
    zeros, ones = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    expected = torch.cat([-query[..., 4:], query[..., :4]], dim=-1)
    triton_kernel.apply_rope(query, key, torch.zeros(1, dtype=torch.int64, device=device), zeros, ones, None)
    assert torch.equal(query, expected)
    assert torch.equal(key, expected[:, :1])


def test_wrong_arguments_are_refused() -> None:
    inputs = make(CASES[1], torch.float32)
    with pytest.raises(ValueError, match="want int64"):
        apply_rope(inputs.query, inputs.key, inputs.positions.int(), inputs.cos, inputs.sin)
    with pytest.raises(ValueError, match="2 n at most 16"):
        apply_rope(inputs.query, inputs.key, inputs.positions, inputs.cos.repeat(1, 2), inputs.sin.repeat(1, 2))
    with pytest.raises(ValueError, match="of one dtype"):
        apply_rope(inputs.query, inputs.key.half(), inputs.positions, inputs.cos, inputs.sin)
    with pytest.raises(ValueError, match="disagree"):
        apply_rope_and_store_kv(*tensors(inputs)[:7], inputs.value_cache[1:], inputs.slot_mapping)

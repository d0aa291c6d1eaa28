"""apply_rope: the definition against transformers' own modules, and what is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernels.rope import HeadNorm, apply_rope, apply_rope_and_store_kv, cpu, reference
from kernels.rope.cases import CASES, Case, Inputs, make
from tests.kernels.tolerances import assert_close


def call(inputs: Inputs) -> None:
    apply_rope_and_store_kv(**{field.name: getattr(inputs, field.name) for field in fields(Inputs)})


def rotated_by_transformers(inputs: Inputs, norms: tuple[Any, Any] | None = None) -> list[torch.Tensor]:
    """Query and key [T, H, D] as a transformers attention computes them."""
    cos, sin = (torch.cat([table, table], dim=1)[inputs.positions][None] for table in (inputs.cos, inputs.sin))
    heads = [inputs.query, inputs.key]
    if norms is not None:
        heads = [norm(x) for norm, x in zip(norms, heads, strict=True)]
    rotated = apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in heads), cos, sin)
    return [x[0].transpose(0, 1) for x in rotated]


def test_equals_transformers() -> None:
    inputs = make(CASES[2], torch.float32)
    expected = rotated_by_transformers(inputs)
    apply_rope(inputs.query, inputs.key, inputs.positions, inputs.cos, inputs.sin)
    for ours, theirs in zip((inputs.query, inputs.key), expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("norm_class", "weight_offset"), [(Qwen3RMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
@torch.no_grad()
def test_norm_and_rotation_equal_transformers(norm_class: Any, weight_offset: float, dtype: torch.dtype) -> None:
    case = replace(CASES[2], has_norm=True, weight_offset=weight_offset)
    inputs = make(case, dtype)
    assert inputs.norm is not None
    norms = (norm_class(case.dim, eps=1e-5).to(dtype), norm_class(case.dim, eps=1e-5).to(dtype))
    for norm, weight in zip(norms, (inputs.norm.query_weight, inputs.norm.key_weight), strict=True):
        norm.weight.copy_(weight)
    expected = [x.to(dtype) for x in rotated_by_transformers(inputs, norms)]
    call(inputs)
    for ours, theirs in zip((inputs.query, inputs.key), expected, strict=True):
        assert_close(ours, theirs, magnitude=2.0)
    kept = inputs.kv_positions >= 0
    assert torch.equal(inputs.key_cache.flatten(0, 1)[inputs.kv_positions[kept]], inputs.key[kept])
    assert torch.equal(inputs.value_cache.flatten(0, 1)[inputs.kv_positions[kept]], inputs.value[kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cpu_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    """Query and key that lie side by side among them; what lies beside them stays."""
    ours, theirs = make(case, dtype), make(case, dtype)
    reference.apply_rope(theirs.query, theirs.key, theirs.positions, theirs.cos, theirs.sin, theirs.norm)
    cpu.apply_rope(ours.query, ours.key, ours.positions, ours.cos, ours.sin, ours.norm)
    for mine, other in ((ours.query, theirs.query), (ours.key, theirs.key), (ours.value, theirs.value)):
        assert_close(mine, other, magnitude=4.0 if case.has_norm else 1.0)


def test_a_row_for_each_token_is_the_same_as_positions() -> None:
    ours, theirs = make(CASES[1], torch.float32), make(CASES[1], torch.float32)
    assert ours.positions is not None
    apply_rope(ours.query, ours.key, None, ours.cos[ours.positions], ours.sin[ours.positions])
    apply_rope(theirs.query, theirs.key, theirs.positions, theirs.cos, theirs.sin)
    assert torch.equal(ours.query, theirs.query)
    assert torch.equal(ours.key, theirs.key)


def test_a_cache_of_another_dtype_takes_rounded_values() -> None:
    inputs = make(CASES[1], torch.float32)
    inputs.key_cache, inputs.value_cache = inputs.key_cache.bfloat16(), inputs.value_cache.bfloat16()
    call(inputs)
    assert torch.equal(inputs.key_cache.flatten(0, 1)[inputs.kv_positions], inputs.key.bfloat16())


def test_wrong_arguments_are_refused() -> None:
    inputs = make(CASES[1], torch.float32)
    query, key, positions, cos, sin = inputs.query, inputs.key, inputs.positions, inputs.cos, inputs.sin
    assert positions is not None
    with pytest.raises(ValueError, match="want int64"):
        apply_rope(query, key, positions.int(), cos, sin)
    with pytest.raises(ValueError, match="2 n at most 16"):
        apply_rope(query, key, positions, cos.repeat(1, 2), sin.repeat(1, 2))
    with pytest.raises(ValueError, match="of one dtype"):
        apply_rope(query, key.half(), positions, cos, sin)
    with pytest.raises(ValueError, match="100 rows for 1 tokens"):
        apply_rope(query, key, None, cos, sin)
    with pytest.raises(ValueError, match=r"norm.key_weight is \(15,\), want \[16\]"):
        apply_rope(query, key, positions, cos, sin, norm=HeadNorm(torch.ones(16), torch.ones(15), 1e-6))
    inputs.value_cache = inputs.value_cache[1:]
    with pytest.raises(ValueError, match="disagree"):
        call(inputs)

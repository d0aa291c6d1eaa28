"""LoRA with bias and DoRA: the definition against PEFT's layers, the kernel against the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear

from kernels.cases import to_device
from kernels.lora import Epilogue, lora_expand, lora_shrink, ops, reference
from kernels.lora.cases import Case, GroupInputs, make_group, with_vectors
from kernels.lora.segments import segments_in_torch
from tests.kernels.lora.vectors import with_every_vector
from tests.kernels.tolerances import assert_close

CASE = Case("epilogue", (1, 0, -1, 2, 1, 0), (8, 17, 3))
WIDTHS = (32, 16)


def added(inputs: GroupInputs, epilogue: Epilogue | None) -> torch.Tensor:
    segments = segments_in_torch(inputs.token_slots, inputs.group.num_slots, 16)
    y = inputs.y.clone()
    h = lora_shrink(inputs.x, inputs.group, segments, max_rank=inputs.max_rank)
    lora_expand(h, inputs.group, y, segments, epilogue=epilogue)
    return y


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", ["lora bias", "dora"])
def test_definition_equals_layers_of_peft(kind: str, has_bias: bool) -> None:
    inputs = make_group(CASE, (32,), torch.float32)
    module, is_dora = inputs.group.module(0), kind == "dora"
    base = torch.nn.Linear(48, 32, bias=has_bias)
    inputs.y.copy_(base(inputs.x).detach())
    dora_scale, lora_bias = torch.ones(3, 32), torch.zeros(3, 32)
    expected = inputs.y.clone()
    for slot in (1, 2):
        a, b = reference.gather(module, slot)
        rank, scaling = len(a), float(module.scaling[slot])
        config = LoraConfig(r=rank, lora_alpha=rank, use_dora=is_dora, lora_bias=has_bias and not is_dora)
        alpha: Any = scaling * rank
        layer: Any = PeftLinear(base, "one", config, r=rank, lora_alpha=alpha)
        layer.lora_A["one"].weight.data.copy_(a)
        layer.lora_B["one"].weight.data.copy_(b.T)
        if is_dora:
            magnitude = torch.rand(32) + 0.5
            layer.lora_magnitude_vector["one"].weight.data.copy_(magnitude)
            dora_scale[slot] = magnitude / (base.weight.detach() + scaling * b.T @ a).norm(dim=1)
        elif has_bias:
            lora_bias[slot] = torch.randn(32)
            layer.lora_B["one"].bias.data.copy_(lora_bias[slot])
        with torch.no_grad():
            rows = inputs.token_slots == slot
            expected[rows] = layer(inputs.x[rows])
    own = base.bias.detach() if has_bias and is_dora else None
    inputs, epilogue = with_vectors(inputs, dora_scale, lora_bias, own)
    if not is_dora:
        epilogue = replace(epilogue, dora_scale=None)
    actual = added(inputs, epilogue)
    rows = inputs.token_slots != 0
    assert_close(actual[rows], expected[rows], magnitude=4.0)
    plain = added(inputs, None)
    assert torch.equal(actual[2], inputs.y[2])
    assert_close(actual[~rows], plain[~rows], magnitude=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leave_out", [(), ("base_bias",), ("dora_scale", "base_bias"), ("lora_bias",)], ids=str)
@pytest.mark.parametrize("is_uniform", [False, True], ids=["ranks by module", "one rank"])
def test_kernel_equals_the_definition(
    is_uniform: bool,
    leave_out: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one rank at all modules, like q, k and v of an adapter; slot 1 has a DoRA scale at the second module too."""
    inputs = make_group(CASE, WIDTHS, dtype, is_uniform=is_uniform)
    inputs, full = with_every_vector(inputs)
    left_out: dict[str, Any] = dict.fromkeys(leave_out)
    epilogue = replace(full, **left_out)
    expected, plain = added(inputs, epilogue), added(inputs, None)
    monkeypatch.setattr(ops, "runs_triton", lambda tensor: True)
    there = to_device(inputs, device)
    actual = added(there, to_device(epilogue, device)).cpu()
    assert_close(actual, expected, magnitude=8.0)
    assert not torch.equal(actual[0], plain[0])
    without = added(there, None).cpu()
    for token in (1, 5):  # slot 0, which has neither
        assert torch.equal(actual[token], without[token])


def test_wrong_tables_are_refused() -> None:
    inputs, full = with_every_vector(make_group(CASE, WIDTHS, torch.float32))
    segments = segments_in_torch(inputs.token_slots, 3, 16)
    h = lora_shrink(inputs.x, inputs.group, segments, max_rank=inputs.max_rank)
    assert full.dora_scale is not None and full.base_bias is not None

    def expand(epilogue: Epilogue, *, add_inputs: bool = True) -> None:
        lora_expand(h, inputs.group, inputs.y, segments, add_inputs=add_inputs, epilogue=epilogue)

    with pytest.raises(ValueError, match="needs add_inputs=True"):
        expand(full, add_inputs=False)
    with pytest.raises(ValueError, match=r"dora_scale is torch\.int64 \[2, 2\], want torch\.int64 \[2, 3\]"):
        expand(replace(full, dora_scale=full.dora_scale[:, 1:]))
    with pytest.raises(ValueError, match=r"lora_bias is torch\.int32"):
        expand(replace(full, lora_bias=full.dora_scale.int()))
    with pytest.raises(ValueError, match=r"values is torch\.bfloat16"):
        expand(replace(full, values=full.values.bfloat16()))
    with pytest.raises(ValueError, match=r"base_bias is torch\.float32 \[47\]"):
        expand(replace(full, base_bias=full.base_bias[1:]))
    with pytest.raises(ValueError, match="dora_scale is on meta, y on cpu"):
        expand(replace(full, dora_scale=full.dora_scale.to("meta")))
    with pytest.raises(ValueError, match="of no use without a DoRA scale"):
        expand(replace(full, dora_scale=None))

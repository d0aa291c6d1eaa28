"""The linear that takes adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from data_plane.adapters.step.lora_step import LoraStep
from data_plane.layers.context import StepContext
from data_plane.layers.lora_linear import LoraLinear, replace_linears
from kernels.linear.choice import Form
from kernels.native import find_compiler

# A machine without a C compiler has no native products.
FORMS = [Form.ONEDNN, Form.NATIVE, Form.SHARED] if find_compiler() else [Form.ONEDNN]


class AddModule(LoraStep):
    """Adds one at a target module of some name, and keeps what it was given."""

    def __init__(self, target_name: str) -> None:
        self.target_name = target_name
        self.seen: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def apply(self, target_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.seen.append((target_name, tuple(x.shape), tuple(y.shape)))
        if target_name == self.target_name:
            y += 1

    def apply_group(self, target_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        for target_name, part in zip(target_names, y.split([4, 2], dim=1), strict=True):
            self.apply(target_name, x, part)


def test_linears_add_the_steps_adapters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2, bias=False))).requires_grad_(False)
    x = torch.randn(1, 5, 3)
    expected = model(x)
    context = StepContext()
    replace_linears(model, ["0", "1.0"], context)
    assert isinstance(model[0], LoraLinear)
    plain = model(x)
    torch.testing.assert_close(plain, expected)
    lora = AddModule("1.0")
    context.lora = lora
    assert torch.equal(model(x), plain + 1)
    assert lora.seen == [("0", (5, 3), (5, 4)), ("1.0", (5, 4), (5, 2))]
    context.end()
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_linears_of_one_input_become_one_with_all_their_targets(dtype: torch.dtype, biases: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(3, size, bias=bias, dtype=dtype) for size, bias in zip((4, 2), biases, strict=True)]
    context = StepContext()
    joint = LoraLinear(linears, ["a", "b"], context)
    joint.pack_weight()
    assert [(target.name, target.in_features, target.out_features) for target in joint.targets] == [
        ("a", 3, 4),
        ("b", 3, 2),
    ]
    x = torch.randn(1, 5, 3).to(dtype)
    expected = torch.cat([linear(x) for linear in linears], dim=-1)
    plain = joint(x)
    torch.testing.assert_close(plain, expected)
    lora = AddModule("b")
    context.lora = lora
    torch.testing.assert_close(joint(x), expected + torch.tensor([0, 0, 0, 0, 1, 1]).to(dtype))
    assert lora.seen == [("a", (5, 3), (5, 4)), ("b", (5, 3), (5, 2))]


def test_a_linear_without_modules_uses_no_adapter() -> None:
    context = StepContext()
    head = LoraLinear([nn.Linear(3, 4)], (), context)
    context.lora = lora = AddModule("head")
    head(torch.ones(1, 3))
    assert head.targets == [] and lora.seen == []


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 32, 300])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_weight_replaces_the_plain_one(
    num_tokens: int, *, has_bias: bool, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_plane.layers.packed_weight.fastest_form", lambda *_: form)
    torch.manual_seed(0)
    linear = nn.Linear(70, 33, bias=has_bias).requires_grad_(False)
    packed = LoraLinear([linear], ["target module"], StepContext())
    packed.pack_weight()
    x = torch.randn(1, num_tokens, 2 * 70)[..., ::2]
    torch.testing.assert_close(packed(x), linear(x))
    weight = packed.target_weight(0)
    assert isinstance(weight, torch.Tensor) and torch.equal(weight, linear.weight)
    assert (packed.weight.shape, packed.weight.dtype) == (linear.weight.shape, linear.weight.dtype)
    assert packed.weight.is_meta, "the plain weight is still held"


def test_a_weight_whose_own_form_is_fastest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_plane.layers.packed_weight.fastest_form", lambda *_: Form.PLAIN)
    linear = nn.Linear(8, 8, dtype=torch.bfloat16)
    same = LoraLinear([linear], ["target module"], StepContext())
    same.pack_weight()
    assert same.weight is linear.weight

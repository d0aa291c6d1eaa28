"""The linear that takes adapters."""

from __future__ import annotations

import torch
from torch import nn

from data_plane.layers.context import StepContext
from data_plane.layers.lora_linear import LoraLinear, replace_linears


class AddSite:
    """Adds one at one site, and keeps what it was given."""

    def __init__(self, site_name: str) -> None:
        self.site_name = site_name
        self.seen: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.seen.append((site_name, tuple(x.shape), tuple(y.shape)))
        if site_name == self.site_name:
            y += 1


def test_linears_share_weights_and_add_the_steps_adapters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2, bias=False)))
    x = torch.randn(1, 5, 3)
    expected = model(x)
    context = StepContext()
    weight = model[0].weight
    replace_linears(model, ["0", "1.0"], context)
    assert isinstance(model[0], LoraLinear) and model[0].weight is weight
    assert torch.equal(model(x), expected)
    lora = AddSite("1.0")
    context.lora = lora
    assert torch.equal(model(x), expected + 1)
    assert lora.seen == [("0", (5, 3), (5, 4)), ("1.0", (5, 4), (5, 2))]
    context.end()
    assert torch.equal(model(x), expected)

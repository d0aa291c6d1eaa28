"""Linear layers that add the adapters of the step in hand. They replace the linears of a loaded model in place."""

from __future__ import annotations

import torch
from torch import nn

from data_plane.layers.context import StepContext
from data_plane.layers.packed_weight import can_pack, pack, packed_linear


class LoraLinear(nn.Linear):
    """A loaded linear plus what the step's adapters add at this site. Shares the original's parameters, or packs them.

    Where the weight is packed, `weight` is a meta tensor: it has a shape and a dtype and no values.
    """

    def __init__(self, linear: nn.Linear, site_name: str, context: StepContext) -> None:
        # No super().__init__ of Linear: it would allocate and fill weights that are replaced at once.
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.packed: torch.Tensor | None = None  # instead of the weight
        self.register_parameter("bias", linear.bias)
        self.site_name = site_name
        self.context = context

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] for input [..., in_features]; with adapters the leading sizes hold the step's tokens."""
        if self.packed is None:
            output = nn.functional.linear(input, self.weight, self.bias)
        else:
            output = packed_linear(input, self.packed, self.bias)
        lora = self.context.lora
        if lora is not None:
            lora.apply(self.site_name, input.reshape(-1, self.in_features), output.view(-1, self.out_features))
        return output

    def pack_weight(self) -> None:
        """Keep the weight in the layout that is fastest here, if that is another one than the checkpoint's."""
        if can_pack(self.weight):
            self.packed = pack(self.weight)
            self.weight = nn.Parameter(torch.empty_like(self.weight, device="meta"), requires_grad=False)


def replace_linears(model: nn.Module, names: list[str], context: StepContext) -> None:
    """Put a LoraLinear in the place of each named linear of the model, its weight packed."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is a {type(linear).__name__}"
        parent_name, _, child_name = name.rpartition(".")
        replacement = LoraLinear(linear, name, context)
        replacement.pack_weight()
        setattr(model.get_submodule(parent_name), child_name, replacement)

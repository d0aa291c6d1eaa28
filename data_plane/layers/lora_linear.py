"""Linear layers that add the step's adapters. They replace the linears of a loaded model in place.

Linears that read the same input, such as q, k and v, may become one linear with their columns side by side. Each of
them stays a target module with its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from data_plane.layers.context import StepContext
from data_plane.layers.fp8.activations import Fp8Activations
from data_plane.layers.fp8.weight import Fp8Weight
from data_plane.layers.packed_weight import PackedWeight, pack, share, unpacked_linear
from data_plane.plan import TargetKind, TargetModule
from data_plane.quick_module import QuickModule
from kernels.fp8 import Fp8Rows
from kernels.lora.expansion import Expansion


class LoraLinear(QuickModule, nn.Linear):
    """One or more loaded linears plus what the step's adapters add to each.

    The parameters of a single linear are shared, those of several are copied side by side. If the weight is packed,
    `weight` is a meta tensor: it has a shape and a dtype, but no values.
    """

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        target_names: Sequence[str],
        context: StepContext,
        *,
        kind: TargetKind = TargetKind.LINEAR,
    ) -> None:
        """target_names: one for each linear, or none if adapters may not target them."""
        # Not Linear's own __init__: it would allocate and fill weights that are replaced at once.
        nn.Module.__init__(self)
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.out_splits = [linear.out_features for linear in linears]
        self.weight = linears[0].weight if len(linears) == 1 else _joined([linear.weight for linear in linears])
        self.packed: PackedWeight | Fp8Weight | None = None  # instead of the weight
        self.register_parameter("bias", _bias(linears))
        self.targets = [
            TargetModule(name, kind, linear.in_features, linear.out_features)
            for name, linear in zip(target_names, linears, strict=bool(target_names))
        ]
        self.target_names = tuple(target_names)
        self.context = context
        self.is_head = kind is TargetKind.HEAD

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] for input [..., in_features]; of a head more columns where adapters bring tokens.

        In a step with adapters the rows are the step's tokens; for a head they are the tokens whose logits are kept.
        """
        output, expansion = self.product(input)
        if expansion is not None:
            expansion.add()
        rows = self.context.head_rows if self.is_head else None
        if rows is not None and self.target_names:
            x, y = input.reshape(-1, self.in_features), output.view(-1, self.out_features)
            wide = rows.logits(self.target_names[0], x, y)
            output = wide.view(*input.shape[:-1], wide.shape[1])
        return _apart(output) if self.out_features == 1 else output

    def product(self, input: torch.Tensor) -> tuple[torch.Tensor, Expansion | None]:
        """The output, and the step's adapters if they are not in it yet: the kernel that reads it next adds them.

        For gate and up: no adapter's rows replace their output, and only the gate reads it.
        """
        lora = self.context.head_lora if self.is_head else self.context.lora
        if lora is None or not self.target_names:
            return self._base_product(input), None
        are_rows = input.dim() == 2
        x = input if are_rows else input.reshape(-1, self.in_features)
        shrunk = lora.shrink(self.target_names, x)  # on a GPU beside the product
        output = self._base_product(input)
        y = output if are_rows else output.view(-1, self.out_features)
        if shrunk is not None:
            return output, lora.expand(shrunk, x, y)
        if len(self.target_names) == 1:
            lora.apply(self.target_names[0], x, y)
        else:
            lora.apply_group(self.target_names, x, y)
        return output, None

    def _base_product(self, input: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return unpacked_linear(input, self.weight, self.bias)
        return self.packed.linear(input, self.bias)

    def target_weight(self, index: int) -> torch.Tensor | Fp8Rows:
        """[out, in] of one of the linears; a copy where the weight is packed for a CPU."""
        begin = sum(self.out_splits[:index])
        return self._whole_weight()[begin : begin + self.out_splits[index]]

    def target_bias(self, index: int) -> torch.Tensor | None:
        """[out] of one of the linears, or None; zeros for a linear without a bias if another one has a bias."""
        return None if self.bias is None else torch.split(self.bias.detach(), self.out_splits)[index]

    def pack_weight(self) -> None:
        """Keep the weight in the layout that is fastest here, which may be the checkpoint's own."""
        self.packed = pack(self.weight)
        if self.packed is not None:
            self.weight = nn.Parameter(torch.empty_like(self.weight, device="meta"), requires_grad=False)

    def quantize_weight(self, activations: Fp8Activations) -> None:
        """Keep the weight in FP8. The inputs' FP8 form comes from `activations`."""
        weight = self._whole_weight()
        assert isinstance(weight, torch.Tensor), "a weight is quantised once"
        self.packed = Fp8Weight(weight, activations)
        self.weight = nn.Parameter(torch.empty_like(self.weight, device="meta"), requires_grad=False)

    def share_weight(self) -> None:
        """Keep the weight, which another module uses too, and multiply with it in the way that is fastest here."""
        self.packed = share(self.weight)

    def _whole_weight(self) -> torch.Tensor | Fp8Rows:
        if isinstance(self.packed, Fp8Weight):
            return self.packed.rows
        return self.weight.detach() if self.packed is None else self.packed.unpack().detach()


def replace_linears(model: nn.Module, names: Collection[str], context: StepContext) -> None:
    """Replace each named linear of the model by a LoraLinear with a packed weight."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is a {type(linear).__name__}"
        replacement = LoraLinear([linear], [name], context)
        replacement.pack_weight()
        replace_module(model, name, replacement)


def replace_module(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Replace the named module."""
    parent_name, _, child_name = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child_name, replacement)


def _apart(column: torch.Tensor) -> torch.Tensor:
    """A column [..., 1] whose values do not follow one another in memory.

    For values that do, torch computes a sigmoid and the like for as many as fit a vector at once, and for the last ones
    in other steps. So the bits of a token would depend on the number of tokens, as those of qwen2-moe's
    shared_expert_gate.
    """
    wide = column.new_empty(*column.shape[:-1], 2)
    wide[..., :1] = column
    return wide[..., :1]


def _joined(tensors: Sequence[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([tensor.detach() for tensor in tensors]), requires_grad=False)


def _bias(linears: Sequence[nn.Linear]) -> nn.Parameter | None:
    """All biases side by side, zeros for a linear without one."""
    if len(linears) == 1:
        return linears[0].bias
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    return _joined(biases)

"""Turns linears with a weight [in, out], such as GPT-2's Conv1D, into plain linears."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from data_plane.layers.lora_linear import replace_module


def replace_transposed(model: nn.Module) -> None:
    """Replace every Conv1D of the model by a plain linear: the same product, and the same target for adapters.

    PEFT writes the same tensors for both, so that adapters need no change.
    """
    for name, module in list(model.named_modules()):
        if type(module) is Conv1D:
            replace_module(model, name, _plain(module))


def _plain(module: Conv1D) -> nn.Linear:
    linear = nn.Linear(module.nx, module.nf, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    return linear.train(module.training)

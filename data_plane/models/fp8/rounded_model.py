"""A float32 model of transformers with the numbers that FP8 linears compute with; for verify.py.

None of the worker's layers are here. Which linears a worker holds in FP8 follows from the rule of linears.py, from the
names of those that it joins, and from what adapters cannot target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from data_plane.models.fp8.linears import weight_problem
from data_plane.models.fused_parts import GATE_UP, QKV
from kernels.fp8_rows.reference import quantize_rows

_EXPERTS = ".experts."  # modules of their own, which tokens pass that a router chose


@torch.inference_mode()
def round_weights(model: Any, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Give the linears that a worker holds in FP8 the weights that the codes stand for. Returns them by name.

    `dtype` is that in which the worker reads the checkpoint.
    """
    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and module is not head and _EXPERTS not in name
    }
    found = {}
    for name, module in linears.items():
        in_features, _ = _sizes(module)
        if not weight_problem(in_features, _joint_outputs(name, linears)):
            weight: Any = module.weight
            by_output = weight.detach().T if type(module) is Conv1D else weight.detach()
            by_output.copy_(rounded(by_output.to(dtype).float()))
            found[name] = module
    return found


@contextmanager
def rounding_inputs(linears: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block these linears read rounded inputs, too."""
    hooks = [linear.register_forward_pre_hook(lambda _, args: (rounded(args[0]), *args[1:])) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the FP8 codes of the rows of x [..., n] stand for, float32."""
    return quantize_rows(x.reshape(-1, x.shape[-1])).float().view(x.shape)


def _sizes(module: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    return tuple(module.weight.shape) if type(module) is Conv1D else tuple(module.weight.shape)[::-1]  # type: ignore[return-value]


def _joint_outputs(name: str, linears: Mapping[str, nn.Module]) -> int:
    """Outputs of the linear, and of those that become one linear with it."""
    parent, _, own = name.rpartition(".")
    for names in (*QKV, *GATE_UP):
        joint = [f"{parent}.{other}" for other in names]
        if own in names and all(other in linears for other in joint):
            return sum(_sizes(linears[other])[1] for other in joint)
    return _sizes(linears[name])[1]

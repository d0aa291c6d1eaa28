"""Holds the linears of a loaded model in FP8, and finds the norms and gates that write FP8 inputs for them.

Head and embedding stay as they are. So do routers, the experts of a mixture, linears that adapters cannot target, and
those that a GPU cannot multiply in FP8: the log names them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from contract.packed_layout import is_narrow
from data_plane.errors import ConfigError
from data_plane.layers.fp8.activations import Fp8Activations
from data_plane.layers.fp8.weight import Fp8Weight
from data_plane.layers.gated_mlp import GatedMlp
from data_plane.layers.lora_linear import LoraLinear
from data_plane.layers.rms_norm import RmsNorm
from data_plane.models.mixtures.parts import is_stacked
from data_plane.models.probe import head_and_embedding
from kernels.fp8 import Fp8Rows
from kernels.fp8_linear import size_problem
from kernels.fp8_rows import quantize_rows

logger = logging.getLogger(__name__)


@torch.inference_mode()
def quantize_linears(model: PreTrainedModel, run: Callable[[], object]) -> None:
    """Hold the weights of all LoraLinears in FP8. The log names what stays as it is. The head must not be one yet.

    `run` computes a pass of a few tokens. Raises ConfigError for a model without a linear that can be in FP8.
    """
    activations, left = Fp8Activations(), dict[str, list[str]]()
    num_linears = 0
    head, _ = head_and_embedding(model)
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            reason = weight_problem(module.in_features, module.out_features)
        elif is_stacked(module):
            reason = "experts"
        elif isinstance(module, nn.Linear) and name != head:
            reason = "no adapter can target them"
        else:
            continue
        if reason:
            left.setdefault(reason, []).append(name)
        elif isinstance(module, LoraLinear):
            module.quantize_weight(activations)
            num_linears += 1
    reasons = "; ".join(f"{reason}: {', '.join(_paths(names))}" for reason, names in left.items())
    if not num_linears:
        raise ConfigError(f"--quantization fp8: no linear can be in FP8 ({reasons}); give --quantization none")
    num_writers = _place_writers(model, activations, run)
    logger.info("weights in FP8 linears=%d written_by_norms_and_gates=%d", num_linears, num_writers)
    if left:
        logger.warning("not in FP8, although --quantization fp8 is given: %s", reasons)


def weight_problem(in_features: int, out_features: int) -> str:
    """Why a linear of these sizes, or several that were joined, stays as it is; empty: it does not."""
    if is_narrow(in_features, out_features):
        return "outputs narrow beside the inputs, as a router's"
    return size_problem(out_features, in_features)


def _place_writers(model: PreTrainedModel, activations: Fp8Activations, run: Callable[[], object]) -> int:
    """Let each norm and gate write FP8 rows if a linear reads them. Returns how many do.

    In one pass all write. Who is read by a linear goes on, if the rows are still those of the tensor when it is read:
    a model's code may change a norm's result in place.
    """
    writers = [module for module in model.modules() if isinstance(module, RmsNorm)]
    gates = [module for module in model.modules() if isinstance(module, GatedMlp)]
    read, changed = set[int](), set[int]()

    def note(writer: object, x: torch.Tensor, rows: Fp8Rows) -> None:
        expected = quantize_rows(x.reshape(-1, x.shape[-1]))
        is_same = torch.equal(rows.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        (read if is_same and torch.equal(rows.scales, expected.scales) else changed).add(id(writer))

    everyone: list[RmsNorm | GatedMlp] = [*writers, *(gate for gate in gates if _is_fp8(gate.down_proj))]
    for writer in everyone:
        writer.fp8 = activations
    activations.on_read = note
    try:
        run()
    finally:
        activations.on_read = None
        activations.forget()
    for writer in everyone:
        if id(writer) not in read or id(writer) in changed:
            writer.fp8 = None
    return sum(writer.fp8 is not None for writer in everyone)


def _is_fp8(module: nn.Module) -> bool:
    return isinstance(module, LoraLinear) and isinstance(module.packed, Fp8Weight)


def _paths(names: list[str]) -> list[str]:
    """The names, those of all layers as one with a * for the layer's number."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))

"""Which mixtures of experts take adapters: those whose routers and experts are proven to compute what ours do."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from data_plane.layers.context import StepContext
from data_plane.layers.lora_experts import LoraExperts
from data_plane.layers.lora_linear import replace_module
from data_plane.layers.lora_router import LoraRouter, router_problem
from data_plane.models.fused_parts import relative_error
from data_plane.models.mixtures.parts import is_router, is_stacked
from data_plane.models.probe import NUM_TOKENS
from data_plane.plan import TargetKind, TargetModule

logger = logging.getLogger(__name__)

# Largest relative error of a token. Both use the same products; the sum over a token's experts may have another order.
_ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def mixture_targets(module: nn.Module, name: str, *, reason: str) -> list[TargetModule] | None:
    """The target modules of a router or of a layer's experts, or None for another module.

    reason: why the module takes no adapters whatever it computes; empty: that is still to be found out.
    """
    if is_router(module):
        experts, hidden = next(module.parameters(recurse=False)).shape
        return [TargetModule(name, TargetKind.ROUTER, hidden, experts, reason or router_problem(module))]
    if not is_stacked(module) or reason:
        return None
    try:
        experts_with_lora = LoraExperts(module, name, StepContext())
        is_same = _is_same(experts_with_lora, module)
    except Exception as error:
        logger.info("experts take no adapters name=%s error=%s: %s", name, type(error).__name__, error)
        return None
    return experts_with_lora.targets if is_same else None


def add_adapters(model: nn.Module, routers: Collection[str], experts: Collection[str], context: StepContext) -> None:
    """Let adapters add to these routers, and to the experts of these target names."""
    for name in routers:
        LoraRouter.attach(model.get_submodule(name), name, context)
    for name in dict.fromkeys(target.partition(".*.")[0] for target in experts):
        lora = LoraExperts(model.get_submodule(name), name, context)
        lora.pack_weights()
        replace_module(model, name, lora)


@torch.no_grad()
def _is_same(ours: LoraExperts, theirs: nn.Module) -> bool:
    """Whether both give the same for random rows, some experts chosen by many rows and some by none."""
    weight: Any = ours.experts.down_proj
    hidden = ours.targets[-1].out_features
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_TOKENS, hidden, generator=generator).to(weight.device, weight.dtype)
    num_top_k = min(2, ours.num_experts)
    chosen = torch.stack([torch.randperm(ours.num_experts, generator=generator)[:num_top_k] for _ in x])
    chosen[: NUM_TOKENS // 2] = chosen[0]
    weights = torch.rand(NUM_TOKENS, num_top_k, generator=generator).to(weight.device, weight.dtype)
    arguments = (chosen.to(weight.device), weights)
    error = relative_error(ours(x.clone(), *arguments).float(), theirs(x.clone(), *arguments).float())
    return bool(error <= _ERROR[weight.dtype])

"""Puts one DecoderStack in the place of a model's decoder layers where all of them are of the fused shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from data_plane.layers.context import StepContext
from data_plane.layers.decoder_layer import DecoderLayer
from data_plane.layers.decoder_stack import DecoderStack, SkippedLayer
from data_plane.layers.rotary_attention import RotaryAttention
from data_plane.models.direct_forward import DirectForward
from data_plane.models.model_probe import ModelProbe

_NUM_TOKENS = 3


@dataclass(frozen=True, slots=True)
class StackedLayers:
    """The stack of a model, and the inputs of its layers."""

    stack: DecoderStack
    rotary_half: int  # columns of the tables that heads are turned by
    direct: DirectForward | None  # the rest of the forward pass


@torch.inference_mode()
def stack_layers(model: PreTrainedModel, probe: ModelProbe, context: StepContext) -> StackedLayers | None:
    """Stack the layers. Returns None, and changes nothing, if a layer has another shape.

    The attentions must still be the probe's, without a cache.
    """
    attentions = {id(layer.module) for layer in probe.attention_layers}
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        layers = [layer for layer in module if isinstance(layer, DecoderLayer)]
        if len(layers) != len(module) or {id(layer.self_attn) for layer in layers} != attentions:
            continue
        if not all(isinstance(layer.self_attn, RotaryAttention) for layer in layers):
            return None
        last_norm = layers[-1].following
        tables = _shared_tables(model, layers)
        if last_norm is None or tables is None:
            return None
        stack = DecoderStack(layers, last_norm, context)
        module[0] = stack
        for index in range(1, len(module)):
            module[index] = SkippedLayer()
        return StackedLayers(stack, tables[0].shape[-1] // 2, DirectForward.of(model, stack))
    return None


def _shared_tables(model: PreTrainedModel, layers: list[DecoderLayer]) -> tuple[torch.Tensor, ...] | None:
    """The tables that all layers of a pass receive, None if they differ."""
    seen: list[Any] = []

    def watch(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("position_embeddings"))

    hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    try:
        numbers = torch.arange(_NUM_TOKENS)[None]
        model(input_ids=numbers, position_ids=numbers, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    is_shared = isinstance(seen[0], tuple) and len(seen) == len(layers) and all(item is seen[0] for item in seen)
    return seen[0] if is_shared else None

"""Replaces parts of a loaded decoder by fused layers, which need fewer passes over memory, after proving each.

Norms, attentions and MLPs are proven one by one (fused_parts.py), then whole decoder layers with these parts in place,
then the logits of the model. A part of any other shape stays as transformers made it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from data_plane.layers.context import StepContext
from data_plane.layers.decoder_layer import DecoderLayer
from data_plane.layers.gated_mlp import GatedMlp
from data_plane.layers.lora_linear import replace_module
from data_plane.layers.rms_norm import RmsNorm
from data_plane.layers.rotary_attention import RotaryAttention
from data_plane.models.fused_parts import fused_attention, fused_mlp, fused_norm, random_rows, relative_error
from data_plane.models.model_probe import ModelProbe
from data_plane.models.probe import Recorder, register_probe, run_probe

logger = logging.getLogger(__name__)

Part = TypeVar("Part", bound=nn.Module)

# Largest relative error of a layer, and of a model with its layers replaced. The parts and their roundings are the
# same, so that only the last bits may differ.
LAYER_ERROR = 1e-3

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


@torch.inference_mode()
def fuse_model(model: PreTrainedModel, probe: ModelProbe, context: StepContext, max_model_len: int) -> ModelProbe:
    """Put fused layers into a model that runs under PROBE_NAME. Returns the probe of the changed model.

    The returned probe's `linear_names` lists the linears that are still transformers' own. Positions up to
    max_model_len are tried, so that position-dependent differences show. The given probe is used up: its
    attention_layers are emptied one by one, so that only one attention has its weights twice at a time.
    """
    last = max_model_len - 1
    positions = torch.tensor([0, 1, last // 2, last - 1, last]).clamp(min=0)
    names = {id(module): name for name, module in model.named_modules()}
    attention_names = [names[id(layer.module)] for layer in probe.attention_layers]
    layer_names = [name.rpartition(".")[0] for name in attention_names]
    recorder, kwargs = _watched_probe(model, positions, {*attention_names, *layer_names})
    free = set(probe.linear_names)
    assert len(recorder.calls) == len(probe.attention_layers), "an attention was called more than once"
    attention_layers = []
    for name in attention_names:
        layer, call = probe.attention_layers.pop(0), recorder.calls.pop(0)
        fused = _tried(name, fused_attention, layer.module, name, call, kwargs.get(name, {}), free, context)
        if fused is not None:
            free -= set(fused.qkv.target_names)
            replace_module(model, name, fused)
            layer = replace(layer, module=fused)
        attention_layers.append(layer)
    for name in layer_names:
        _fuse_norms_and_mlps(model, name, free, context)
    last_norm = _last_norm(model, layer_names)
    plain = {name: model.get_submodule(name) for name in layer_names}
    _, expected = run_probe(model, positions)
    num_layers = _fuse_layers(model, layer_names, kwargs, last_norm)
    _, actual = run_probe(model, positions)
    error = relative_error(actual, expected)
    if num_layers and error > LAYER_ERROR:
        logger.warning("layers stay as they are, the model uses what they change in place error=%.1e", error)
        for name, module in plain.items():
            replace_module(model, name, module)
        num_layers = 0
    logger.info(
        "layers fused attentions=%d mlps=%d layers=%d",
        sum(isinstance(module, RotaryAttention) for module in model.modules()),
        sum(isinstance(module, GatedMlp) for module in model.modules()),
        num_layers,
    )
    return replace(
        probe,
        attention_layers=attention_layers,
        linear_names=[name for name in probe.linear_names if name in free],
    )


def _watched_probe(
    model: PreTrainedModel, positions: torch.Tensor, names: Collection[str]
) -> tuple[Recorder, dict[str, dict[str, Any]]]:
    """A probing pass, and the keyword arguments of the named modules, without hidden_states."""
    seen: dict[str, dict[str, Any]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(args) + ("hidden_states" in kwargs) == 1:
                seen[name] = {key: value for key, value in kwargs.items() if key != "hidden_states"}

        return hook

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(watch(name), with_kwargs=True) for name in sorted(names)
    ]
    try:
        recorder, _ = run_probe(model, positions)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder, seen


def _fuse_norms_and_mlps(model: nn.Module, layer_name: str, free: set[str], context: StepContext) -> None:
    """Replace the layer's norms that can be fused, and every MLP below the layer whose linears are `free`."""
    layer = model.get_submodule(layer_name)
    for child_name, child in list(layer.named_children()):
        norm = _tried(f"{layer_name}.{child_name}", fused_norm, child)
        if norm is not None:
            setattr(layer, child_name, norm)
    for name, module in list(layer.named_modules(prefix=layer_name)):
        mlp = _tried(name, fused_mlp, module, name, free, context)
        if mlp is not None:
            free -= set(mlp.gate_up.target_names)
            replace_module(model, name, mlp)


def _fuse_layers(
    model: nn.Module, layer_names: list[str], kwargs: Mapping[str, dict[str, Any]], last_norm: RmsNorm | None
) -> int:
    """Replace the layers of the common shape. Returns how many."""
    fused: dict[int, DecoderLayer] = {}
    for index, name in enumerate(layer_names):
        layer = _tried(name, _fused_layer, model.get_submodule(name), kwargs.get(name))
        if layer is not None:
            fused[index] = layer
            replace_module(model, name, layer)
    for index, layer in fused.items():
        following = fused.get(index + 1)
        if following is not None:
            layer.precede(following.input_layernorm)
        elif index == len(layer_names) - 1 and last_norm is not None:
            layer.precede(last_norm)
    return len(fused)


def _fused_layer(plain: nn.Module, kwargs: dict[str, Any] | None) -> DecoderLayer | None:
    """A DecoderLayer with the parts of the plain layer, or None if its output differs."""
    # A dropout does nothing outside of training.
    parts: dict[str, Any] = {child: part for child, part in plain.named_children() if not isinstance(part, nn.Dropout)}
    if parts.keys() != _LAYER_PARTS or kwargs is None:
        return None
    norm, other = parts["input_layernorm"], parts["post_attention_layernorm"]
    if not isinstance(norm, RmsNorm) or not isinstance(other, RmsNorm):
        return None
    layer = DecoderLayer(**parts)
    x = random_rows(len(norm.weight), norm.weight.device).to(norm.weight.dtype)
    expected = plain(x.clone(), **kwargs)
    is_same = isinstance(expected, torch.Tensor) and relative_error(layer(x, **kwargs), expected) <= LAYER_ERROR
    return layer if is_same else None


def _last_norm(model: nn.Module, layer_names: list[str]) -> RmsNorm | None:
    """The norm after the last layer, replaced by a fused norm if it can be."""
    decoder_name = layer_names[-1].rpartition(".")[0].rpartition(".")[0]
    decoder = model.get_submodule(decoder_name)
    norm = _tried(f"{decoder_name}.norm", fused_norm, getattr(decoder, "norm", None))
    if norm is not None:
        decoder.norm = norm
    return norm


def _tried(name: str, build: Callable[..., Part | None], *arguments: Any) -> Part | None:
    """The result of `build`, None if it raises: a part that cannot run alone does not have the common shape."""
    register_probe(Recorder())
    try:
        return build(*arguments)
    except Exception as error:
        logger.info("part stays as it is name=%s error=%s: %s", name, type(error).__name__, error)
        return None

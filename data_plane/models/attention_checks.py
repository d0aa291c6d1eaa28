"""Refuses a model whose attention is not the one that we compute in its place.

1. Every decoder layer calls transformers' attention interface once. Other mixers and own attention code do not.
2. Every layer's mask is causal within the sliding window that the layer passes to attention.
3. No argument that we do not compute, such as a position bias, is passed to attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from data_plane.errors import UnsupportedModel
from data_plane.models.packing import ProbePass, thresholds_of
from data_plane.models.probe import COMPUTED, Call, MaskRule, Recorder

# Arguments beside the tensors that do not change attention's result at inference.
_HARMLESS = {
    "dropout",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "head_mask",
    "layer_idx",
    "num_items_in_batch",
}


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention module of a model, as it is called."""

    module: nn.Module
    num_kv_heads: int
    key_dim: int
    value_dim: int


class MaskDiffers(UnsupportedModel):
    """A mask differs from ours. `agreeing_length`: the longest context in tokens for which they agree; 0: none."""

    def __init__(self, message: str, agreeing_length: int) -> None:
        super().__init__(message)
        self.agreeing_length = agreeing_length


def check_attention(model: PreTrainedModel, request: ProbePass, max_model_len: int) -> list[AttentionLayer]:
    """The attention layers of a model that ran `request`. Raises UnsupportedModel; MaskDiffers if only a mask differs.

    The masks' rules are compared at positions below max_model_len.
    """
    model_type = str(model.config.model_type)
    layers = _attention_layers(model_type, model.config.get_text_config().num_hidden_layers, request)
    for call in request.recorder.calls:
        _check_arguments(model_type, call)
    thresholds = thresholds_of(model.config, max_model_len)
    seen = set()
    for call in request.recorder.calls:
        window = call.kwargs.get("sliding_window")
        if call.mask is not None and (id(call.mask), window) not in seen:
            seen.add((id(call.mask), window))
            points = _points(thresholds if window is None else [*thresholds, window], max_model_len)
            _check_mask(model_type, _rule_of(model_type, call.mask, request.recorder), window, points)
    return layers


def _attention_layers(model_type: str, num_layers: int, request: ProbePass) -> list[AttentionLayer]:
    """Case 1: as many calls as layers, each from a module of its own."""
    calls, num_tokens = request.recorder.calls, len(request.positions)
    modules = {id(call.module) for call in calls}
    if len(calls) != num_layers or len(modules) != num_layers:
        raise UnsupportedModel(
            f"model type {model_type}: {len(modules)} of {num_layers} layers call transformers' attention interface "
            f"({len(calls)} calls); models with attention of their own, as many with ALiBi, or with other mixers, such "
            "as recurrent or convolutional layers, are not served"
        )
    layers = []
    for call in calls:
        tokens = (call.query.shape[2], call.key.shape[2], call.value.shape[2])
        if tokens != (num_tokens,) * 3:
            raise UnsupportedModel(
                f"model type {model_type}: attention got {tokens} tokens of query, key, value for {num_tokens}; a "
                "model that compresses or extends its keys is not served"
            )
        layers.append(AttentionLayer(call.module, call.key.shape[1], call.key.shape[3], call.value.shape[3]))
    return layers


def _check_arguments(model_type: str, call: Call) -> None:
    """Case 3."""
    for name, value in call.kwargs.items():
        if name in _HARMLESS or name in COMPUTED or value is None or value is False:
            continue
        if name == "is_causal" and value is True:
            continue
        raise UnsupportedModel(
            f"model type {model_type}: attention is passed {name!r}, which is not computed here: it is not served"
        )
    if call.kwargs.get("is_causal", getattr(call.module, "is_causal", True)) is False:
        raise UnsupportedModel(f"model type {model_type}: a layer's attention is not causal; the model is not served")


def _rule_of(model_type: str, mask: torch.Tensor, recorder: Recorder) -> MaskRule:
    rule = recorder.rule_of(mask)
    if rule is None:
        raise UnsupportedModel(
            f"model type {model_type}: a layer makes an attention mask of its own, which cannot be paged; the model is "
            "not served"
        )
    return rule


def _points(thresholds: list[int], max_model_len: int) -> list[int]:
    """Positions below max_model_len where a rule may change."""
    points = {0, 1, 2, 3, 5, max_model_len - 1}
    points |= {1 << power for power in range(max_model_len.bit_length())}
    points |= {threshold + step for threshold in thresholds for step in (-1, 0, 1)}
    return sorted(point for point in points if 0 <= point < max_model_len)


def _check_mask(model_type: str, rule: MaskRule, window: int | None, points: list[int]) -> None:
    """Case 2: the rule is compared with ours for queries at the points, and keys at and at the distance of points."""
    edges = torch.tensor(points)
    query = edges.repeat_interleave(len(edges))
    key = torch.cat([edges.repeat(len(edges)), query - edges.repeat(len(edges))]).clamp_(min=0)
    query = query.repeat(2)
    expected = key <= query
    if window is not None:
        expected &= query - key < window
    zero = torch.zeros((), dtype=torch.int64)
    try:
        actual = torch.as_tensor(rule(zero, zero, query, key)).expand_as(expected).cpu()
    except (IndexError, RuntimeError) as error:
        raise UnsupportedModel(
            f"model type {model_type}: a layer's mask follows the tokens of the batch and not their positions alone; "
            "the model is not served"
        ) from error
    wrong = actual != expected
    if wrong.any():
        at = int(query.where(wrong, query.max() + 1).argmin())
        agreeing = [point for point in points if point < int(query[at])]
        raise MaskDiffers(
            f"model type {model_type}: a layer's mask lets position {int(query[at])} "
            f"{'see' if actual[at] else 'not see'} position {int(key[at])}, which causal attention "
            f"{'' if window is None else f'in a window of {window} tokens '}does otherwise",
            agreeing[-1] + 1 if agreeing else 0,
        )

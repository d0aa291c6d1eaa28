"""Decides by a few short forward passes whether a loaded model can be served, and which modules take adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from data_plane.errors import UnsupportedModel
from data_plane.models.attention_checks import AttentionLayer, MaskDiffers, check_attention
from data_plane.models.packing import begin_request, check_packing
from data_plane.models.target_modules import find_targets
from data_plane.plan import TargetKind, TargetModule


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """What the engine needs to know of a model."""

    attention_layers: list[AttentionLayer]
    linear_names: list[str]  # linears that see every token of a step once, in the order of their calls
    vocab_size: int
    head_name: str | None  # the head, if it takes adapters
    embedding_name: str | None  # the embedding, if it takes adapters
    router_names: list[str]  # routers that take adapters
    expert_names: list[str]  # products of experts that take adapters, each for all experts of a layer
    targets: list[TargetModule]  # these, and the modules that take no adapters
    hidden_width: int  # of the last hidden state; 0: it cannot be read


@torch.inference_mode()
def probe_model(model: PreTrainedModel, max_model_len: int, max_step_tokens: int) -> ModelProbe:
    """Probe a model that was loaded with attention PROBE_NAME, for contexts up to max_model_len tokens.

    A step computes at most max_step_tokens of them.

    Raises UnsupportedModel with the reason, which names a shorter context if that could be served.
    """
    with watching_hidden(model) as hidden:
        request = begin_request(model, max_model_len)
    try:
        layers = check_attention(model, request, max_model_len)
    except MaskDiffers as error:
        if error.agreeing_length < 2:
            raise UnsupportedModel(f"{error}; the model is not served") from error
        check_packing(model, request, error.agreeing_length, max_step_tokens)  # else it is refused for what stays
        raise UnsupportedModel(f"{error}; lower --max-model-len to {error.agreeing_length}") from error
    passes = check_packing(model, request, max_model_len, max_step_tokens)
    targets = find_targets(model, request, passes)
    served = {
        kind: [target.name for target in targets if target.kind is kind and not target.reason] for kind in TargetKind
    }
    return ModelProbe(
        layers,
        served[TargetKind.LINEAR],
        passes.packed.logits.shape[-1],
        head_name=next(iter(served[TargetKind.HEAD]), None),
        embedding_name=next(iter(served[TargetKind.EMBEDDING]), None),
        router_names=served[TargetKind.ROUTER],
        expert_names=served[TargetKind.EXPERT],
        targets=targets,
        hidden_width=hidden[-1].shape[-1] if hidden else 0,
    )


@contextmanager
def watching_hidden(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """A list whose last entry is the last hidden states [1, num_tokens, width] of the latest pass within the block.

    They are what transformers' AutoModel returns of the same checkpoint, after the last norm. The model without its
    head is a module of its own: `base_model`, or the decoder in it if the pass calls just that. Else the list stays
    empty.
    """
    found: list[torch.Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        hidden = output[0]
        if isinstance(hidden, torch.Tensor) and hidden.dim() == 3:
            found.append(hidden)

    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    bodies = {id(body): body for body in (model.base_model, decoder) if body is not model}
    # The outer body's pass ends last, so its output is the last entry.
    hooks = [body.register_forward_hook(keep) for body in bodies.values() if isinstance(body, nn.Module)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()

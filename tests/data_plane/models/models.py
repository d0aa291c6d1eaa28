"""Small models in memory, as the probe sees a loaded one, and whole configurations of types that are served or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from data_plane.models.probe import PROBE_NAME, Recorder, register_probe

MAX_STEP_TOKENS = 1024
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def make_model(model_type: str = "llama", **settings: Any) -> PreTrainedModel:
    """A random model of any type under the probe's attention."""
    torch.manual_seed(0)
    register_probe(Recorder())
    config = AutoConfig.for_model(model_type, **(SIZES | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME)
    for parameter in model.parameters():
        # Weights of unit gain, so that every part counts; a norm's near one.
        nn.init.normal_(parameter, parameter.dim() == 1, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    assert isinstance(model, PreTrainedModel)
    return model.eval().requires_grad_(False)


class Changed(nn.Module):
    """A module whose output, or input, goes through a function first."""

    def __init__(self, inner: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], *, at_input: bool) -> None:
        super().__init__()
        self.inner, self.change, self.at_input = inner, change, at_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(self.change(x)) if self.at_input else self.change(self.inner(x))
        return output


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model in another dtype. transformers' own `to` has the type of a plain function."""
    return nn.Module.to(model, dtype)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor], *, at_input: bool = False) -> PreTrainedModel:
    """A llama of which one module is changed."""
    model = make_model()
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, Changed(model.get_submodule(name), change, at_input=at_input))
    return model

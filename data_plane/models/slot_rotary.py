"""A model's rotary embedding where some tokens of a step rotate as a long-context adapter was trained.

The tables of such tokens are made by transformers' own code from the model's configuration with the adapter's
parameters. All other tokens have the bits of the model's tables.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from contract.rope_scaling import RopeScaling
from data_plane.adapters.arena.rotary import RotaryTables
from data_plane.layers.context import StepContext

_NAME = "rotary_emb"
_KEPT = ("rope_theta", "partial_rotary_factor")  # of the model's parameters, where the adapter names no other


class SlotRotary(nn.Module):
    """Replaces the rotary embedding of a model."""

    def __init__(self, inner: nn.Module, config: PretrainedConfig, context: StepContext) -> None:
        super().__init__()
        self.inner = inner
        self._config = config
        self._context = context
        self._lock = threading.Lock()
        self._tables: dict[tuple[Any, ...], nn.Module] = {}  # by parameters

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of the replaced module; tokens whose adapter has tables of its own get rows of these."""
        cos, sin = self.inner(x, position_ids, *args, **kwargs)
        lora = self._context.lora
        if lora is None or not lora.rotations:
            return cos, sin
        cos, sin = cos.clone(), sin.clone()
        for tables, tokens in lora.rotations:
            own_cos, own_sin = tables(x[:, tokens], position_ids[:, tokens])
            cos[:, tokens], sin[:, tokens] = own_cos, own_sin
        return cos, sin

    def scaled(self, scaling: RopeScaling) -> RotaryTables:
        """See Rotary."""
        with self._lock:
            if scaling.parameters not in self._tables:
                self._tables[scaling.parameters] = self._make(scaling)
            return self._tables[scaling.parameters]

    def _make(self, scaling: RopeScaling) -> nn.Module:
        own = getattr(self._config, "rope_parameters", None) or {}
        if any(isinstance(value, dict) for value in own.values()):
            raise ValueError("layers of the model rotate in several ways, which cannot be scaled")
        config = copy.deepcopy(self._config)
        config.rope_parameters = {name: own[name] for name in _KEPT if name in own} | dict(scaling.parameters)
        device = next(iter(self.inner.buffers())).device
        kind: Any = type(self.inner)
        try:
            tables: nn.Module = kind(config=config).to(device).eval()
        except Exception as error:  # transformers' code over an adapter's values
            raise ValueError(f"the model's rotary embedding cannot be made so: {error}") from error
        return tables


def replace_rotary(model: PreTrainedModel, context: StepContext) -> SlotRotary | None:
    """Put a SlotRotary into the model; None if the model has no rotary embedding for all its layers."""
    inner = rotary_of(model)
    if inner is None:
        return None
    rotary = SlotRotary(inner, model.config.get_text_config(), context)
    setattr(model.base_model, _NAME, rotary)
    return rotary


def rotary_of(model: PreTrainedModel) -> nn.Module | None:
    """The one rotary embedding of all layers; None if the model has no such."""
    inner = getattr(model.base_model, _NAME, None)
    named = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == _NAME]
    return inner if len(named) == 1 and isinstance(inner, nn.Module) and list(inner.buffers()) else None

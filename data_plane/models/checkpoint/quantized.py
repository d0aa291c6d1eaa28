"""Reads a quantised checkpoint into a plain transformers model: every weight is dequantised on the way."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from contract.checkpoints.quantization import (
    BITS_4,
    BITS_8,
    FLOAT8_SCALED,
    KEY,
    STATE_ENDS,
    CheckpointQuantization,
    NotServed,
    read_quantization,
)
from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.models.checkpoint.dequantize import from_4_bits, from_float8, from_int8
from data_plane.models.checkpoint.shards import Shard, shards_of

_PARTS_OF_4_BITS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_SCALES = ("_scale_inv", "_scale")  # after the name of a float8 weight
# Of activations, caches and layouts: what is stored of a weight does not depend on them.
_LEFT_OUT = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale", ".weight_format")


def quantization_of(config: PretrainedConfig) -> CheckpointQuantization | None:
    """How the checkpoint is quantised; None: not at all. Raises UnsupportedModel."""
    given: Any = getattr(config, KEY, None) or getattr(config.get_text_config(), KEY, None)
    try:
        return read_quantization({KEY: given.to_dict() if hasattr(given, "to_dict") else given})
    except NotServed as refusal:
        raise UnsupportedModel(f"config.json: {refusal}") from refusal


def read_dequantized(
    model_dir: Path, config: PretrainedConfig, how: CheckpointQuantization, dtype: torch.dtype, **arguments: Any
) -> Any:
    """What `from_pretrained` returns with these arguments for the weights in `dtype`. Raises ConfigError."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        if hasattr(part, KEY):
            delattr(part, KEY)
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    state = dequantized_tensors(model_dir, how, dtype)
    return model_class.from_pretrained(None, config=plain, state_dict=state, dtype=dtype, **arguments)


def dequantized_tensors(model_dir: Path, how: CheckpointQuantization, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights by their names in the checkpoint: quantised ones in `dtype`, others as they are."""
    shard_of: dict[str, Shard] = {}
    for shard in shards_of(model_dir):
        shard_of |= {tensor.name: shard for tensor in shard.tensors}
    reader = _Reader(shard_of, how)
    found: dict[str, torch.Tensor] = {}
    for name in shard_of:
        if name in reader.taken or name.endswith(_LEFT_OUT):
            continue
        quantized = reader.read(name)
        found[name] = shard_of[name].read(name) if quantized is None else quantized.to(dtype)
    for name in reader.taken & found.keys():
        del found[name]  # it lies before the weight that it belongs to
    return found


class _Reader:
    """Dequantises one weight at a time."""

    def __init__(self, shard_of: Mapping[str, Shard], how: CheckpointQuantization) -> None:
        self._shard_of = shard_of
        self._how = how
        self.taken: set[str] = set()  # tensors that were read for a weight

    def read(self, name: str) -> torch.Tensor | None:
        """The weight of that name; None for a tensor that does not belong to one."""
        if self._how.form == BITS_4:
            state = next((name + end for end in STATE_ENDS if name + end in self._shard_of), None)
            if state is None:
                return None
            beside = {part: self._take(f"{name}.{part}") for part in _PARTS_OF_4_BITS if self._has(f"{name}.{part}")}
            return from_4_bits(name, self._take(name), beside, self._take(state))
        if self._how.form == BITS_8:
            factors = f"{name.removesuffix('weight')}SCB"
            if not (name.endswith(".weight") and self._has(factors)):
                return None
            return from_int8(name, self._take(name), self._take(factors))
        of_scale = next((name + end for end in _SCALES if self._has(name + end)), None)
        if of_scale is None or name.endswith(_SCALES):
            return None
        codes, scale = self._take(name), self._take(of_scale)
        if codes.dtype != torch.float8_e4m3fn:
            raise ConfigError(f"{name} is of type {codes.dtype} beside a scale; float8_e4m3fn is expected")
        weight = from_float8(name, codes, scale, self._how.block_size)
        # compressed-tensors multiplies in the dtype of the scales.
        return weight.to(scale.dtype) if self._how.form == FLOAT8_SCALED else weight

    def _has(self, name: str) -> bool:
        return name in self._shard_of

    def _take(self, name: str) -> torch.Tensor:
        if not name.endswith(".weight"):
            self.taken.add(name)
        return self._shard_of[name].read(name)

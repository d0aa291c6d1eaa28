"""Weights of quantised checkpoints as floats: the values that the adapters on them were trained on.

bitsandbytes, 4 bits: two values in a byte, the first in its upper half. Each is an index into a map of 16 values; 64 or
so values in a row share a factor, "absmax". Double quantisation stores the factors as indices likewise, less their
mean. int8: a row is codes times its factor over 127. FP8: float8_e4m3fn times the scale of a block, a row or a tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from data_plane.errors import ConfigError

_FLOATS = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
_INT8_LARGEST = 127.0


def from_4_bits(
    name: str, packed: torch.Tensor, beside: Mapping[str, torch.Tensor], state: torch.Tensor
) -> torch.Tensor:
    """[out, in] in the dtype that the weight had before. Raises ConfigError.

    `beside` has the tensors after the weight's name: absmax, quant_map, nested_absmax, nested_quant_map. `state` is
    the JSON that bitsandbytes writes, as bytes.
    """
    described = _state_of(name, state)
    shape, dtype = tuple(map(int, described["shape"])), _FLOATS.get(str(described["dtype"]))
    if dtype is None:
        raise ConfigError(f"{name}: quant_state.dtype is {described['dtype']!r}; floats are expected")
    absmax = _tensor(name, beside, "absmax")
    if "nested_absmax" in beside:
        factors = _tensor(name, beside, "nested_quant_map").float()[absmax.long()]
        shared = _tensor(name, beside, "nested_absmax").float()
        size = int(described["nested_blocksize"])
        absmax = factors * shared.repeat_interleave(size)[: len(factors)] + float(described["nested_offset"])
    count, block = math.prod(shape), int(described["blocksize"])
    codes = packed.contiguous().view(torch.uint8).flatten()
    if len(codes) != -(-count // 2) or len(absmax) != -(-count // block):
        raise ConfigError(f"{name}: {len(codes)} bytes and {len(absmax)} factors do not fit its shape {list(shape)}")
    values = _tensor(name, beside, "quant_map").float()
    # A byte is two values: one look-up for both.
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
    flat = pairs[codes.int()].flatten()[:count]
    padded = torch.nn.functional.pad(flat, (0, len(absmax) * block - count))
    scaled = padded.view(-1, block) * absmax.float().unsqueeze(1)
    return scaled.flatten()[:count].view(shape).to(dtype)


def from_int8(name: str, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """float32 [out, in]. Raises ConfigError."""
    if codes.dim() != 2 or factors.shape != codes.shape[:1]:
        raise ConfigError(f"{name}: SCB has the shape {list(factors.shape)}, the weight {list(codes.shape)}")
    return codes.float() * factors.float().unsqueeze(1) * (1 / _INT8_LARGEST)


def from_float8(
    name: str, codes: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, int] | None
) -> torch.Tensor:
    """float32 [..., out, in]. One scale, one for each output, or one for each block. Raises ConfigError."""
    weight, factors = codes.float(), scale.float()
    if factors.numel() == 1:
        return weight * factors.reshape(())
    rows, columns = weight.shape[-2:]
    if factors.shape in ((rows,), (*weight.shape[:-1], 1)):
        return weight * factors.reshape(*weight.shape[:-1], 1)
    if block_size is not None and factors.shape == (
        *weight.shape[:-2],
        -(-rows // block_size[0]),
        -(-columns // block_size[1]),
    ):
        spread = factors.repeat_interleave(block_size[0], -2).repeat_interleave(block_size[1], -1)
        return weight * spread[..., :rows, :columns]
    raise ConfigError(f"{name}: scales of the shape {list(scale.shape)} do not fit {list(codes.shape)}")


def _state_of(name: str, state: torch.Tensor) -> dict[str, Any]:
    try:
        described: dict[str, Any] = json.loads(bytes(state.flatten().tolist()))
        if not {"shape", "dtype", "blocksize"} <= described.keys() or int(described["blocksize"]) < 1:
            raise ValueError("fields are missing")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: quant_state cannot be read: {error}; download the checkpoint again") from error
    return described


def _tensor(name: str, beside: Mapping[str, torch.Tensor], part: str) -> torch.Tensor:
    if part not in beside:
        raise ConfigError(f"{name}.{part} is missing; download the checkpoint again")
    return beside[part]

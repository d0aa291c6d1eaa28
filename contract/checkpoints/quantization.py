"""Which quantised checkpoints are served, by `quantization_config` of config.json. Both server sides go by this.

Their weights are brought to the serving dtype when they are loaded, so that an adapter acts on the values that it was
trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BITS_4, BITS_8, FLOAT8_BLOCKS, FLOAT8_SCALED = "bitsandbytes 4-bit", "bitsandbytes int8", "fp8", "compressed-tensors"
KEY = "quantization_config"
# Tensors beside a 4-bit weight of this name: `weight` + end. The last has the shape, as JSON.
STATE_ENDS = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
MAX_STATE_BYTES = 4096
TWICE_QUANTIZED = (
    "the checkpoint is quantised already, and rounding its weights again would give adapters other weights than those "
    "that they were trained on; give --quantization none, or the unquantised checkpoint"
)
_NEXT = (
    "use the unquantised checkpoint, or one that bitsandbytes (NF4, FP4, int8) or FP8 (transformers' fp8, "
    "compressed-tensors' float-quantized) made of it"
)


class NotServed(ValueError):
    """A quantised checkpoint that is not served: the field, its value, and what to do."""


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How the linears of a checkpoint are stored."""

    form: str  # BITS_4, BITS_8, FLOAT8_BLOCKS or FLOAT8_SCALED
    block_size: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: by the scale's own shape


def read_quantization(config: Mapping[str, Any]) -> CheckpointQuantization | None:
    """How config.json says that the checkpoint is quantised; None if it is not. Raises NotServed."""
    text_config = config.get("text_config")
    given = config.get(KEY) or (text_config.get(KEY) if isinstance(text_config, Mapping) else None)
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise NotServed(f"{KEY} is {given!r:.60}; an object is expected")
    method = given.get("quant_method")
    if method is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"  # as early versions of transformers wrote it
    if method == "bitsandbytes":
        if given.get("load_in_4bit"):
            return CheckpointQuantization(BITS_4)
        if given.get("load_in_8bit"):
            return CheckpointQuantization(BITS_8)
        raise NotServed(f"{KEY}: bitsandbytes with neither load_in_4bit nor load_in_8bit; {_NEXT}")
    if method == "fp8":
        return CheckpointQuantization(FLOAT8_BLOCKS, _block_size(given.get("weight_block_size"), "weight_block_size"))
    if method == "compressed-tensors":
        return CheckpointQuantization(FLOAT8_SCALED, _compressed_block(given))
    raise NotServed(f"{KEY}.quant_method: checkpoints quantised with {method!r:.60} are not served; {_NEXT}")


def _compressed_block(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Of compressed-tensors: weights in float8 whose scales are for a tensor, a channel or a block."""
    written = given.get("format")
    if written != "float-quantized":
        raise NotServed(f"{KEY}.format: {written!r:.60} of compressed-tensors is not served; {_NEXT}")
    for name in ("sparsity_config", "transform_config"):
        if (given.get(name) or {}).get("format", "dense" if name == "sparsity_config" else None) not in (None, "dense"):
            raise NotServed(f"{KEY}.{name}: is not served; {_NEXT}")
    blocks: set[tuple[int, int] | None] = set()
    for name, group in sorted(dict(given.get("config_groups") or {}).items()):
        weights = group.get("weights") or {}
        strategy = weights.get("strategy")
        is_float8 = (weights.get("type"), weights.get("num_bits")) == ("float", 8)
        if not is_float8 or strategy not in ("tensor", "channel", "block") or weights.get("symmetric") is False:
            kind = f"{weights.get('num_bits')} bits of type {weights.get('type')!r:.30} with strategy {strategy!r:.30}"
            raise NotServed(
                f"{KEY}.config_groups.{name}.weights: {kind}; served are 8 bits of type 'float' with strategy tensor, "
                f"channel or block; {_NEXT}"
            )
        blocks.add(_block_size(weights.get("block_structure"), "block_structure") if strategy == "block" else None)
    if len(blocks) != 1:
        raise NotServed(f"{KEY}.config_groups: {len(blocks)} sizes of blocks, one is expected; {_NEXT}")
    return blocks.pop()


def _block_size(value: Any, field: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    raise NotServed(f"{KEY}.{field}: is {value!r:.60}; two positive numbers are expected")

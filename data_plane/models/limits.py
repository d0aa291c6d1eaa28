"""How long a context the model computes the same way in every batch."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PretrainedConfig

from data_plane.errors import ConfigError

logger = logging.getLogger(__name__)

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
# Rotary embeddings whose frequencies follow the longest position of the batch: beyond the original length one request
# would change the answers of its neighbours.
_BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")


def context_limit(config: PretrainedConfig) -> int:
    """Longest context in tokens. Raises ConfigError if the config names none."""
    text_config = config.get_text_config()
    limit = next((int(getattr(text_config, key)) for key in _LENGTH_KEYS if getattr(text_config, key, None)), None)
    if limit is None:
        raise ConfigError(f"config.json of model type {config.model_type} holds none of {', '.join(_LENGTH_KEYS)}")
    for rope in _rope_parameters(getattr(text_config, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if kind in _BATCH_DEPENDENT_ROPE and original is not None and int(original) < limit:
            logger.warning("context limited to the original length rope_type=%s tokens=%s", kind, original)
            limit = int(original)
    return limit


def model_length(asked: int | None, limit: int, num_blocks: int, block_size: int) -> int:
    """Longest context of this worker: what was asked, checked, or the lower of the model's and the KV cache's."""
    held = num_blocks * block_size
    if asked is None:
        return min(limit, held)
    if asked > limit:
        raise ConfigError(f"--max-model-len: {asked} is above the model's {limit} tokens")
    if asked > held:
        raise ConfigError(
            f"--max-model-len: {asked} is above the {held} tokens of {num_blocks} KV blocks; raise --num-blocks"
        )
    return asked


def _rope_parameters(parameters: Any) -> list[dict[str, Any]]:
    """The config's rotary settings: one for all layers, or one per kind of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]

"""How long a context the model computes the same way in every batch."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PretrainedConfig

from contract.context_length import config_context_length
from data_plane.errors import ConfigError

logger = logging.getLogger(__name__)

# Rotary embeddings whose frequencies depend on the longest position of the batch: beyond the original length one
# request would change the tokens of others in its batch.
_BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")


def context_limit(config: PretrainedConfig, max_model_len: int | None = None) -> int | None:
    """The model's longest context in tokens, or None if its configuration names none.

    Raises ConfigError if max_model_len is above the limit, or if the configuration's length is not valid.
    """
    text_config = config.get_text_config()
    try:
        limit = config_context_length(text_config.to_dict())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    reason = "the length in config.json"
    for rope in _rope_parameters(getattr(text_config, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if kind in _BATCH_DEPENDENT_ROPE and original is not None and (limit is None or int(original) < limit):
            logger.warning("context limited to the original length rope_type=%s tokens=%s", kind, original)
            limit = int(original)
            reason = f"the original length: beyond it the frequencies of {kind} rope follow the longest request"
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise ConfigError(
            f"--max-model-len: {max_model_len} is above {limit} tokens, {reason}; lower it or leave it out"
        )
    return limit


def model_length(max_model_len: int | None, limit: int, num_blocks: int, block_size: int) -> int:
    """Longest context of this worker: max_model_len, or the lower of the model's and the KV cache's limits.

    Raises ConfigError if max_model_len does not fit the KV cache.
    """
    held = num_blocks * block_size
    if max_model_len is None:
        return min(limit, held)
    if max_model_len > held:
        raise ConfigError(
            f"--max-model-len: {max_model_len} is above the {held} tokens of {num_blocks} KV blocks; raise --num-blocks"
        )
    return max_model_len


def _rope_parameters(parameters: Any) -> list[dict[str, Any]]:
    """The config's rotary settings: one for all layers, or one per kind of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]

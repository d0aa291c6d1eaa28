"""The longest context that a checkpoint's config.json names, so that both server sides read it alike.

Standard library only. What a worker computes may be shorter; it says so when it attaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def config_context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens, prompt and completion together; None if the configuration names no length.

    The text model's own configuration counts where there is one. Raises ValueError for a length that is not a number
    of tokens.
    """
    text_config = config.get("text_config")
    for source in (text_config if isinstance(text_config, Mapping) else {}, config):
        for key in LENGTH_KEYS:
            value = source.get(key)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"config.json: {key} is {value!r}; a number of tokens of at least 1 is expected")
            return value
    return None

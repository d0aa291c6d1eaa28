"""Reads the checkpoint that the control plane serves, and logs what it is."""

from __future__ import annotations

import asyncio
import logging

from motet import __version__

from contract.fingerprint import NOT_QUANTIZED
from contract.process_log import shown
from control_plane.config import ServerConfig
from control_plane.registry.model.base_model import BaseModel

logger = logging.getLogger(__name__)


async def read_base_model(config: ServerConfig) -> BaseModel:
    """The base model as the checkpoint describes it. Raises BaseModelError."""
    logger.info("reading checkpoint", extra=shown(f"Motet {__version__} serves {config.model_dir.resolve()}"))
    base_model = await asyncio.to_thread(
        BaseModel.load, config.model_dir, config.dtype, config.max_model_len, config.quantization
    )
    num_layers, length = base_model.num_layers, base_model.max_model_len
    facts = [
        str(base_model.config.get("model_type")),
        *([f"{num_layers} layers"] if num_layers else []),
        base_model.dtype,
        *([f"weights in {base_model.quantization}"] if base_model.quantization != NOT_QUANTIZED else []),
        "context as the workers compute it" if length is None else f"context {length} tokens",
    ]
    logger.info(
        "base model name=%s fingerprint=%s dtype=%s",
        base_model.name,
        base_model.fingerprint,
        base_model.dtype,
        extra=shown(f"base model {base_model.name}: {', '.join(facts)}"),
    )
    return base_model

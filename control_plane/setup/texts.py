"""Starts what turns texts into tokens: the checkpoint's tokenizer and template, and those that adapters bring."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from contract.process_log import shown
from control_plane.api.generation.constraints import Constraints
from control_plane.api.text.adapter_texts import AdapterTexts
from control_plane.api.text.codec import TextCodec
from control_plane.config import ServerConfig
from control_plane.constraints.compiler import ConstraintCompiler
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.types import Vocabulary

logger = logging.getLogger(__name__)


async def start_codec(
    config: ServerConfig, base_model: BaseModel, stack: contextlib.AsyncExitStack
) -> tuple[TextCodec, BaseModel]:
    """The checkpoint's codec, and the base model, which then knows the tokenizer that adapters are compared with."""
    converted = config.data_dir / "tokenizers" / f"{base_model.fingerprint}.json"
    codec = await asyncio.to_thread(TextCodec.load, config.model_dir, converted)
    stack.push_async_callback(codec.close)
    await codec.start()
    if not codec.has_tokenizer:
        logger.warning("text is off, token ids work: %s; put a tokenizer.json into %s", codec.reason, config.model_dir)
    elif not codec.has_chat_template:
        logger.info(
            "no chat template", extra=shown("the checkpoint has no chat template: chats are refused, text works")
        )
    return codec, replace(base_model, tokenizer_file=codec.tokenizer_file)


def adapter_texts(codec: TextCodec, weights: AdapterWeights, stack: contextlib.AsyncExitStack) -> AdapterTexts:
    """The texts of adapters, read from the artifact store."""
    texts = AdapterTexts(codec, weights.documents)
    stack.push_async_callback(texts.close)
    return texts


async def open_constraints(
    codec: TextCodec, base_model: BaseModel, stack: contextlib.AsyncExitStack
) -> tuple[Constraints, Vocabulary | None]:
    """What checks the constraints of requests, and what those of the base model are over; None: all are refused."""
    compiler = ConstraintCompiler()
    stack.push_async_callback(compiler.close)
    constraints = Constraints(compiler)
    return constraints, await constraints.vocabulary_of(codec, base_model.eos_token_ids, base_model.vocab_size)

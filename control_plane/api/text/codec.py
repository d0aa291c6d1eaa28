"""The checkpoint's tokenizer and chat template, as the services use them.

Owns loading and the threads that keep long texts off the event loop. Refuses what the checkpoint cannot do with
TokenizerUnavailable; token ids never need this.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from control_plane.api.text.chat_template import ChatTemplate, ChatTemplateError, special_tokens, template_source
from control_plane.api.text.detokenizer import Detokenizer, DetokenizerFactory
from control_plane.errors import FieldViolation, InvalidRequest, TokenizerUnavailable

logger = logging.getLogger(__name__)

# Encoding 4096 characters takes about a millisecond; more goes to a thread.
MAX_INLINE_CHARS = 4096
CONVERT_TIMEOUT_S = 120.0
NUM_THREADS = 2


class TextCodec:
    """Text and conversations to token ids, token ids to text."""

    def __init__(self, tokenizer: Tokenizer | None, chat: ChatTemplate | None, *, reason: str = "") -> None:
        self._tokenizer = tokenizer
        self._factory = None if tokenizer is None else DetokenizerFactory(tokenizer)
        self._chat = chat
        self._reason = reason  # why there is no tokenizer, for clients
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")

    @classmethod
    def load(cls, model_dir: Path, cache_file: Path) -> TextCodec:
        """Read the checkpoint's tokenizer; without tokenizer.json convert it into `cache_file` once. Blocks."""
        tokenizer, reason = _load_tokenizer(model_dir, cache_file)
        config = _read_json(model_dir / "tokenizer_config.json")
        tokens = special_tokens({**_read_json(model_dir / "special_tokens_map.json"), **config})
        jinja_file = model_dir / "chat_template.jinja"
        source = template_source(config, jinja_file.read_text(encoding="utf-8") if jinja_file.is_file() else None)
        chat = None
        if source is not None:
            try:
                chat = ChatTemplate(source, tokens)
            except jinja2.TemplateError as error:
                logger.warning("chat template does not compile error=%s", error)
        return cls(tokenizer, chat, reason=reason)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def detokenizer(self) -> Detokenizer | None:
        """A detokeniser at the start of a sequence; None without a tokenizer."""
        return None if self._factory is None else self._factory.make()

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the checkpoint adds. Raises InvalidRequest on "text"."""
        try:
            return await self._run(len(text), self._encode, text, True)
        except _Unencodable as error:
            raise InvalidRequest(FieldViolation("text", str(error))) from error

    async def encode_chat(self, messages: Sequence[Mapping[str, str]], time_s: float | None = None) -> list[int]:
        """Token ids of a conversation up to where the assistant answers. Raises InvalidRequest on field "chat".

        `time_s`: the moment that the template prints as today's date, in seconds since 1970; None: now.
        """
        self._require_tokenizer()
        if self._chat is None:
            raise TokenizerUnavailable("the checkpoint has no chat template; send text or token_ids instead")
        try:
            return await self._run(MAX_INLINE_CHARS + 1, self._encode_chat, messages, time_s)
        except (ChatTemplateError, _Unencodable) as error:
            raise InvalidRequest(FieldViolation("chat", str(error))) from error

    def require_stop_strings(self) -> None:
        """Raises TokenizerUnavailable where stop strings cannot be found for want of text."""
        self._require_tokenizer()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, num_chars: int, function: Any, *args: Any) -> list[int]:
        self._require_tokenizer()
        if num_chars <= MAX_INLINE_CHARS:
            return function(*args)  # type: ignore[no-any-return]
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _encode_chat(self, messages: Sequence[Mapping[str, str]], time_s: float | None) -> list[int]:
        assert self._chat is not None
        # The template writes the special tokens itself.
        return self._encode(self._chat.render(messages, time_s), False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert self._tokenizer is not None
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library, which is written in Rust, is no Exception
            logger.warning("tokenizer failed error=%s", type(error).__name__)
            raise _Unencodable("the checkpoint's tokenizer cannot encode it; send token_ids instead") from error

    def _require_tokenizer(self) -> None:
        if self._tokenizer is None:
            raise TokenizerUnavailable(f"{self._reason}; send token_ids and no stop strings instead")


class _Unencodable(Exception):
    """The tokenizer failed on a text."""


def _load_tokenizer(model_dir: Path, cache_file: Path) -> tuple[Tokenizer | None, str]:
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        file = cache_file
        if not file.is_file() and not _convert(model_dir, file):
            return None, "the checkpoint has no tokenizer.json and its tokenizer could not be converted"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        logger.warning("tokenizer unreadable file=%s error=%s", file, error)
        return None, "the checkpoint's tokenizer.json cannot be read"
    # Truncation and padding settings saved by a training run must not touch prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, ""


def _convert(model_dir: Path, out: Path) -> bool:
    if not any((model_dir / name).exists() for name in ("tokenizer_config.json", "tokenizer.model", "vocab.json")):
        return False  # nothing to convert: spare the import of transformers
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "control_plane.api.text.convert", str(model_dir), str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        logger.warning("tokenizer conversion timed out timeout_s=%g", CONVERT_TIMEOUT_S)
        return False
    if done.returncode != 0:
        logger.warning("tokenizer conversion failed reason=%s", done.stderr.strip()[-500:])
        return False
    logger.info("tokenizer converted file=%s", out)
    return True


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}

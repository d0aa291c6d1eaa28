"""The checkpoint's tokenizer and chat template, as the services use them.

Owns the threads and the processes that keep long texts and all conversations off the event loop, and the turns of
tenants before them. Refuses what the checkpoint cannot do with TokenizerUnavailable; token ids never need this.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from control_plane.access.principal import DEFAULT_TENANT
from control_plane.api.text.chat_renderer import ChatRenderer, RenderRefused
from control_plane.api.text.conversation import Conversation
from control_plane.api.text.detokenizer import Detokenizer, DetokenizerFactory
from control_plane.api.text.fair_gate import FairGate
from control_plane.api.text.length_bound import length_bound, prompt_too_long
from control_plane.api.text.tokenizer_files import find_tokenizer_file, load_tokenizer
from control_plane.checks import refuse
from control_plane.config import ConfigError
from control_plane.daemon_threads import DaemonThreads
from control_plane.errors import TokenizerUnavailable
from control_plane.registry.companions.chat_files import ChatFilesError, read_chat_files

logger = logging.getLogger(__name__)

# Encoding 2048 characters takes less than a millisecond; more goes to a thread.
MAX_INLINE_CHARS = 2048
MAX_INLINE_TOKENS = 512
# Texts worked on at once. A thread encodes without the interpreter's lock, so that each may keep a core busy.
NUM_PLACES = max(2, min(8, (os.cpu_count() or 2) // 2))
MAX_WAITING_BYTES = 64 * 2**20  # of texts that wait for a place
_NO_TEMPLATE = "the checkpoint has no chat template"


class Encoder(Protocol):
    """The part of tokenizers.Tokenizer that encodes texts."""

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool) -> Any:
        """One encoding for each text."""


class TextCodec:
    """Text and conversations to token ids, token ids to text."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat: ChatRenderer | None,
        *,
        reason: str = "",
        no_chat_reason: str = _NO_TEMPLATE,
        encoder: Encoder | None = None,
        tokenizer_file: Path | None = None,
    ) -> None:
        """`reason`: why there is no tokenizer, `no_chat_reason`: why there is no template, for clients.

        `encoder` encodes texts; None: the tokenizer does. `tokenizer_file`: the tokenizer.json that it was read from.
        """
        self.tokenizer_file = tokenizer_file
        self._tokenizer = tokenizer
        self._encoder = encoder or tokenizer
        self._factory = None if tokenizer is None else DetokenizerFactory(tokenizer)
        self._bound = None if tokenizer is None else length_bound(tokenizer)
        self._chat = chat
        self._reason = reason
        self._no_chat_reason = no_chat_reason
        self._gate = FairGate(NUM_PLACES, MAX_WAITING_BYTES)
        self._threads = DaemonThreads(NUM_PLACES, name="text")

    @classmethod
    def load(cls, model_dir: Path, cache_file: Path) -> TextCodec:
        """Read the checkpoint's tokenizer; without tokenizer.json convert it into `cache_file` once. Blocks.

        Raises ConfigError for a file that is broken.
        """
        # A call encodes one text: the library's own threads would have nothing to do.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer, reason = load_tokenizer(model_dir, cache_file)
        try:
            files = read_chat_files(model_dir)
        except ChatFilesError as error:
            raise ConfigError(str(error)) from error
        chat = None
        if files.template is not None:
            chat = ChatRenderer(files.template, files.special_tokens, max_processes=NUM_PLACES)
        return cls(
            tokenizer,
            chat,
            reason=reason,
            no_chat_reason=files.reason,
            tokenizer_file=None if tokenizer is None else find_tokenizer_file(model_dir, cache_file),
        )

    def with_own(self, tokenizer: Tokenizer | None, chat: ChatRenderer | None) -> TextCodec:
        """A codec for one adapter, with its own tokenizer and template where it has them.

        The two share threads and the turns of tenants. Close this one, and not the other.
        """
        own = copy.copy(self)
        if tokenizer is not None:
            own._tokenizer = own._encoder = tokenizer
            own._factory = DetokenizerFactory(tokenizer)
            own._bound = length_bound(tokenizer)
        if chat is not None:
            own._chat = chat
        return own

    async def start(self) -> None:
        """Compile the template. Without this the first conversation does."""
        if self._chat is None:
            return
        try:
            await self._chat.start()
        except RenderRefused as error:
            logger.warning("chat template not usable, conversations are refused error=%s", error)
            await self._chat.close()
            self._chat, self._no_chat_reason = None, "the checkpoint's chat template does not compile"

    @property
    def has_tokenizer(self) -> bool:
        return self._encoder is not None

    @property
    def reason(self) -> str:
        """Why there is no tokenizer, for people."""
        return self._reason

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def detokenizer(self, *, keeps_special: bool = False) -> Detokenizer | None:
        """A detokeniser at the start of a sequence; None without a tokenizer. `keeps_special`: special tokens too."""
        if self._factory is None:
            return None
        return (self._factory.keeping_special() if keeps_special else self._factory).make()

    def spell(self, token_id: int) -> bytes:
        """The bytes that a token adds within a text; none without a tokenizer."""
        return b"" if self._factory is None else self._factory.spelled(token_id)

    def special_tokens(self) -> dict[int, str]:
        """Special tokens by id; none without a tokenizer."""
        return {} if self._factory is None else self._factory.special_tokens()

    def has_tokens_from(self, token_id: int) -> bool:
        """Whether the tokenizer has ids from this one on. A vocabulary with gaps is taken by its number of tokens."""
        if self._tokenizer is None:
            return False
        added = self._tokenizer.get_added_tokens_decoder()
        return self._tokenizer.get_vocab_size() > token_id or max(added, default=0) >= token_id

    async def tokenizer_json(self) -> str:
        """The tokenizer, as tokenizer.json has it. Raises TokenizerUnavailable."""
        self._require_tokenizer()
        assert self._tokenizer is not None
        return await self._threads.run(self._tokenizer.to_str)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Raises TokenizerUnavailable."""
        self._require_tokenizer()
        assert self._factory is not None
        ids = list(token_ids)
        if len(ids) <= MAX_INLINE_TOKENS:
            return self._factory.decode_all(ids, skip_special_tokens)
        return await self._threads.run(self._factory.decode_all, ids, skip_special_tokens)

    async def encode_text(
        self,
        text: str,
        *,
        tenant: str = DEFAULT_TENANT,
        max_model_len: int = sys.maxsize,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text, with the special tokens that the checkpoint adds.

        Raises InvalidRequest on "text", ContextTooLong where no token fits after it, and Exhausted where too many
        texts wait to be encoded.
        """
        self._require_tokenizer()
        self._check_length(text, "text", max_model_len)
        if len(text) <= MAX_INLINE_CHARS:
            return self._encode(text, "text", max_model_len, add_special_tokens)
        async with self._gate.place(tenant, sys.getsizeof(text)):
            return await self._threads.run(self._encode, text, "text", max_model_len, add_special_tokens)

    async def encode_chat(
        self,
        conversation: Conversation,
        time_s: float | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        max_model_len: int = sys.maxsize,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, rendered. Raises as `encode_text`, on field "chat".

        `time_s`: the moment that the template prints as today's date, in seconds since 1970; None: now. The template
        writes special tokens itself.
        """
        self._require_tokenizer()
        if self._chat is None:
            raise TokenizerUnavailable(f"{self._no_chat_reason}; send text or token_ids instead")
        async with self._gate.place(tenant, conversation.size_bytes):
            try:
                text = await self._chat.render(conversation, time_s)
            except RenderRefused as error:
                raise refuse("chat", str(error)) from error
            self._check_length(text, "chat", max_model_len)
            if len(text) <= MAX_INLINE_CHARS:
                return self._encode(text, "chat", max_model_len, add_special_tokens)
            return await self._threads.run(self._encode, text, "chat", max_model_len, add_special_tokens)

    def require_stop_strings(self) -> None:
        """Raises TokenizerUnavailable where stop strings cannot be found for want of text."""
        self._require_tokenizer()

    async def close(self) -> None:
        """End threads and processes. A text that a thread encodes at present does not hold this up."""
        self._threads.close()
        if self._chat is not None:
            await self._chat.close()

    def _check_length(self, text: str, field: str, max_model_len: int) -> None:
        if self._bound is not None and len(text) > MAX_INLINE_CHARS:
            num_tokens = self._bound.least_num_tokens(text)
            if num_tokens >= max_model_len:
                raise prompt_too_long(field, f"{len(text)} characters, at least {num_tokens} tokens", max_model_len)

    def _encode(self, text: str, field: str, max_model_len: int, add_special_tokens: bool) -> list[int]:
        assert self._encoder is not None
        try:
            # `encode` would hold the interpreter's lock all the while (1 MB: 0.4 to 0.6 s) and take twice the time.
            (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library, which is written in Rust, is not an Exception
            logger.warning("tokenizer failed error=%s", type(error).__name__)
            raise refuse(field, "the checkpoint's tokenizer cannot encode it; send token_ids instead") from error
        num_tokens = len(encoding)
        if num_tokens >= max_model_len:
            # The error's traceback would keep it, and the event loop would free it: 45 ms for a text of 1 MB.
            del encoding
            raise prompt_too_long(field, f"{num_tokens} tokens", max_model_len)
        return list(encoding.ids)

    def _require_tokenizer(self) -> None:
        if self._encoder is None:
            raise TokenizerUnavailable(f"{self._reason}; send token_ids and no stop strings instead")

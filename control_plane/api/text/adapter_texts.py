"""What the requests of one adapter version use in place of the checkpoint's tokenizer, template and defaults.

Loaded from the artifact store when a request first needs it, off the event loop, and kept for the versions that were
used last. A version's own codec is never given to a request of another version or of the base model. Template and
tokenizer end with the last request that has them, once they are not kept any more.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.api.text.chat_renderer import ChatRenderer, RenderLimitExceeded, RenderLimits, RenderRefused
from control_plane.api.text.codec import TextCodec
from control_plane.api.text.conversation import Conversation
from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.companions.documents import (
    CHAT,
    GENERATION,
    NO_DEFAULTS,
    TOKENIZER,
    GenerationDefaults,
    decode_chat,
    decode_defaults,
)
from control_plane.registry.companions.tokenizer import extended
from control_plane.registry.records import ResolvedAdapter

logger = logging.getLogger(__name__)

# Each may have a tokenizer (about 50 MB for 128,000 tokens) and a child process that renders.
MAX_KEPT = 16
# A conversation that a template must be able to take in the time and memory of any other. It may refuse it.
_SAMPLE = Conversation(({"role": "user", "content": "Hello."},))

ReadDocuments = Callable[[str], Awaitable[Mapping[str, bytes]]]


@dataclass(frozen=True, slots=True)
class AdapterText:
    """What the requests of one version, or of the base model, use."""

    codec: TextCodec
    defaults: GenerationDefaults = NO_DEFAULTS
    response_template: Mapping[str, Any] | None = None  # None: the base checkpoint's


class AdapterTexts:
    """The texts of all versions. Used from one event loop."""

    def __init__(self, codec: TextCodec, read: ReadDocuments, *, max_kept: int = MAX_KEPT) -> None:
        """`codec`: the checkpoint's. `read`: the documents of a version, by name, given its digest."""
        self._base = AdapterText(codec)
        self._read = read
        self._max_kept = max_kept
        self._kept: OrderedDict[str, asyncio.Task[AdapterText]] = OrderedDict()  # by digest, last used last
        self._renderers: set[ChatRenderer] = set()  # those that are not closed
        self._closings: set[asyncio.Task[None]] = set()

    @property
    def num_kept(self) -> int:
        """Versions whose text is kept, or being loaded."""
        return len(self._kept)

    @property
    def num_renderers(self) -> int:
        """Templates of adapters that have processes, or may have."""
        return len(self._renderers)

    async def of(self, find: Callable[[], ResolvedAdapter | None]) -> tuple[ResolvedAdapter | None, AdapterText]:
        """What `find` returns, and its text; that of the base model for None. Raises MotetError.

        `find` is called again after other tasks had a turn, so the version is the one that a request gets now.
        """
        while True:
            found = find()
            if found is None or not found.version.files:
                return found, self._base
            digest = found.ref.digest
            text = await self._text(digest)
            again = find()
            if again is not None and again.ref.digest == digest:
                return again, text

    async def close(self) -> None:
        """End the processes of all templates."""
        for task in self._kept.values():
            task.cancel()
        self._kept.clear()
        for renderer in list(self._renderers):
            self._close(renderer)
        if self._closings:
            await asyncio.wait(self._closings)

    async def _text(self, digest: str) -> AdapterText:
        task = self._kept.get(digest)
        if task is None:
            task = self._kept[digest] = asyncio.create_task(self._load(digest))
            task.add_done_callback(lambda ended: self._forget_failed(digest, ended))
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(digest)
        return await asyncio.shield(task)

    def _forget_failed(self, digest: str, task: asyncio.Task[AdapterText]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._kept.get(digest) is task:
            del self._kept[digest]

    async def _load(self, digest: str) -> AdapterText:
        documents = await self._read(digest)
        base = self._base.codec
        tokenizer = chat = response_template = None
        if TOKENIZER in documents and base.tokenizer_file is not None:
            content = await asyncio.to_thread(base.tokenizer_file.read_bytes)
            tokenizer = await asyncio.to_thread(extended, content, documents[TOKENIZER])
        if CHAT in documents:
            own = decode_chat(documents[CHAT])
            response_template = own.response_template
            chat = ChatRenderer(own.template, own.special_tokens, max_processes=1)
            self._renderers.add(chat)
        codec = base.with_own(tokenizer, chat)
        if chat is not None:
            weakref.finalize(codec, _call, asyncio.get_running_loop(), self._close, chat).atexit = False
        logger.info("text of an adapter loaded digest=%s documents=%s", digest, sorted(documents))
        defaults = decode_defaults(documents[GENERATION]) if GENERATION in documents else NO_DEFAULTS
        return AdapterText(codec, defaults, response_template)

    def _close(self, renderer: ChatRenderer) -> None:
        if renderer in self._renderers:
            self._renderers.discard(renderer)
            closing = asyncio.create_task(renderer.close())
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)


async def check_template(source: str, special_tokens: Mapping[str, str], limits: RenderLimits | None = None) -> None:
    """Compile and render an adapter's template in a process of its own. Raises InvalidAdapter or Unavailable."""
    renderer = ChatRenderer(source, special_tokens, max_processes=1, limits=limits or RenderLimits())
    try:
        try:
            await renderer.start()
        except RenderRefused as error:
            raise _not_usable(str(error)) from error
        try:
            await renderer.render(_SAMPLE, time_s=0.0)
        except RenderLimitExceeded as error:
            raise _not_usable(str(error)) from error
        except RenderRefused as error:
            logger.debug("a template refuses the sample conversation error=%s", error)
    finally:
        await renderer.close()


def _call(loop: asyncio.AbstractEventLoop, close: Callable[[ChatRenderer], None], renderer: ChatRenderer) -> None:
    """Have the loop close a template that nobody has any more, if there is still a loop."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(close, renderer)


def _not_usable(why: str) -> InvalidAdapter:
    return InvalidAdapter(FieldViolation("chat_template", f"cannot be used: {why}"))

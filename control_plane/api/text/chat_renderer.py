"""Renders conversations in child processes, so that the checkpoint's template cannot hold up the server.

A child that takes too long or dies is replaced for the next conversation; the others live on. Used by the codec.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.api.text.conversation import Conversation
from control_plane.errors import ShuttingDown, Unavailable
from control_plane.framed_child.child import FramedChild

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one conversation may take."""

    cpu_limit_s: float = 2.0  # CPU time, seconds
    memory_limit_bytes: int = 512 * 2**20  # beyond what an idle child has
    wall_limit_s: float = 30.0  # for a child that neither computes nor responds, seconds


class RenderRefused(Exception):
    """The template refused the conversation, or took too much for it; the message is for the caller."""


class RenderLimitExceeded(RenderRefused):
    """The template took too much time for the conversation."""


class ChatRenderer:
    """One template and the children that run it: started when they are needed, kept, replaced when they die."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_processes: int = 2,
        limits: RenderLimits = RenderLimits(),
    ) -> None:
        self._setup = json.dumps(
            {
                "source": source,
                "special_tokens": dict(special_tokens),
                "cpu_limit_s": limits.cpu_limit_s,
                "memory_limit_bytes": limits.memory_limit_bytes,
            }
        ).encode()
        self._limits = limits
        self._places = asyncio.Semaphore(max_processes)
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()  # that were started and did not end
        self._renderings: set[asyncio.Task[str]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start the first child, which compiles the template. Raises RenderRefused or Unavailable."""
        async with self._places:
            self._idle.append(await self._start_child())

    async def render(self, conversation: Conversation, time_s: float | None = None) -> str:
        """The prompt for the assistant's next turn. Raises RenderRefused or Unavailable.

        `time_s`: the moment that the template prints as today's date, in seconds since 1970; None: now. A caller that
        is cancelled costs no child: its conversation is rendered and dropped.
        """
        rendering = asyncio.create_task(self._render(conversation.to_json(time_s)))
        self._renderings.add(rendering)
        rendering.add_done_callback(self._forget)
        return await asyncio.shield(rendering)

    async def close(self) -> None:
        """End every child at once."""
        self._is_closed = True
        for rendering in self._renderings:
            rendering.cancel()
        for child in list(self._children):
            await self._drop(child)
        if self._renderings:
            await asyncio.wait(self._renderings)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return sorted(child.process.pid for child in self._children)

    def _forget(self, rendering: asyncio.Task[str]) -> None:
        self._renderings.discard(rendering)
        if not rendering.cancelled():
            rendering.exception()  # seen, even if its caller is gone

    async def _render(self, conversation: bytes) -> str:
        async with self._places:
            for _ in range(2):  # a child that died of something else than this conversation: the next one gets it
                child = self._idle.pop() if self._idle else await self._start_child()
                status = await self._ask(child, conversation, "this conversation")
                if status is None:
                    self._idle.append(child)
                    return child.take_result()
            raise Unavailable("the process that renders conversations ended twice; try again")

    async def _start_child(self) -> _Child:
        if self._is_closed:
            raise ShuttingDown()
        try:
            child = await _Child.start("control_plane.api.text.render_process")
        except OSError as error:
            logger.error("chat renderer not started error=%s", error)
            raise Unavailable("the process that renders conversations could not be started; try again") from error
        self._children.add(child)
        status = await self._ask(child, self._setup, "being compiled")
        if status is not None:
            raise Unavailable("the process that renders conversations ended at its start; try again")
        try:
            child.take_result()
        except RenderRefused:
            await self._drop(child)
            raise
        return child

    async def _ask(self, child: _Child, request: bytes, what: str) -> int | None:
        """Have the child render; its exit status where it died instead.

        Raises RenderRefused where the request took too long.
        """
        try:
            async with asyncio.timeout(self._limits.wall_limit_s):
                child.result = await child.ask(request)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            is_stuck = isinstance(error, TimeoutError)
            status = await self._drop(child, is_running=is_stuck)
            logger.warning("chat renderer ended pid=%d status=%d", child.process.pid, status)
            if not (is_stuck or status == -signal.SIGPROF):
                return status
            limits = self._limits
            limit = f"{limits.wall_limit_s:g} s" if is_stuck else f"{limits.cpu_limit_s:g} s of CPU time"
            raise RenderLimitExceeded(
                f"the chat template took more than {limit} for {what}; send text or token_ids instead"
            ) from error
        except BaseException:
            await self._drop(child)
            raise
        return None

    async def _drop(self, child: _Child, *, is_running: bool = True) -> int:
        """Its exit status, once it is gone."""
        self._children.discard(child)
        if child in self._idle:
            self._idle.remove(child)
        return await child.end(is_running=is_running)


class _Child(FramedChild):
    """Renders one conversation after the other."""

    result: tuple[str, bool] | None = None  # what came back last, and whether it is a text that was rendered

    def take_result(self) -> str:
        """The text that it made last. Raises RenderRefused where it made none."""
        assert self.result is not None, "nothing was rendered"
        (text, is_text), self.result = self.result, None
        if not is_text:
            raise RenderRefused(text)
        return text

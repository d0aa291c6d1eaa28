"""One request on its way through the fleet: the stream its reader iterates, and the fleet's record of it.

Tokens that are not read yet are kept and coalesced into one event. The stream only stores; the fleet decides when a
reader is too slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control_plane.errors import MotetError
from control_plane.scheduler.types import FinishReason, Request

if TYPE_CHECKING:
    from control_plane.fleet.session import WorkerSession

MAX_UNREAD_TOKENS = 256  # beyond it the request is not scheduled until its reader catches up


# Not frozen: one is made per token, and a frozen one costs three times as much to make.
@dataclass(slots=True)
class JobEvent:
    """What a request gained since the event before."""

    token_ids: list[int]  # new tokens, in order; empty at most in the last event
    finish_reason: FinishReason | None  # LENGTH or STOP_TOKEN in the last event; every other end is an exception
    num_cached_tokens: int  # prompt tokens served by the prefix cache when the request first ran
    queue_time_s: float  # arrival to the first plan that carried the request


class JobStream:
    """Async iterator over the events of one request, for one reader. Raises MotetError where the request failed."""

    def __init__(self, on_read: Callable[[], None], on_cancel: Callable[[], None]) -> None:
        self._on_read = on_read
        self._on_cancel = on_cancel
        self._pending: list[int] = []
        self._num_cached_tokens = 0
        self._queue_time_s = 0.0
        self._finish_reason: FinishReason | None = None
        self._error: MotetError | None = None
        self._has_ended = False  # nothing more will be pushed
        self._is_over = False  # the reader got the last event
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while it waits

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> JobEvent:
        while not (self._pending or self._has_ended):
            # A bare future: one is made per token and stream, an Event costs twice as much.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_over:
            raise StopAsyncIteration
        if not self._pending and self._error is not None:
            self._is_over = True
            raise self._error
        token_ids, self._pending = self._pending, []
        finish_reason = self._finish_reason
        self._is_over = finish_reason is not None
        self._on_read()
        return JobEvent(token_ids, finish_reason, self._num_cached_tokens, self._queue_time_s)

    def cancel(self) -> None:
        """Give the request up; nothing follows. Idempotent, and harmless after the end."""
        if not self._has_ended:
            self._on_cancel()
        self._has_ended = self._is_over = True
        self._pending.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- for the fleet ----

    @property
    def num_unread_tokens(self) -> int:
        """Tokens pushed and not read."""
        return len(self._pending)

    def describe(self, num_cached_tokens: int, queue_time_s: float) -> None:
        """Set what every event repeats."""
        self._num_cached_tokens = num_cached_tokens
        self._queue_time_s = queue_time_s

    def push(self, token_ids: list[int], finish_reason: FinishReason | None) -> None:
        """Append tokens, and end the stream if there is a reason."""
        assert not self._has_ended, "tokens after the end of a stream"
        self._pending.extend(token_ids)
        if finish_reason is not None:
            self._finish_reason = finish_reason
            self._has_ended = True
        self._wake()

    def fail(self, error: MotetError) -> None:
        """End the stream with an error, raised once the tokens before it are read."""
        assert not self._has_ended, "an error after the end of a stream"
        self._error = error
        self._has_ended = True
        self._wake()


@dataclass(slots=True)
class Job:
    """The fleet's record of one request that has not ended."""

    request: Request  # with every token accepted before its last placement
    stream: JobStream = field(repr=False)
    session: WorkerSession | None = None  # None: waits in the fleet
    has_run: bool = False  # it was part of a plan at least once
    num_migrations: int = 0  # times it was taken off a session that computed it
    num_deaths: int = 0  # workers that died while they computed it, since it was last cleared of suspicion
    num_tokens_here: int = 0  # accepted since its last placement
    failed_load_epochs: set[int] = field(default_factory=set)  # sessions that could not load its adapter
    full_since_s: float | None = None  # when its stream filled up; it is paused in its scheduler since then

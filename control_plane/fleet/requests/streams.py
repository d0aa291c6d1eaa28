"""The stream of one request: what its reader iterates.

A stream keeps tokens that are not read yet, and merges those of one index into one event. Where the client wants few
large deltas, the reader waits until there are enough tokens, or until the first of them is old enough. It only stores;
slow_readers.py decides when a reader is too slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from control_plane.errors import MotetError
from control_plane.scheduler.types import FinishReason, RequestOutput, SlotRef, TokenLogprobs, Vector

MAX_UNREAD_TOKENS = 256  # per live index; above this the request is paused until its reader reads

CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


# Not frozen: one is made per token, and a frozen one costs three times as much to make.
@dataclass(slots=True)
class JobEvent:
    """What one index of a request gained since its event before."""

    token_ids: list[int]  # new tokens, in order; empty at most in the index's last event
    # LENGTH, STOP_TOKEN or POOLED in its last event; every other end is an exception.
    finish_reason: FinishReason | None
    num_cached_tokens: int  # prompt tokens served by the prefix cache when the request first ran
    queue_time_s: float  # arrival to the first plan that carried the request
    index: int = 0  # which completion of the request
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if requested
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # of the prompt's tokens but the first; once, with index 0
    score: float | None = None  # for beam search: what the completions are ranked by
    pooled: Vector | None = None  # with POOLED: the vector


class Collecting(NamedTuple):
    """How long tokens may wait for further ones, so that they are read together."""

    num_tokens: int  # of each live index to wait for, at most MAX_UNREAD_TOKENS
    wait_s: float  # the longest that a token waits, above 0


class Place(NamedTuple):
    """Where tokens of a request were computed."""

    worker_id: str
    epoch: int  # of the worker's session
    slot: SlotRef | None  # that its adapter was in; None without an adapter


@dataclass(slots=True)
class RunFacts:
    """How a request ran; complete once its stream has ended."""

    places: list[Place] = field(default_factory=list)  # that returned tokens, or had the request at its end; in order
    num_cached_tokens: int = 0
    queue_time_s: float | None = None  # None: it did not run
    # Of queue_time_s: the time until its adapter was in a slot; None: it has no adapter, or did not run.
    adapter_wait_s: float | None = None
    num_new_tokens: int = 0  # that were generated, over all its completions


class JobStream:
    """Async iterator over the events of one request, for one reader. Raises MotetError where the request failed."""

    def __init__(
        self,
        on_read: Callable[[], None],
        on_cancel: Callable[[], None],
        on_cancel_index: Callable[[int], None],
        *,
        num_indices: int = 1,
    ) -> None:
        self._on_read = on_read
        self._on_cancel = on_cancel
        self._on_cancel_index = on_cancel_index
        self._pending: dict[int, JobEvent] = {}  # by index; the one that has waited longest first
        self.num_unread_tokens = 0  # pushed and not read
        self._live = set(range(num_indices))  # indices for which more may be pushed
        self._num_cached_tokens = 0
        self._queue_time_s = 0.0
        self.facts = RunFacts()
        self._error: MotetError | None = None
        self._has_ended = False  # nothing more will be pushed
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while it waits
        self._collecting: Collecting | None = None
        self._call_later: CallLater | None = None
        self._is_due = True  # what is pending may be read
        self._timer: asyncio.TimerHandle | None = None  # while tokens wait for further ones

    def collect(self, collecting: Collecting, call_later: CallLater | None = None) -> None:
        """Let tokens wait for further ones from the first event on. Before the first event; `call_later`: the loop's.

        The first event, the last one of an index, and errors do not wait.
        """
        self._collecting = collecting
        self._call_later = call_later or asyncio.get_running_loop().call_later

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> JobEvent:
        while not ((self._pending and self._is_due) or self._has_ended):
            # A bare future: one is made per token and stream, an Event costs twice as much.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._pending:
            error, self._error = self._error, None
            if error is not None:
                raise error
            raise StopAsyncIteration
        event = self._pending.pop(next(iter(self._pending)))
        event.num_cached_tokens, event.queue_time_s = self._num_cached_tokens, self._queue_time_s
        self.num_unread_tokens -= len(event.token_ids)
        if self._collecting is not None and not self._pending:
            self._is_due = False
        self._on_read()
        return event

    def cancel(self) -> None:
        """Cancel the request; nothing follows. Idempotent, and harmless after the end."""
        if not self._has_ended:
            self._on_cancel()
        self._has_ended = True
        self._live.clear()
        self._pending.clear()
        self.num_unread_tokens = 0
        self._error = None
        self._release()

    def cancel_index(self, index: int) -> None:
        """Cancel one completion; nothing of it follows, the others go on. Idempotent, and harmless after its end."""
        event = self._pending.pop(index, None)
        if event is not None:
            self.num_unread_tokens -= len(event.token_ids)
        if index not in self._live:
            return
        if len(self._live) == 1:
            if not self._has_ended:
                self._on_cancel()
            self._has_ended = True
        else:
            self._on_cancel_index(index)
        self._live.discard(index)

    def _on_tokens(self) -> None:
        """Tokens came that end nothing: wake the reader, unless they wait for further ones."""
        if self._collecting is None or self._is_due:
            self._wake()
        elif self.num_unread_tokens >= self._collecting.num_tokens * len(self._live):
            self._release()
        elif self._timer is None:
            assert self._call_later is not None, "tokens wait, and nothing measures for how long"
            self._timer = self._call_later(self._collecting.wait_s, self._release)

    def _release(self) -> None:
        """Let the reader have all that is pending."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_due = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- for the fleet ----

    @property
    def is_full(self) -> bool:
        """Whether its reader is so far behind that the request should wait."""
        return self.num_unread_tokens >= MAX_UNREAD_TOKENS * len(self._live)

    @property
    def has_ended(self) -> bool:
        """Whether every index has ended, or the request failed or was cancelled."""
        return self._has_ended

    def is_live(self, index: int) -> bool:
        """Whether more of this completion may be pushed."""
        return index in self._live

    def describe(self, num_cached_tokens: int, queue_time_s: float, adapter_wait_s: float | None = None) -> None:
        """Set what every event repeats; see RunFacts for `adapter_wait_s`."""
        self._num_cached_tokens = num_cached_tokens
        self._queue_time_s = queue_time_s
        self.facts.num_cached_tokens, self.facts.queue_time_s = num_cached_tokens, queue_time_s
        self.facts.adapter_wait_s = adapter_wait_s

    def note_place(self, worker_id: str, epoch: int, slot: SlotRef | None) -> None:
        """Note where the request is computed at present."""
        places = self.facts.places
        if not places or places[-1].epoch != epoch or places[-1].slot != slot:
            places.append(Place(worker_id, epoch, slot))

    def note_new_tokens(self, num_tokens: int) -> None:
        """Note how many tokens were generated, those that nobody read included."""
        self.facts.num_new_tokens = num_tokens

    def push_token(self, token_id: int) -> bool:
        """Append a token of index 0 that comes with nothing else; whether the stream is full."""
        if 0 not in self._live:
            return False  # cancelled meanwhile
        pending = self._pending.get(0)
        if pending is None:
            self._pending[0] = JobEvent([token_id], None, 0, 0.0)
        else:
            pending.token_ids.append(token_id)
        self.num_unread_tokens += 1
        self._on_tokens()
        return self.is_full

    def push(self, output: RequestOutput, finish_reason: FinishReason | None) -> None:
        """Append one index's tokens, and end that index if there is a reason; the stream ends with the last of them."""
        index = output.index
        assert index in self._live, f"tokens after the end of index {index}"
        pending = self._pending.get(index)
        if pending is None:
            self._pending[index] = JobEvent(
                [*output.token_ids],
                finish_reason,
                0,
                0.0,
                index,
                None if output.logprobs is None else [*output.logprobs],  # the list itself is the scheduler's
                output.prompt_logprobs,
                output.score,
                output.pooled,
            )
        else:
            pending.token_ids.extend(output.token_ids)
            pending.finish_reason = finish_reason
            if output.logprobs:
                pending.logprobs = pending.logprobs or []
                pending.logprobs.extend(output.logprobs)
            pending.prompt_logprobs = pending.prompt_logprobs or output.prompt_logprobs
            pending.score = output.score
        self.num_unread_tokens += len(output.token_ids)
        if finish_reason is not None:
            self._live.discard(index)
            self._has_ended = not self._live
            self._release()
        else:
            self._on_tokens()

    def fail(self, error: MotetError) -> None:
        """End the stream with an error, raised once the tokens before it are read."""
        assert not self._has_ended, "an error after the end of a stream"
        self._error = error
        self._has_ended = True
        self._live.clear()
        self._release()

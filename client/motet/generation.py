"""One generation as the client sees it: folds events into chunks and knows how to go on after a broken stream.

No I/O: the sync and the async stream drive it (`client.py`, `aio.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from motet.channel import RetryPolicy
from motet.errors import Cancelled, DataLoss, DeadlineExceeded, MotetError, ResourceExhausted, Unavailable
from motet.requests import continuation
from motet.types import Chunk, Finished, Generation, Started
from motet.v1 import generation_pb2
from motet.wire import finished_from, started_from


class GenerationState:
    """Everything received of one request, whatever number of calls that took."""

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        *,
        timeout_s: float,
        retry: RetryPolicy,
        clock: Callable[[], float],
        generator: random.Random,
    ) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._request = request
        self._started_message: generation_pb2.GenerationStarted | None = None
        self._retry = retry
        self._clock = clock
        self._generator = generator
        self._timeout_s = timeout_s
        self._deadline_s = clock() + timeout_s
        self._num_failures = 0  # calls that broke since the last new token
        self._is_call_started = False  # this call told `started`
        # Invariant: a server that replays token_ids has released exactly the text in text_parts less loose_text.
        self._token_ids: list[int] = []
        self._text_parts: list[str] = []
        self._loose_text = ""  # text that came without tokens, behind the last token
        self._repeated_text = ""  # what this call will send once more: the loose text of the broken one

    def next_request(self) -> tuple[generation_pb2.GenerateRequest, float]:
        """What to send at this point, and the seconds left for it."""
        self._is_call_started = False
        self._repeated_text = self._loose_text
        remaining_s = max(self._deadline_s - self._clock(), 0.0)
        if self._started_message is None:
            return self._request, remaining_s
        return continuation(self._request, self._started_message, self._token_ids), remaining_s

    def fold(self, response: generation_pb2.GenerateResponse) -> Chunk | None:
        """The chunk that an event makes, None if it makes none. Raises DataLoss if events contradict each other."""
        event = response.WhichOneof("event")
        if self.finished is not None:
            raise _broken_promise(f"{event} after the end")
        if event == "started":
            self._fold_started(response.started)
            return None
        if event is None:
            return None  # an event of a later protocol
        if not self._is_call_started or self.started is None:
            raise _broken_promise(f"{event} before started")
        index = response.delta.index if event == "delta" else response.finished.index
        if index != 0:
            raise _broken_promise(f"sequence {index} of a request for one")
        if event == "delta":
            return self._fold_delta(response.delta)
        self.finished = finished_from(response.finished)
        return Chunk(
            text="",
            token_ids=(),
            token_offset=len(self._token_ids),
            adapter_digest=self.started.adapter_digest,
            finish_reason=self.finished.finish_reason,
            usage=self.finished.usage,
        )

    def check_ended(self) -> None:
        """Call when the stream ended without an error. Raises DataLoss if `finished` is missing."""
        if self.finished is None:
            raise _broken_promise(f"the stream ended after {len(self._token_ids)} tokens without saying why")

    def backoff_s(self, error: MotetError) -> float:
        """Seconds to wait before `next_request` after a call broke with `error`; raises when it is final.

        1. Nothing arrived yet: gRPC has retried already.
        2. The stream broke, or its continuation was refused for the moment: go on, a bounded number of times in a row.
        3. Anything else is the answer.
        """
        can_go_on = isinstance(error, Unavailable) or (
            isinstance(error, ResourceExhausted) and error.retry_after_s is not None and not self._is_call_started
        )
        self._num_failures += 1
        if self.started is None or not can_go_on or self._num_failures >= self._retry.max_attempts:
            raise error
        delay_s = max(self._retry.backoff_s(self._num_failures, self._generator), error.retry_after_s or 0.0)
        if self._clock() + delay_s >= self._deadline_s:
            raise DeadlineExceeded(
                f"no answer within timeout_s={self._timeout_s:g}; the stream broke after {len(self._token_ids)} tokens "
                f"and could not be continued in time: {error}",
                reason="DEADLINE_EXCEEDED",
            ) from error
        return delay_s

    def text(self) -> str:
        """All text so far."""
        return "".join(self._text_parts)

    def result(self) -> Generation:
        """The whole answer. Raises Cancelled if the stream was closed before its end."""
        if self.started is None or self.finished is None:
            raise Cancelled("the stream was closed before its end", reason="CANCELLED")
        return Generation(self.text(), tuple(self._token_ids), self.started, self.finished)

    def _fold_started(self, message: generation_pb2.GenerationStarted) -> None:
        if self._is_call_started:
            raise _broken_promise("started twice")
        self._is_call_started = True
        first = self._started_message
        if first is None:
            self._started_message = message
            self.started = started_from(message)
        elif message.adapter_digest != first.adapter_digest:
            raise _broken_promise(f"continued with version {message.adapter_digest}, not {first.adapter_digest}")
        elif message.sampling.seed != first.sampling.seed:
            raise _broken_promise(f"continued with seed {message.sampling.seed}, not {first.sampling.seed}")

    def _fold_delta(self, delta: generation_pb2.GenerationDelta) -> Chunk | None:
        assert self.started is not None, "checked by fold"
        offset = len(self._token_ids)
        if delta.token_offset != offset:
            raise _broken_promise(f"token_offset {delta.token_offset} where {offset} was due")
        text = self._without_repetition(delta.text)
        if delta.token_ids:
            self._num_failures = 0
            self._token_ids.extend(delta.token_ids)
            self._loose_text = self._repeated_text
        else:
            self._loose_text += text
        if not text and not delta.token_ids:
            return None
        self._text_parts.append(text)
        return Chunk(
            text=text,
            token_ids=tuple(delta.token_ids),
            token_offset=offset,
            adapter_digest=self.started.adapter_digest,
        )

    def _without_repetition(self, text: str) -> str:
        """`text` less what the broken call had sent already.

        Worked example: tokens [5, 6], text "ab" then "c" without tokens, broken. The continuation behind [5, 6]
        starts where "ab" ended and sends "cd" with token 7: "c" is known, "d" is new.
        """
        known = self._repeated_text
        if not known:
            return text
        overlap = min(len(known), len(text))
        if text[:overlap] != known[:overlap]:
            raise _broken_promise("the continuation's text differs from what was received")
        self._repeated_text = known[overlap:]
        return text[overlap:]


def _broken_promise(what: str) -> DataLoss:
    return DataLoss(f"the server's stream cannot be trusted: {what}", reason="STREAM_INCONSISTENT")

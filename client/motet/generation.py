"""One generation as the client sees it: folds events into chunks and knows how to go on after a broken stream.

No I/O: the sync and the async stream drive it (`client.py`, `aio.py`).
"""

from __future__ import annotations

import dataclasses
import math

from motet.errors import Cancelled, DataLoss, DeadlineExceeded, MotetError, ResourceExhausted, Unavailable
from motet.requests import continuation, is_resumable, what_changed
from motet.retries import Attempts, as_broken
from motet.types import Answer, Chunk, Finished, Generation, Started, TokenLogprobs
from motet.v1 import generation_pb2
from motet.wire import finished_from, logprobs_from, started_from


class GenerationState:
    """Everything received of one request, whatever number of calls that took."""

    def __init__(self, request: generation_pb2.GenerateRequest, attempts: Attempts) -> None:
        self.started: Started | None = None
        self._request = request
        self._is_resumable = is_resumable(request)
        self._started_message: generation_pb2.GenerationStarted | None = None
        self._attempts = attempts
        self._is_call_started = False  # this call told `started`
        self._answers = [_AnswerState(0)]  # as many as the request gets, once `started` is here

    @property
    def finished(self) -> Finished | None:
        """How the first answer ended, once it has."""
        return self._answers[0].finished

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers that have ended, by index."""
        return tuple(answer.whole(answer.finished) for answer in self._answers if answer.finished is not None)

    def next_request(self) -> tuple[generation_pb2.GenerateRequest, float]:
        """What to send at this point, and the seconds left for it."""
        self._is_call_started = False
        remaining_s = self._attempts.remaining_s
        if self._started_message is None:
            return self._request, remaining_s
        (answer,) = self._answers  # no other request is continued
        answer.expect_repetition()
        return continuation(self._request, self._started_message, answer.token_ids), remaining_s

    def fold(self, response: generation_pb2.GenerateResponse) -> Chunk | None:
        """The chunk that an event makes, None if it makes none. Raises DataLoss if events contradict each other."""
        event = response.WhichOneof("event")
        if event == "started":
            self._fold_started(response.started)
            return None
        if event is None:
            return None  # an event of a later protocol
        if not self._is_call_started or self.started is None:
            raise _broken_promise(f"{event} before started")
        index = response.delta.index if event == "delta" else response.finished.index
        if index >= len(self._answers):
            raise _broken_promise(f"answer {index} of a request for {len(self._answers)}")
        answer = self._answers[index]
        if answer.finished is not None:
            raise _broken_promise(f"{event} after the end of answer {index}")
        if event == "finished":
            return answer.fold_finished(response.finished, self.started.adapter_digest)
        if response.delta.token_ids:
            self._attempts.progressed()
        return answer.fold_delta(response.delta, self.started.adapter_digest)

    def after_call(self, error: MotetError | None) -> float | None:
        """What follows a call that ended in order (None) or with `error`, which the user did not ask for.

        Seconds to wait before `next_request`; None where the stream has ended. Raises what is final.
        1. Every answer has ended: so has the stream, whatever became of the connection.
        2. The call ended in order without that: nothing of this server can be trusted.
        3. Nothing was told yet: the request is sent again.
        4. The one answer can be continued: the same, and a server that has no room at present is asked again.
        5. Anything else is the answer.
        """
        if self.started is not None and all(answer.finished is not None for answer in self._answers):
            return None
        if error is None:
            raise self._missing_end()
        if isinstance(error, DeadlineExceeded):
            raise self._timed_out() from error
        error = as_broken(error)
        if self.started is None:
            return self._attempts.after(error, is_repeatable=True)
        if not self._is_resumable and isinstance(error, Unavailable):
            raise self._attempts.contact.explained(error).extended("several answers cannot be continued, send it again")
        if isinstance(error, ResourceExhausted) and self._is_resumable and not self._is_call_started:
            return self._attempts.when_there_is_room(error)
        return self._attempts.after(error, is_repeatable=self._is_resumable)

    def text(self) -> str:
        """All text of the first answer so far."""
        return "".join(self._answers[0].text_parts)

    def result(self) -> Generation:
        """All answers. Raises Cancelled if the stream was closed before its end."""
        answers = self.answers
        if self.started is None or len(answers) < len(self._answers):
            raise Cancelled("the stream was closed before its end", reason="CANCELLED")
        first = answers[0]
        return Generation(first.text, first.token_ids, self.started, first.finished, answers)

    def _missing_end(self) -> DataLoss:
        answer = next(answer for answer in self._answers if answer.finished is None)
        num_tokens = len(answer.token_ids)
        return _broken_promise(
            f"the stream ended after {num_tokens} tokens without saying why answer {answer.index} did"
        )

    def _timed_out(self) -> DeadlineExceeded:
        num_tokens = sum(len(answer.token_ids) for answer in self._answers)
        if not num_tokens:
            return self._attempts.timed_out("no token came")
        return self._attempts.timed_out(f"the answer was not complete, {num_tokens} tokens had come")

    def _fold_started(self, message: generation_pb2.GenerationStarted) -> None:
        if any(answer.finished is not None for answer in self._answers):
            raise _broken_promise("started after the end of an answer")
        if self._is_call_started:
            raise _broken_promise("started twice")
        self._is_call_started = True
        first = self._started_message
        if first is None:
            started, num_asked = started_from(message), self._request.decoding.n or 1
            if started.n != num_asked:
                raise _broken_promise(f"{started.n} answers where {num_asked} were asked for")
            self._started_message, self.started = message, started
            self._answers = [_AnswerState(index) for index in range(self.started.n)]
        elif (change := what_changed(first, message)) is not None:
            name, value, before = change
            raise _broken_promise(f"continued with {name} {value}, not {before}")


class _AnswerState:
    """Everything received of one answer."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finished: Finished | None = None
        # Invariant: a server that replays token_ids has released exactly the text in text_parts less _loose_text.
        self.token_ids: list[int] = []
        self.text_parts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._loose_text = ""  # text that came without tokens, behind the last token
        self._repeated_text = ""  # what this call will send once more: the loose text of the broken one

    def whole(self, finished: Finished) -> Answer:
        """The answer, which has ended."""
        return Answer(self.index, "".join(self.text_parts), tuple(self.token_ids), finished, tuple(self._logprobs))

    def expect_repetition(self) -> None:
        """A continuation is asked for."""
        self._repeated_text = self._loose_text

    def fold_delta(self, delta: generation_pb2.GenerationDelta, adapter_digest: str) -> Chunk | None:
        offset = len(self.token_ids)
        if delta.token_offset != offset:
            raise _broken_promise(f"token_offset {delta.token_offset} where {offset} was due in answer {self.index}")
        text = self._without_repetition(delta.text)
        logprobs = logprobs_from(delta.logprobs)
        if delta.token_ids:
            self.token_ids.extend(delta.token_ids)
            self._logprobs.extend(logprobs)
            self._loose_text = self._repeated_text
        else:
            self._loose_text += text
        if not text and not delta.token_ids:
            return None
        self.text_parts.append(text)
        return Chunk(
            text=text,
            token_ids=tuple(delta.token_ids),
            token_offset=offset,
            adapter_digest=adapter_digest,
            index=self.index,
            logprobs=logprobs,
        )

    def fold_finished(self, message: generation_pb2.GenerationFinished, adapter_digest: str) -> Chunk:
        finished = finished_from(message)
        if finished.cumulative_logprob is None and self._logprobs:
            # A continued stream: its server knew the last part alone.
            total = math.fsum(told.logprob for told in self._logprobs)
            finished = dataclasses.replace(finished, cumulative_logprob=total)
        self.finished = finished
        return Chunk(
            text="",
            token_ids=(),
            token_offset=len(self.token_ids),
            adapter_digest=adapter_digest,
            index=self.index,
            finish_reason=finished.finish_reason,
            usage=finished.usage,
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

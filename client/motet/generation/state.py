"""One generation as the client sees it: folds events into chunks and knows how to go on after a broken stream.

No I/O: the streams of `blocking.py` and `asynchronous.py` drive it.
"""

from __future__ import annotations

import dataclasses
import math

from motet.errors import Cancelled, DataLoss, DeadlineExceeded, MotetError, ResourceExhausted
from motet.inputs.lora_task import NOT_CACHED, LoraTask, TaskUpload
from motet.requests import continuation, is_resumable, repetition, what_changed
from motet.retries import Attempts
from motet.types import Chunk, Completion, Finished, Generation, Started, TokenLogprobs
from motet.v1 import generation_pb2
from motet.wire import finished_from, logprobs_from, started_from


class GenerationState:
    """Everything received of one request, whatever number of calls that took."""

    def __init__(
        self, request: generation_pb2.GenerateRequest, attempts: Attempts, task: LoraTask | None = None
    ) -> None:
        """`task`: has the weights of the LoRA task that the request names."""
        self.started: Started | None = None
        self.upload: TaskUpload | None = None  # what is sent at this point in place of the request alone
        self._task = task
        self._brings_weights = task is not None and not task.digest
        self._request = request
        self._is_resumable = is_resumable(request)
        self._started_message: generation_pb2.GenerationStarted | None = None
        self._attempts = attempts
        self._is_call_started = False  # this call got `started`
        self._completions = [_CompletionState(0)]  # one for each completion once `started` has come

    @property
    def finished(self) -> Finished | None:
        """How the first completion ended, once it has."""
        return self._completions[0].finished

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The completions that have ended, by index."""
        ended = [(state, state.finished) for state in self._completions]
        return tuple(state.whole(finished) for state, finished in ended if finished is not None)

    def next_request(self) -> tuple[generation_pb2.GenerateRequest, float]:
        """What to send at this point, with `upload` if there is one, and the seconds left for it."""
        self._is_call_started = False
        request = self._next_message()
        self.upload = None
        if self._task is not None and self._brings_weights:
            self.upload = TaskUpload(request, self._task)
        return request, self._attempts.remaining_s

    def _next_message(self) -> generation_pb2.GenerateRequest:
        if self._started_message is None:
            if self._task is None or self._brings_weights:
                return self._request
            return self._task.pinned(self._request)
        for completion in self._completions:
            completion.begin_call(is_repetition=not self._is_resumable)
        if not self._is_resumable:
            return repetition(self._request, self._started_message)
        return continuation(self._request, self._started_message, self._completions[0].token_ids)

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
        if index >= len(self._completions):
            raise _broken_promise(f"completion {index} of a request for {len(self._completions)}")
        completion = self._completions[index]
        if completion.has_ended_here:
            raise _broken_promise(f"{event} after the end of completion {index}")
        if event == "finished":
            return completion.fold_finished(response.finished, self.started.adapter_digest)
        chunk = completion.fold_delta(response.delta, self.started.adapter_digest)
        if chunk is not None and chunk.token_ids:
            self._attempts.progressed()
        return chunk

    def after_call(self, error: MotetError | None) -> float | None:
        """Seconds to wait before `next_request` after a call that ended in order (None), or with `error`.

        Returns None where the stream has ended, and raises what is final. The user did not cause the error.
        1. Every completion has ended: so has the stream, whatever became of the connection.
        2. The call ended in order without that: the server's stream cannot be trusted.
        3. The time is over, or the weights of a LoRA task could not be sent: that is final.
        4. The request named a LoRA task that is not cached, and its weights are here: it is sent again with them.
        5. The server has no room for a continuation: it is sent again while the time lasts.
        6. Otherwise Attempts decides: no server was reached, or the server failed the call.
        """
        if self.started is not None and all(completion.finished is not None for completion in self._completions):
            return None
        if error is None:
            raise self._missing_end()
        if isinstance(error, DeadlineExceeded):
            raise self._timed_out() from error
        if self.upload is not None and self.upload.failure is not None:
            raise self.upload.failure from error
        if self._task is not None and self.upload is None and error.reason == NOT_CACHED:
            self._brings_weights = True
            return 0.0
        if isinstance(error, ResourceExhausted) and self.started is not None and not self._is_call_started:
            return self._attempts.when_there_is_room(error)
        return self._attempts.after(error, is_repeatable=True)

    def text(self) -> str:
        """All text of the first completion so far."""
        return "".join(self._completions[0].text_parts)

    def result(self) -> Generation:
        """All completions. Raises Cancelled if the stream was closed before its end."""
        completions = self.completions
        if self.started is None or len(completions) < len(self._completions):
            raise Cancelled("the stream was closed before its end", reason="CANCELLED")
        first = completions[0]
        return Generation(first.text, first.token_ids, self.started, first.finished, completions)

    def _missing_end(self) -> DataLoss:
        completion = next(completion for completion in self._completions if completion.finished is None)
        num_tokens = len(completion.token_ids)
        return _broken_promise(
            f"the stream ended after {num_tokens} tokens without saying why completion {completion.index} did"
        )

    def _timed_out(self) -> DeadlineExceeded:
        num_tokens = sum(len(completion.token_ids) for completion in self._completions)
        if not num_tokens:
            return self._attempts.timed_out("no token came")
        return self._attempts.timed_out(f"the completion had not ended, {num_tokens} tokens had come")

    def _fold_started(self, message: generation_pb2.GenerationStarted) -> None:
        if self._is_call_started:
            raise _broken_promise("started twice")
        self._is_call_started = True
        self._brings_weights = False  # the server has them, at least at this moment
        first = self._started_message
        if first is None:
            started, num_requested = started_from(message), self._request.decoding.n or 1
            if started.n != num_requested:
                raise _broken_promise(f"{started.n} completions where {num_requested} were requested")
            self._started_message, self.started = message, started
            self._completions = [_CompletionState(index) for index in range(self.started.n)]
            if self._task is not None:
                self._task.digest = message.adapter_digest
        elif (change := what_changed(first, message)) is not None:
            name, value, before = change
            raise _broken_promise(f"continued with {name} {value}, not {before}")


class _CompletionState:
    """Everything received of one completion."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finished: Finished | None = None
        self.has_ended_here = False  # this call got its end
        # Invariant: a server that replays token_ids has released exactly the text in text_parts less _loose_text.
        self.token_ids: list[int] = []
        self.text_parts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._loose_text = ""  # text that came without tokens, after the last token
        # What this call sends once more: for a continuation the loose text, for a repetition all text.
        self._repeated_text = ""
        self._is_repetition = False
        self._position = 0  # tokens that this call covers; below len(token_ids) while it repeats known ones

    def whole(self, finished: Finished) -> Completion:
        """The completion, which has ended."""
        return Completion(self.index, "".join(self.text_parts), tuple(self.token_ids), finished, tuple(self._logprobs))

    def begin_call(self, *, is_repetition: bool) -> None:
        """The next call goes on after the known tokens, or repeats them first."""
        self.has_ended_here = False
        self._is_repetition = is_repetition
        self._position = 0 if is_repetition else len(self.token_ids)
        self._repeated_text = "".join(self.text_parts) if is_repetition else self._loose_text

    def fold_delta(self, delta: generation_pb2.GenerationDelta, adapter_digest: str) -> Chunk | None:
        """What is new in it; None if nothing is."""
        if delta.token_offset != self._position:
            raise _broken_promise(
                f"token_offset {delta.token_offset} where {self._position} was due in completion {self.index}"
            )
        offset = len(self.token_ids)
        num_known = min(offset - self._position, len(delta.token_ids))
        if delta.token_ids[:num_known] != self.token_ids[self._position : self._position + num_known]:
            raise _broken_promise(f"other tokens than before from {self._position} on in completion {self.index}")
        self._position += len(delta.token_ids)
        token_ids, text = tuple(delta.token_ids[num_known:]), self._without_repetition(delta.text)
        if not text and not token_ids:
            return None
        if self.finished is not None:
            raise _broken_promise(f"more than before its end in completion {self.index}")
        logprobs = logprobs_from(delta.logprobs)[num_known:]
        if token_ids:
            self.token_ids.extend(token_ids)
            self._logprobs.extend(logprobs)
            self._loose_text = self._repeated_text
        else:
            self._loose_text += text
        self.text_parts.append(text)
        return Chunk(
            text=text,
            token_ids=token_ids,
            token_offset=offset,
            adapter_digest=adapter_digest,
            index=self.index,
            logprobs=logprobs,
        )

    def fold_finished(self, message: generation_pb2.GenerationFinished, adapter_digest: str) -> Chunk | None:
        """The last chunk; None where the completion had ended before this call, which only repeats it."""
        self.has_ended_here = True
        if self._position < len(self.token_ids) or (self._is_repetition and self._repeated_text):
            raise _broken_promise(
                f"the end after {self._position} tokens, before all that was returned once, in completion {self.index}"
            )
        if self.finished is not None:
            return None
        finished = finished_from(message)
        if finished.cumulative_logprob is None and self._logprobs:
            # A continued stream: its server knew the last part alone.
            total = math.fsum(returned.logprob for returned in self._logprobs)
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
        """`text` less what broken calls had sent already.

        Worked example: tokens [5, 6], text "ab" then "c" without tokens, broken. The continuation after [5, 6]
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

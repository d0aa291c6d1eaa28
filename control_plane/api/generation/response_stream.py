"""Turns what the fleet delivers for one request into the messages of its stream, completion by completion.

The tokens of a completion go out at once, unless completions are chosen at the end (best_of, beam search): then all are
kept until all have ended. Detokenises and looks for stop strings on the way; decides nothing else.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from motet.v1 import generation_pb2, types_pb2

from control_plane.api.generation.kept_deltas import KeptDeltas
from control_plane.api.generation.preconditions import prompt_sha256
from control_plane.api.generation.request import CheckedRequest
from control_plane.api.generation.sampling_params import decoding_message, sampling_message
from control_plane.api.text.stream import TextStream
from control_plane.api.wire import FINISH_REASONS, add_logprobs, duration, timestamp
from control_plane.fleet.requests.streams import JobEvent
from control_plane.scheduler.types import FinishReason, Request, TokenLogprobs, sample_seed

# Tokens, and log-probabilities of the prompt, that are processed before other tasks get a turn of the event loop.
MAX_TOKENS_AT_ONCE = 256
MAX_LOGPROBS_AT_ONCE = 2048

# As the audit log has them.
_NAMES: dict[int, str] = {
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_STOP_TOKEN: "stop_token",
    types_pb2.FINISH_REASON_STOP_STRING: "stop_string",
}


# What goes out together: tokens, text, and log-probabilities of the tokens where there are any. A bare tuple: one is
# made per token.
_Gain = tuple[Sequence[int], str, Sequence[TokenLogprobs] | None]


@dataclass(slots=True, eq=False)
class _Completion:
    """One completion of the request, and what is known of it."""

    index: int
    text: TextStream
    num_tokens: int = 0  # generated so far, a resumed stream's earlier ones included
    first_token_s: float | None = None
    ended_s: float = 0.0
    sum_logprobs: float = 0.0
    score: float | None = None
    reason: int | None = None  # why it ended
    stop_string: str = ""
    kept: KeptDeltas = field(default_factory=KeptDeltas)  # where completions are chosen at the end

    def take(self, event: JobEvent) -> _Gain:
        """Take an event and return what can be delivered. The completion has ended if `reason` is set then."""
        token_ids, finish_reason, logprobs = event.token_ids, event.finish_reason, event.logprobs
        # A stop token counts; its text is delivered where the client wants it.
        is_stopped = finish_reason is FinishReason.STOP_TOKEN and not self.text.includes_stop
        num_text_tokens = len(token_ids) - is_stopped
        piece = self.text.push(token_ids[:num_text_tokens])
        text, stop_string = piece.text, piece.stop_string
        if stop_string is not None:
            token_ids = token_ids[: piece.num_tokens]
        if finish_reason is not None and stop_string is None:
            flushed = self.text.finish()
            text, stop_string = text + flushed.text, flushed.stop_string
        self.num_tokens += len(token_ids)
        if logprobs:
            logprobs = logprobs[: len(token_ids)]
            for entry in logprobs:  # one by one: the sum's last bits do not depend on how tokens were gathered
                self.sum_logprobs += entry.logprob
        if event.score is not None:
            self.score = event.score
        if stop_string is not None:
            self.end(types_pb2.FINISH_REASON_STOP_STRING, stop_string)
        elif finish_reason is not None:
            self.end(FINISH_REASONS[finish_reason])
        return token_ids, text, logprobs

    async def resume(self, token_ids: Sequence[int], *, is_stopped: bool, is_full: bool) -> None:
        """Bring the text to where the broken stream ended. The completion ends here if `token_ids` are all of it."""
        text_ids = token_ids[:-1] if is_stopped and not self.text.includes_stop else token_ids
        self.num_tokens = len(token_ids)
        for start in range(0, len(text_ids), MAX_TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            piece = self.text.push(text_ids[start : start + MAX_TOKENS_AT_ONCE])
            if piece.stop_string is not None:
                self.num_tokens = start + piece.num_tokens
                self.end(types_pb2.FINISH_REASON_STOP_STRING, piece.stop_string)
                return
        if is_stopped or is_full:
            flushed = self.text.finish()  # it went out with the last token already
            if flushed.stop_string is not None:
                self.end(types_pb2.FINISH_REASON_STOP_STRING, flushed.stop_string)
            else:
                self.end(types_pb2.FINISH_REASON_STOP_TOKEN if is_stopped else types_pb2.FINISH_REASON_LENGTH)

    def end(self, reason: int, stop_string: str = "") -> None:
        self.reason, self.stop_string = reason, stop_string

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / self.num_tokens if self.num_tokens else -math.inf


class ResponseStream:
    """The messages of one request's stream, in order."""

    def __init__(
        self,
        *,
        client_request_id: str,
        adapters: Sequence[generation_pb2.AdapterUse],
        tenant: str,
        checked: CheckedRequest,
        model_fingerprint: str,
        render_time_s: float | None,
        request: Request,
        vocab_size: int,
        make_text: Callable[[], TextStream],
        clock: Callable[[], float],
        keeps_text: bool = False,
        spell: Callable[[int], bytes] | None = None,
    ) -> None:
        """`keeps_text`: `texts` has the completions at the end. `spell`: the bytes of a token, if they are returned."""
        self._spell = spell
        self.request_id = client_request_id
        self._texts: list[list[str]] | None = [[] for _ in range(checked.decoding.num_indices)] if keeps_text else None
        self._adapters = adapters
        self._tenant = tenant
        self._checked = checked
        self._model_fingerprint = model_fingerprint
        self._render_time_s = render_time_s
        self._request = request
        self._vocab_size = vocab_size
        self._clock = clock
        self._decoding = checked.decoding
        self._is_ranked = checked.decoding.is_ranked
        self._completions = [
            _Completion(index, make_text(), kept=KeptDeltas(spell)) for index in range(checked.decoding.num_indices)
        ]
        self._num_running = len(self._completions)
        self._is_started = False
        self._num_cached_tokens = 0
        self._queue_time_s = 0.0
        self._first = generation_pb2.GenerateResponse()  # becomes `started`
        # The log-probabilities of the first tokens of a resumed stream are not known here.
        self._returns_sum = checked.sampling.num_logprobs is not None and not request.generated_token_ids

    @property
    def is_finished(self) -> bool:
        """Whether every completion has ended and all messages were made."""
        return self._num_running == 0

    @property
    def adapters(self) -> Sequence[generation_pb2.AdapterUse]:
        """The adapters of the request with their versions; empty for the base model."""
        return self._adapters

    @property
    def finish_reasons(self) -> list[str]:
        """Why the completions that have ended did, by index."""
        reasons = (completion.reason for completion in self._completions)
        return [_NAMES[reason] for reason in reasons if reason is not None]

    @property
    def first_token_s(self) -> float | None:
        """When the first token of any completion came; None: none did."""
        times = [completion.first_token_s for completion in self._completions if completion.first_token_s is not None]
        return min(times, default=None)

    @property
    def texts(self) -> list[str]:
        """The text that each completion gained, by index, those that are not returned included."""
        return ["".join(pieces) for pieces in self._texts or ()]

    async def resume(self) -> bool:
        """Continue from the tokens that a broken stream had delivered. True if those are all tokens."""
        token_ids = self._request.generated_token_ids
        if not token_ids:
            return False
        (completion,) = self._completions
        await completion.resume(
            token_ids,
            is_stopped=token_ids[-1] in self._request.stop_token_ids,
            is_full=len(token_ids) >= self._request.max_tokens,
        )
        return completion.reason is not None

    def finished_by_resume(self) -> list[generation_pb2.GenerateResponse]:
        """The whole stream where nothing is left to generate. The client has the text already."""
        (completion,) = self._completions
        completion.ended_s = self._clock()
        self._num_running = 0
        return [self._started(), self._finished(completion, 0)]

    async def take_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the log-probabilities of the prompt to `started`, in pieces. Call it before `take` of the same event."""
        num_at_once = max(MAX_LOGPROBS_AT_ONCE // (1 + len(logprobs[0].top)), 1)
        for start in range(0, len(logprobs), num_at_once):
            if start:
                await asyncio.sleep(0)
            add_logprobs(self._first.started.prompt_logprobs, logprobs[start : start + num_at_once], self._spell)

    def take(self, event: JobEvent, cancel_index: Callable[[int], None]) -> Iterable[generation_pb2.GenerateResponse]:
        """The messages for one event of the fleet, or for a part of one.

        `cancel_index` is called with the index of a completion that a stop string ended. Where completions are chosen
        at the end, each message is made when the caller takes it: let other tasks run between them.
        """
        completion = self._completions[event.index]
        if completion.reason is not None or not (event.token_ids or event.finish_reason):
            return []
        if completion.first_token_s is None:
            completion.first_token_s = self._clock()
            self._num_cached_tokens, self._queue_time_s = event.num_cached_tokens, event.queue_time_s
        token_ids, text, logprobs = completion.take(event)
        if self._texts is not None:
            self._texts[event.index].append(text)
        if completion.reason is not None:
            completion.ended_s = self._clock()
            self._num_running -= 1
            if event.finish_reason is None:
                cancel_index(completion.index)
        if self._is_ranked:
            is_scored = self._decoding.beam is not None or len(logprobs or ()) == len(token_ids)
            assert is_scored, f"a sample of request {self._request.request_id} has no log-probabilities to rank it by"
            wants_logprobs = self._checked.sampling.num_logprobs is not None
            completion.kept.add(token_ids, text, logprobs if wants_logprobs else None)
            return [] if self._num_running else self._chosen()
        messages = [] if self._is_started else [self._started()]
        if token_ids or text:
            gain = token_ids, text, logprobs
            messages.append(_delta(gain, completion.index, completion.num_tokens, self._spell))
        if completion.reason is not None:
            messages.append(self._finished(completion, completion.index))
        return messages

    def _chosen(self) -> Iterator[generation_pb2.GenerateResponse]:
        """All messages of a request whose completions are chosen at the end, best first."""
        completions = self._completions  # those of a beam search are in order, best first
        if self._decoding.beam is None:
            completions = sorted(completions, key=lambda completion: -completion.mean_logprob)
        yield self._started()
        for index, completion in enumerate(completions[: self._decoding.n]):
            yield from completion.kept.messages(index)
            yield self._finished(completion, index)

    def _started(self) -> generation_pb2.GenerateResponse:
        self._is_started = True
        checked, message = self._checked, self._first
        message.started.MergeFrom(
            generation_pb2.GenerationStarted(
                request_id=self.request_id,
                adapter=self._adapters[0].name if len(self._adapters) == 1 else "",
                adapter_digest=self._adapters[0].digest if len(self._adapters) == 1 else "",
                adapters=self._adapters if checked.adapters.is_list else (),
                lora_task_id=checked.adapters.task_id,
                sampling=sampling_message(checked.sampling, self._vocab_size),
                stopping=types_pb2.StoppingParams(
                    max_tokens=self._request.max_tokens,
                    stop=checked.stop,
                    stop_token_ids=sorted(checked.stop_token_ids),
                    ignore_eos=checked.ignore_eos,
                    min_tokens=checked.sampling.min_tokens,
                ),
                prompt_tokens=len(self._request.prompt_token_ids),
                cached_tokens=self._num_cached_tokens,
                queue_time=duration(self._queue_time_s),
                decoding=decoding_message(self._decoding),
                tenant=self._tenant,
                model_fingerprint=self._model_fingerprint,
                prompt_sha256=prompt_sha256(self._request.prompt_token_ids),
                render_time=None if self._render_time_s is None else timestamp(self._render_time_s),
            )
        )
        return message

    def _finished(self, completion: _Completion, index: int) -> generation_pb2.GenerateResponse:
        assert completion.reason is not None, f"completion {completion.index} has not ended"
        arrival_s = self._request.arrival_s
        message = generation_pb2.GenerateResponse(
            finished=generation_pb2.GenerationFinished(
                index=index,
                reason=completion.reason,  # type: ignore[arg-type]  # the stub's enum type is not that of its values
                stop_string=completion.stop_string,
                usage=types_pb2.Usage(
                    prompt_tokens=len(self._request.prompt_token_ids),
                    cached_tokens=self._num_cached_tokens,
                    completion_tokens=completion.num_tokens,
                ),
                timings=types_pb2.Timings(
                    queue_time=duration(self._queue_time_s),
                    time_to_first_token=duration((completion.first_token_s or completion.ended_s) - arrival_s),
                    total_time=duration(completion.ended_s - arrival_s),
                ),
                seed=self._seed_of(completion),
                score=completion.score,
            )
        )
        beam = self._decoding.beam
        if beam is not None and completion.num_tokens:
            assert completion.score is not None, f"completion {completion.index} of a beam search has no score"
            message.finished.cumulative_logprob = completion.score * completion.num_tokens**beam.length_penalty
        elif self._returns_sum:
            message.finished.cumulative_logprob = completion.sum_logprobs
        return message

    def _seed_of(self, completion: _Completion) -> int:
        seed = self._request.sampling.seed
        return seed if self._decoding.beam is not None else sample_seed(seed, completion.index)


def parts_of(event: JobEvent) -> Iterator[JobEvent]:
    """An event with many tokens, such as the end of a beam search, as several: each takes a moment to process."""
    num_tokens = len(event.token_ids)
    if num_tokens <= MAX_TOKENS_AT_ONCE:
        yield event
        return
    for start in range(0, num_tokens, MAX_TOKENS_AT_ONCE):
        end = start + MAX_TOKENS_AT_ONCE
        is_last = end >= num_tokens
        yield replace(
            event,
            token_ids=event.token_ids[start:end],
            finish_reason=event.finish_reason if is_last else None,
            logprobs=event.logprobs and event.logprobs[start:end],
            score=event.score if is_last else None,
        )


def _delta(
    gain: _Gain, index: int, num_tokens: int, spell: Callable[[int], bytes] | None
) -> generation_pb2.GenerateResponse:
    """The message for what a completion gained. `num_tokens`: of the completion, including those gained."""
    # Filled in place: made once per token, and a delta passed to the constructor is copied.
    message = generation_pb2.GenerateResponse()
    token_ids, text, logprobs = gain
    delta = message.delta
    if index:
        delta.index = index
    delta.token_offset = num_tokens - len(token_ids)
    delta.token_ids.extend(token_ids)
    delta.text = text
    delta.completion_tokens = num_tokens
    if logprobs:
        add_logprobs(delta.logprobs, logprobs, spell)
    return message

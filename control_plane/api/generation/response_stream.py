"""Turns what the fleet delivers for one request into the messages of its stream, answer by answer.

Answers that are told as they come go out at once; those that are chosen at the end (best_of, beam search) are kept
until all of them have ended. Detokenises and looks for stop strings on the way; decides nothing else.
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
from control_plane.fleet.requests.jobs import JobEvent
from control_plane.scheduler.types import FinishReason, Request, TokenLogprobs, sample_seed

# Tokens, and log-probabilities of the prompt, that are worked on before others have their turn of the event loop.
MAX_TOKENS_AT_ONCE = 256
MAX_LOGPROBS_AT_ONCE = 2048


# Tokens and text that go out together; log-probabilities of the tokens where there are any. A bare tuple: one is made
# per token.
_Piece = tuple[Sequence[int], str, Sequence[TokenLogprobs] | None]


@dataclass(slots=True, eq=False)
class _Answer:
    """One index of the request and what is known of it."""

    index: int
    text: TextStream
    num_tokens: int = 0  # generated so far, a resumed stream's earlier ones included
    first_token_s: float | None = None
    ended_s: float = 0.0
    sum_logprobs: float = 0.0
    score: float | None = None
    reason: int | None = None  # why it ended
    stop_string: str = ""
    kept: KeptDeltas = field(default_factory=KeptDeltas)  # of answers that are told at the end

    def take(self, event: JobEvent) -> _Piece:
        """What an event makes deliverable; it has ended if `reason` is set then."""
        token_ids, finish_reason, logprobs = event.token_ids, event.finish_reason, event.logprobs
        # A stop token counts, its text is not delivered.
        num_spoken = len(token_ids) - (1 if finish_reason is FinishReason.STOP_TOKEN else 0)
        piece = self.text.push(token_ids[:num_spoken])
        text, stop_string = piece.text, piece.stop_string
        if stop_string is not None:
            token_ids = token_ids[: piece.num_tokens]
        if finish_reason is not None and stop_string is None:
            flushed = self.text.finish()
            text, stop_string = text + flushed.text, flushed.stop_string
        self.num_tokens += len(token_ids)
        if logprobs:
            logprobs = logprobs[: len(token_ids)]
            self.sum_logprobs += sum(told.logprob for told in logprobs)
        if event.score is not None:
            self.score = event.score
        if stop_string is not None:
            self.end(types_pb2.FINISH_REASON_STOP_STRING, stop_string)
        elif finish_reason is not None:
            self.end(FINISH_REASONS[finish_reason])
        return token_ids, text, logprobs

    async def resume(self, token_ids: Sequence[int], *, is_stopped: bool, is_full: bool) -> None:
        """Bring the text to where the broken stream's stood; it ends here if that stream had had its last token."""
        spoken = token_ids[:-1] if is_stopped else token_ids
        self.num_tokens = len(token_ids)
        for start in range(0, len(spoken), MAX_TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            piece = self.text.push(spoken[start : start + MAX_TOKENS_AT_ONCE])
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


class GenerationEvents:
    """The messages of one request's stream, in order."""

    def __init__(
        self,
        *,
        label: str,
        adapter_name: str,
        tenant: str,
        checked: CheckedRequest,
        model_fingerprint: str,
        render_time_s: float | None,
        work: Request,
        vocab_size: int,
        make_text: Callable[[], TextStream],
        clock: Callable[[], float],
    ) -> None:
        self._label = label
        self._adapter_name = adapter_name
        self._tenant = tenant
        self._checked = checked
        self._model_fingerprint = model_fingerprint
        self._render_time_s = render_time_s
        self._work = work
        self._vocab_size = vocab_size
        self._clock = clock
        self._decoding = checked.decoding
        self._is_ranked = checked.decoding.is_ranked
        self._answers = [_Answer(index, make_text()) for index in range(checked.decoding.num_indices)]
        self._num_running = len(self._answers)
        self._is_started = False
        self._num_cached_tokens = 0
        self._queue_time_s = 0.0
        self._first = generation_pb2.GenerateResponse()  # becomes `started`
        # Tokens of a resumed stream's beginning have log-probabilities that are not known here.
        self._tells_sum = checked.sampling.num_logprobs is not None and not work.generated_token_ids

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended, and all that is to be told of it was."""
        return self._num_running == 0

    async def resume(self) -> bool:
        """Take on what a broken stream had told; True if it had had its last token already."""
        token_ids = self._work.generated_token_ids
        if not token_ids:
            return False
        (answer,) = self._answers
        await answer.resume(
            token_ids,
            is_stopped=token_ids[-1] in self._work.stop_token_ids,
            is_full=len(token_ids) >= self._work.max_tokens,
        )
        return answer.reason is not None

    def finished_by_resume(self) -> list[generation_pb2.GenerateResponse]:
        """The whole stream where nothing was left to generate. Its text went out with the last token already."""
        (answer,) = self._answers
        answer.ended_s = self._clock()
        self._num_running = 0
        return [self._started(), self._finished(answer, 0)]

    async def take_prompt_logprobs(self, told: Sequence[TokenLogprobs]) -> None:
        """Make the part of `started` that they are, in pieces. Before `take` is called for their event."""
        num_at_once = max(MAX_LOGPROBS_AT_ONCE // (1 + len(told[0].top)), 1)
        for start in range(0, len(told), num_at_once):
            if start:
                await asyncio.sleep(0)
            add_logprobs(self._first.started.prompt_logprobs, told[start : start + num_at_once])

    def take(self, event: JobEvent, give_up: Callable[[int], None]) -> Iterable[generation_pb2.GenerateResponse]:
        """The messages for one event of the fleet, or for a part of one.

        `give_up` is called with an index that a stop string ended. The messages of answers that are told at the end
        are made one by one as they are asked for: let others have their turn of the event loop between them.
        """
        answer = self._answers[event.index]
        if answer.reason is not None or not (event.token_ids or event.finish_reason):
            return []
        if answer.first_token_s is None:
            answer.first_token_s = self._clock()
            self._num_cached_tokens, self._queue_time_s = event.num_cached_tokens, event.queue_time_s
        piece = answer.take(event)
        if answer.reason is not None:
            answer.ended_s = self._clock()
            self._num_running -= 1
            if event.finish_reason is None:
                give_up(answer.index)
        if self._is_ranked:
            is_scored = self._decoding.beam is not None or len(piece[2] or ()) == len(piece[0])
            assert is_scored, f"a sample of request {self._work.request_id} is to be ranked without log-probabilities"
            tells_logprobs = self._checked.sampling.num_logprobs is not None
            answer.kept.add(piece[0], piece[1], piece[2] if tells_logprobs else None)  # their sum is enough to rank by
            return [] if self._num_running else self._chosen()
        messages = [] if self._is_started else [self._started()]
        if piece[0] or piece[1]:
            messages.append(_delta(piece, answer.index, answer.num_tokens))
        if answer.reason is not None:
            messages.append(self._finished(answer, answer.index))
        return messages

    def _chosen(self) -> Iterator[generation_pb2.GenerateResponse]:
        """All messages of a request whose answers are told at the end, best first."""
        answers = self._answers  # of a beam search: best first as they come
        if self._decoding.beam is None:
            answers = sorted(answers, key=lambda answer: -answer.mean_logprob)
        yield self._started()
        for index, answer in enumerate(answers[: self._decoding.n]):
            yield from answer.kept.messages(index)
            yield self._finished(answer, index)

    def _started(self) -> generation_pb2.GenerateResponse:
        self._is_started = True
        checked, message = self._checked, self._first
        message.started.MergeFrom(
            generation_pb2.GenerationStarted(
                request_id=self._label,
                adapter=self._adapter_name,
                adapter_digest="" if self._work.adapter is None else self._work.adapter.digest,
                sampling=sampling_message(checked.sampling, self._vocab_size),
                stopping=types_pb2.StoppingParams(
                    max_tokens=self._work.max_tokens,
                    stop=checked.stop,
                    stop_token_ids=sorted(checked.stop_token_ids),
                    ignore_eos=checked.ignore_eos,
                    min_tokens=checked.sampling.min_tokens,
                ),
                prompt_tokens=len(self._work.prompt_token_ids),
                cached_tokens=self._num_cached_tokens,
                queue_time=duration(self._queue_time_s),
                decoding=decoding_message(self._decoding),
                tenant=self._tenant,
                model_fingerprint=self._model_fingerprint,
                prompt_sha256=prompt_sha256(self._work.prompt_token_ids),
                render_time=None if self._render_time_s is None else timestamp(self._render_time_s),
            )
        )
        return message

    def _finished(self, answer: _Answer, index: int) -> generation_pb2.GenerateResponse:
        assert answer.reason is not None, f"answer {answer.index} has not ended"
        arrival_s = self._work.arrival_s
        message = generation_pb2.GenerateResponse(
            finished=generation_pb2.GenerationFinished(
                index=index,
                reason=answer.reason,  # type: ignore[arg-type]  # the stub's enum type is not that of its values
                stop_string=answer.stop_string,
                usage=types_pb2.Usage(
                    prompt_tokens=len(self._work.prompt_token_ids),
                    cached_tokens=self._num_cached_tokens,
                    completion_tokens=answer.num_tokens,
                ),
                timings=types_pb2.Timings(
                    queue_time=duration(self._queue_time_s),
                    time_to_first_token=duration((answer.first_token_s or answer.ended_s) - arrival_s),
                    total_time=duration(answer.ended_s - arrival_s),
                ),
                seed=self._seed_of(answer),
                score=answer.score,
            )
        )
        beam = self._decoding.beam
        if beam is not None and answer.num_tokens:
            assert answer.score is not None, f"answer {answer.index} of a beam search has no score"
            message.finished.cumulative_logprob = answer.score * answer.num_tokens**beam.length_penalty
        elif self._tells_sum:
            message.finished.cumulative_logprob = answer.sum_logprobs
        return message

    def _seed_of(self, answer: _Answer) -> int:
        seed = self._work.sampling.seed
        return seed if self._decoding.beam is not None else sample_seed(seed, answer.index)


def parts_of(event: JobEvent) -> Iterator[JobEvent]:
    """An event with many tokens, such as the end of a beam search, as several: each is the work of a moment."""
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


def _delta(piece: _Piece, index: int, num_tokens: int) -> generation_pb2.GenerateResponse:
    """`num_tokens`: of this answer, those of the piece included."""
    # Filled in place: made once per token, and a delta passed to the constructor is copied.
    message = generation_pb2.GenerateResponse()
    token_ids, text, logprobs = piece
    delta = message.delta
    if index:
        delta.index = index
    delta.token_offset = num_tokens - len(token_ids)
    delta.token_ids.extend(token_ids)
    delta.text = text
    delta.completion_tokens = num_tokens
    if logprobs:
        add_logprobs(delta.logprobs, logprobs)
    return message

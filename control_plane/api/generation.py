"""GenerationService: one request, one stream.

Checks, tokenises, resolves the adapter once, submits to the fleet and turns what comes back into events. Nothing
is sent before the first token: initial metadata would commit the RPC and switch client retries off.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from motet.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from control_plane.api.gate import DrainGate
from control_plane.api.generation_request import CheckedRequest, check_request, effective_max_tokens
from control_plane.api.parts import Fleet, Registry
from control_plane.api.text.codec import TextCodec
from control_plane.api.text.stream import TextStream
from control_plane.api.validation import refuse
from control_plane.api.wire import FINISH_REASONS, duration
from control_plane.errors import MotetError
from control_plane.scheduler.types import FinishReason, Request

logger = logging.getLogger(__name__)

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the service needs to know of the base model."""

    vocab_size: int
    max_model_len: int  # prompt and completion together, tokens
    eos_token_ids: tuple[int, ...]


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """See protos/motet/v1/generation.proto."""

    def __init__(
        self,
        *,
        model: ModelFacts,
        codec: TextCodec,
        registry: Registry,
        fleet: Fleet,
        gate: DrainGate,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._model = model
        self._codec = codec
        self._registry = registry
        self._fleet = fleet
        self._gate = gate
        self._clock = clock
        self._draw_seed = draw_seed

    async def Generate(  # noqa: N802 - the stub's name
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream one generation."""
        arrival_s = self._clock()
        remaining_s = context.time_remaining()
        self._gate.check()
        checked = check_request(request, vocab_size=self._model.vocab_size, draw_seed=self._draw_seed)
        if checked.stop:
            self._codec.require_stop_strings()
        resolved = self._registry.resolve(checked.adapter_id, checked.adapter_digest) if checked.adapter_id else None
        prompt = await self._prompt_token_ids(checked)
        max_tokens = effective_max_tokens(checked, len(prompt), self._model.max_model_len)
        eos = frozenset() if checked.ignore_eos else frozenset(self._model.eos_token_ids)
        work = Request(
            request_id=self._fleet.next_request_id(),
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            generated_token_ids=checked.resume_from,
            adapter=None if resolved is None else resolved.ref,
            sampling=checked.sampling,
            stop_token_ids=checked.stop_token_ids | eos,
            cache_salt=checked.cache_salt,
            arrival_s=arrival_s,
            deadline_s=None if remaining_s is None else arrival_s + remaining_s,
        )
        events = _Events(
            label=checked.request_id or f"req-{work.request_id}",
            adapter_name="" if resolved is None else f"adapters/{resolved.adapter_id}",
            checked=checked,
            work=work,
            vocab_size=self._model.vocab_size,
            text=TextStream(self._codec.detokenizer(), checked.stop),
            clock=self._clock,
        )
        if events.resume():
            # The client had every token already; only the end of its stream was lost.
            for message in events.finished_by_resume():
                yield message
            return
        job = self._fleet.submit(work)
        try:
            async for event in job:
                for message in events.take(
                    event.token_ids, event.finish_reason, event.num_cached_tokens, event.queue_time_s
                ):
                    yield message
                if events.is_finished:
                    return
        finally:
            job.cancel()
        raise MotetError(f"the stream of request {work.request_id} ended without a finish reason")

    async def _prompt_token_ids(self, checked: CheckedRequest) -> Sequence[int]:
        if checked.token_ids is not None:
            return checked.token_ids
        if checked.text is not None:
            ids = await self._codec.encode_text(checked.text)
        else:
            assert checked.messages is not None
            ids = await self._codec.encode_chat(checked.messages)
        if not ids:
            raise refuse(checked.input_field, "no token is left after tokenisation; a prompt needs at least one")
        if max(ids) >= self._model.vocab_size:
            raise refuse(
                checked.input_field,
                f"holds the token {max(ids)}, which the model, of vocabulary size {self._model.vocab_size}, lacks",
            )
        return ids


class _Events:
    """Turns what the fleet delivers for one request into the messages of its stream."""

    def __init__(
        self,
        *,
        label: str,
        adapter_name: str,
        checked: CheckedRequest,
        work: Request,
        vocab_size: int,
        text: TextStream,
        clock: Callable[[], float],
    ) -> None:
        self._label = label
        self._adapter_name = adapter_name
        self._checked = checked
        self._work = work
        self._vocab_size = vocab_size
        self._text = text
        self._clock = clock
        self._num_tokens = 0  # generated so far, a resumed stream's earlier ones included
        self._is_started = False
        self._num_cached_tokens = 0
        self._queue_time_s = 0.0
        self._first_token_s: float | None = None
        self._resume_end: tuple[int, str] | None = None
        self.is_finished = False

    def resume(self) -> bool:
        """Bring the text to where the broken stream's stood; True if that stream had had its last token already."""
        ids = self._work.generated_token_ids
        is_stopped = bool(ids) and ids[-1] in self._work.stop_token_ids
        piece = self._text.push(ids[:-1] if is_stopped else ids)
        if piece.stop_string is not None:
            self._num_tokens = piece.num_tokens
            self._resume_end = (types_pb2.FINISH_REASON_STOP_STRING, piece.stop_string)
            return True
        self._num_tokens = len(ids)
        if not is_stopped and len(ids) < self._work.max_tokens:
            return False
        reason = types_pb2.FINISH_REASON_STOP_TOKEN if is_stopped else types_pb2.FINISH_REASON_LENGTH
        flushed = self._text.finish()
        if flushed.stop_string is not None:
            self._resume_end = (types_pb2.FINISH_REASON_STOP_STRING, flushed.stop_string)
        else:
            self._resume_end = (reason, "")
        return True

    def finished_by_resume(self) -> list[generation_pb2.GenerateResponse]:
        """The whole stream where nothing was left to generate. Its text went out with the last token already."""
        assert self._resume_end is not None
        return [self._started(), self._finished(*self._resume_end)]

    def take(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, num_cached_tokens: int, queue_time_s: float
    ) -> list[generation_pb2.GenerateResponse]:
        """The messages for one event of the fleet."""
        messages = []
        if not self._is_started:
            if not token_ids and finish_reason is None:
                return []
            self._num_cached_tokens, self._queue_time_s = num_cached_tokens, queue_time_s
            self._first_token_s = self._clock()
            messages.append(self._started())
        # A stop token counts, its text is not delivered.
        num_spoken = len(token_ids) - (1 if finish_reason is FinishReason.STOP_TOKEN else 0)
        piece = self._text.push(token_ids[:num_spoken])
        text, stop_string = piece.text, piece.stop_string
        delivered = token_ids[: piece.num_tokens] if stop_string is not None else token_ids
        if finish_reason is not None and stop_string is None:
            flushed = self._text.finish()
            text, stop_string = text + flushed.text, flushed.stop_string
        if delivered or text:
            # Filled in place: made once per token, and a delta passed to the constructor is copied.
            message = generation_pb2.GenerateResponse()
            delta = message.delta
            delta.token_offset = self._num_tokens
            self._num_tokens += len(delivered)
            delta.token_ids.extend(delivered)
            delta.text = text
            delta.completion_tokens = self._num_tokens
            messages.append(message)
        if stop_string is not None:
            messages.append(self._finished(types_pb2.FINISH_REASON_STOP_STRING, stop_string))
        elif finish_reason is not None:
            messages.append(self._finished(FINISH_REASONS[finish_reason], ""))
        return messages

    def _started(self) -> generation_pb2.GenerateResponse:
        self._is_started = True
        sampling, checked = self._work.sampling, self._checked
        return generation_pb2.GenerateResponse(
            started=generation_pb2.GenerationStarted(
                request_id=self._label,
                adapter=self._adapter_name,
                adapter_digest="" if self._work.adapter is None else self._work.adapter.digest,
                sampling=types_pb2.SamplingParams(
                    temperature=sampling.temperature,
                    # Keeping all is keeping as many as there are: a value that a client may send back.
                    top_k=sampling.top_k or self._vocab_size,
                    top_p=sampling.top_p,
                    seed=sampling.seed,
                ),
                stopping=types_pb2.StoppingParams(
                    max_tokens=self._work.max_tokens,
                    stop=checked.stop,
                    stop_token_ids=sorted(checked.stop_token_ids),
                    ignore_eos=checked.ignore_eos,
                ),
                prompt_tokens=len(self._work.prompt_token_ids),
                cached_tokens=self._num_cached_tokens,
                queue_time=duration(self._queue_time_s),
            )
        )

    def _finished(self, reason: int, stop_string: str) -> generation_pb2.GenerateResponse:
        self.is_finished = True
        now_s = self._clock()
        arrival_s = self._work.arrival_s
        first_token_s = now_s if self._first_token_s is None else self._first_token_s
        return generation_pb2.GenerateResponse(
            finished=generation_pb2.GenerationFinished(
                index=0,
                reason=reason,  # type: ignore[arg-type]  # the stub's enum type is not that of its values
                stop_string=stop_string,
                usage=types_pb2.Usage(
                    prompt_tokens=len(self._work.prompt_token_ids),
                    cached_tokens=self._num_cached_tokens,
                    completion_tokens=self._num_tokens,
                ),
                timings=types_pb2.Timings(
                    queue_time=duration(self._queue_time_s),
                    time_to_first_token=duration(first_token_s - arrival_s),
                    total_time=duration(now_s - arrival_s),
                ),
                seed=self._work.sampling.seed,
            )
        )

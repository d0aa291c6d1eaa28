"""What is kept of one generation that ended: its record in the audit log, and its numbers among the metrics.

The record says who had what computed where, in how much time, and how it ended.

Collects nothing while tokens come: everything is read once, when the generation has ended. It has no text unless the
audit log is to have text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from control_plane.access.principal import BASE_MODEL
from control_plane.api.generation.request import CheckedRequest
from control_plane.api.generation.response_stream import ResponseStream
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog, reason_of
from control_plane.caller import Caller
from control_plane.errors import DeadlineExceeded
from control_plane.fleet.requests.streams import JobStream, Place
from control_plane.observers.ended_request import EndedRequest, Observer, RequestSettings
from control_plane.scheduler.types import Request


class GenerationRecord:
    """A context around one generation. On the way out it writes the record, however the generation ended.

    A request that the fleet does not take on is not a generation: it has no record, but its refusal has a line.
    """

    __slots__ = ("_audit", "_caller", "_checked", "_clock", "_observers", "_request", "_stream", "job")

    def __init__(
        self,
        audit: AuditLog,
        caller: Caller,
        checked: CheckedRequest,
        request: Request,
        stream: ResponseStream,
        clock: Callable[[], float],
        observers: Observer,
    ) -> None:
        self._audit = audit
        self._observers = observers
        self._caller = caller
        self._checked = checked
        self._request = request
        self._stream = stream
        self._clock = clock
        self.job: JobStream | None = None  # set once the fleet has taken the request on

    def __enter__(self) -> GenerationRecord:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self.job is None and error is not None:
            return
        request, now_s = self._request, self._clock()
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            if self._stream.is_finished:
                error = None  # the client had everything
            elif request.deadline_s is not None and now_s >= request.deadline_s:
                error = DeadlineExceeded("the client's deadline passed")
        if self._observers.is_on:
            self._count(error, now_s)
        if self._audit.is_on:
            self._write(error, now_s)

    def _count(self, error: BaseException | None, now_s: float) -> None:
        request, stream = self._request, self._stream
        facts = None if self.job is None else self.job.facts
        first_token_s = stream.first_token_s
        self._observers.ended(
            EndedRequest(
                tenant=request.account,
                adapters=[label_of(use.name) for use in stream.adapters],
                digests=[use.digest for use in stream.adapters],
                reasons=stream.finish_reasons if error is None else [reason_of(error)],
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=0 if facts is None else facts.num_cached_tokens,
                num_generated_tokens=0 if facts is None else facts.num_new_tokens,
                queue_s=None if facts is None else facts.queue_time_s,
                first_token_s=None if first_token_s is None else first_token_s - request.arrival_s,
                total_s=now_s - request.arrival_s,
                adapter_wait_s=None if facts is None else facts.adapter_wait_s,
                error="" if error is None else reason_of(error),
                request_id=stream.request_id,
                action=actions.GENERATE,
                workers=[] if facts is None else [place.worker_id for place in facts.places],
                caller=self._caller,
                settings=RequestSettings(
                    request.sampling, request.max_tokens, self._checked.decoding.n, self._checked.stop
                ),
            )
        )

    def _write(self, error: BaseException | None, now_s: float) -> None:
        more = self._numbers(now_s)
        num_text_bytes = 0
        if self._audit.has_text:
            more["text"] = text = self._text()
            num_text_bytes = size_of(text)
        uses = self._stream.adapters
        if len(uses) > 1 or any(use.scale != 1.0 for use in uses):
            more["adapters"] = [{"name": use.name, "digest": use.digest, "scale": use.scale} for use in uses]
        self._audit.generation(
            self._caller,
            error,
            action=actions.GENERATE,
            resource=",".join(use.name for use in uses) or BASE_MODEL,
            digest=",".join(use.digest for use in uses),
            request_id=self._stream.request_id,
            more=more,
            num_text_bytes=num_text_bytes,
        )

    def _numbers(self, now_s: float) -> dict[str, Any]:
        request, stream, job = self._request, self._stream, self.job
        facts = None if job is None else job.facts
        first_token_s = stream.first_token_s
        return {
            "fleet_request_id": request.request_id,
            "finish_reasons": stream.finish_reasons,
            "prompt_tokens": len(request.prompt_token_ids),
            "resumed_tokens": len(request.generated_token_ids),
            "cached_tokens": 0 if facts is None else facts.num_cached_tokens,
            "generated_tokens": 0 if facts is None else facts.num_new_tokens,
            "queue_time_s": None if facts is None else rounded(facts.queue_time_s),
            "time_to_first_token_s": None if first_token_s is None else rounded(first_token_s - request.arrival_s),
            "total_time_s": rounded(now_s - request.arrival_s),
            "workers": [] if facts is None else [place_of(place) for place in facts.places],
        }

    def _text(self) -> dict[str, Any]:
        checked = self._checked
        prompt: Any = checked.text
        if checked.conversation is not None:
            prompt = [dict(message) for message in checked.conversation.messages]
        elif checked.token_ids is not None:
            prompt = list(checked.token_ids)
        return {"prompt": prompt, "completions": self._stream.texts}


def label_of(resource: str) -> str:
    """An adapter's resource name as a label of metrics: "adapters/legal" gives "legal"."""
    return resource.removeprefix("adapters/")


def place_of(place: Place) -> dict[str, Any]:
    """Where tokens were computed, as the log has it."""
    slot = place.slot
    return {
        "worker_id": place.worker_id,
        "epoch": place.epoch,
        "slot": None if slot is None else slot.slot_idx,
        "slot_generation": None if slot is None else slot.generation,
    }


def rounded(seconds: float | None) -> float | None:
    """A time, to the microsecond."""
    return None if seconds is None else round(seconds, 6)


def size_of(value: Any) -> int:
    """About how many bytes of memory the texts and numbers in `value` take."""
    if isinstance(value, str):
        return len(value) * 4
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list):
        return 64 + sum(map(size_of, value))
    return 32

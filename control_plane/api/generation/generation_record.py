"""The audit log's record of one generation: who had what computed where, in how much time, and how it ended.

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
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import Caller
from control_plane.errors import DeadlineExceeded
from control_plane.fleet.requests.streams import JobStream, Place
from control_plane.scheduler.types import Request


class GenerationRecord:
    """A context around one generation. On the way out it writes the record, however the generation ended.

    A request that the fleet does not take on is no generation: it has no record, and the refusal has a line of its own.
    """

    __slots__ = ("_audit", "_caller", "_checked", "_clock", "_request", "_stream", "job")

    def __init__(
        self,
        audit: AuditLog,
        caller: Caller,
        checked: CheckedRequest,
        request: Request,
        stream: ResponseStream,
        clock: Callable[[], float],
    ) -> None:
        self._audit = audit
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
        if self._audit.is_on and (self.job is not None or error is None):
            self._write(error)

    def _write(self, error: BaseException | None) -> None:
        request, now_s = self._request, self._clock()
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            if self._stream.is_finished:
                error = None  # the client had everything
            elif request.deadline_s is not None and now_s >= request.deadline_s:
                error = DeadlineExceeded("the client's deadline passed")
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

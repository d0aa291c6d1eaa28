"""What is kept of one call that embeds or classifies: its record in the audit log, and its numbers among the metrics.

Everything is read once, when the call has ended. Like a generation's record, it has text only where that is on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from control_plane.access.principal import BASE_MODEL
from control_plane.api.generation.generation_record import place_of, rounded, size_of
from control_plane.api.pooling.pooled_inputs import PooledInputs
from control_plane.api.pooling.request import CheckedCall
from control_plane.audit.audit_log import AuditLog, reason_of
from control_plane.caller import Caller
from control_plane.errors import DeadlineExceeded
from control_plane.fleet.requests.streams import RunFacts
from control_plane.observers.ended_request import EndedRequest, Observer
from control_plane.scheduler.types import Request


class PoolingRecord:
    """A context around the computation of one call; it writes the record, however the call ended.

    A call of which the fleet took nothing on has no record: its refusal has a line of its own.
    """

    def __init__(
        self,
        audit: AuditLog,
        caller: Caller,
        action: str,
        request_id: str,
        checked: CheckedCall,
        requests: list[Request],
        inputs: PooledInputs,
        clock: Callable[[], float],
        observers: Observer,
    ) -> None:
        self._observers = observers
        self._audit = audit
        self._caller = caller
        self._action = action
        self._request_id = request_id
        self._checked = checked
        self._requests = requests
        self._inputs = inputs
        self._clock = clock

    def __enter__(self) -> PoolingRecord:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if not self._inputs.streams:
            return
        first, now_s = self._requests[0], self._clock()
        if isinstance(error, asyncio.CancelledError) and first.deadline_s is not None and now_s >= first.deadline_s:
            error = DeadlineExceeded("the client's deadline passed")
        facts = [stream.facts for stream in self._inputs.streams]
        if self._observers.is_on:
            self._count(facts, error, now_s)
        if self._audit.is_on:
            self._write(facts, error, now_s)

    def _count(self, facts: list[RunFacts], error: BaseException | None, now_s: float) -> None:
        first = self._requests[0]
        self._observers.ended(
            EndedRequest(
                tenant=first.account,
                adapters=[] if first.adapter is None else [self._checked.adapter.adapter_id],
                reasons=[self._action if error is None else reason_of(error)],
                num_prompt_tokens=sum(len(request.prompt_token_ids) for request in self._requests),
                num_cached_tokens=sum(each.num_cached_tokens for each in facts),
                num_generated_tokens=0,
                queue_s=facts[0].queue_time_s,
                first_token_s=None,
                total_s=now_s - first.arrival_s,
                adapter_wait_s=facts[0].adapter_wait_s,
                error="" if error is None else reason_of(error),
                request_id=self._request_id,
                action=self._action,
                digests=[] if first.adapter is None else [first.adapter.digest],
                workers=sorted({place.worker_id for each in facts for place in each.places}),
                caller=self._caller,
            )
        )

    def _write(self, facts: list[RunFacts], error: BaseException | None, now_s: float) -> None:
        first = self._requests[0]
        places = {(place.worker_id, place.epoch, place.slot): place for each in facts for place in each.places}
        more: dict[str, Any] = {
            "fleet_request_ids": [request.request_id for request in self._requests],
            "num_inputs": len(self._requests),
            "num_ended": self._inputs.num_ended,
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in self._requests),
            "cached_tokens": sum(each.num_cached_tokens for each in facts),
            "queue_time_s": rounded(facts[0].queue_time_s),
            "total_time_s": rounded(now_s - first.arrival_s),
            "workers": [place_of(place) for place in places.values()],
        }
        num_text_bytes = 0
        if self._audit.has_text:
            inputs = [each if isinstance(each, str) else list(each) for each in self._checked.inputs]
            more["text"] = {"inputs": inputs}
            num_text_bytes = size_of(more["text"])
        adapter = first.adapter
        self._audit.generation(
            self._caller,
            error,
            action=self._action,
            resource=BASE_MODEL if adapter is None else f"adapters/{self._checked.adapter.adapter_id}",
            digest="" if adapter is None else adapter.digest,
            request_id=self._request_id,
            more=more,
            num_text_bytes=num_text_bytes,
        )

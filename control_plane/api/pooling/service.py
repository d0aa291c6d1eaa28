"""PoolingService: checks a call, tokenises its inputs, computes them through the fleet and makes the response."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from motet.v1 import pooling_pb2, pooling_pb2_grpc

from contract.rope_scaling import MAX_CONTEXT
from control_plane.api.gate import ShutdownGate
from control_plane.api.generation.preconditions import require_model
from control_plane.api.generation.service import ModelFacts
from control_plane.api.pooling.pooled_inputs import PooledInput, PooledInputs
from control_plane.api.pooling.record import PoolingRecord
from control_plane.api.pooling.request import (
    AnyRequest,
    CheckedCall,
    check_call,
    check_classify,
    check_embed,
)
from control_plane.api.pooling.vectors import check_response_size, embedding_of, probabilities_of
from control_plane.api.text.adapter_texts import AdapterTexts
from control_plane.api.text.codec import TextCodec
from control_plane.api.text.length_bound import prompt_too_long
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import Caller, current_caller
from control_plane.checks import Violations, refuse
from control_plane.errors import (
    AdapterNotFound,
    FieldViolation,
    InvalidRequest,
    NoWorker,
    PermissionDenied,
    PoolingNotServed,
)
from control_plane.fleet.fleet import Fleet
from control_plane.observers.ended_request import Observer, Observers
from control_plane.observers.trace_context import trace_id_of
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.records import ResolvedAdapter
from control_plane.registry.registry import Registry
from control_plane.scheduler.types import LogIds, Pooling, PoolingKind, Request

SERVICE_NAME = pooling_pb2.DESCRIPTOR.services_by_name["PoolingService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]
_MESSAGES = {
    PoolingKind.LAST: pooling_pb2.POOLING_LAST,
    PoolingKind.MEAN: pooling_pb2.POOLING_MEAN,
    PoolingKind.FIRST: pooling_pb2.POOLING_FIRST,
}
PROBLEM_TYPES = {
    "single_label_classification": pooling_pb2.PROBLEM_TYPE_SINGLE_LABEL,
    "multi_label_classification": pooling_pb2.PROBLEM_TYPE_MULTI_LABEL,
    "regression": pooling_pb2.PROBLEM_TYPE_REGRESSION,
}


@dataclass(frozen=True, slots=True)
class _Call:
    """One call whose inputs can be tokenised."""

    checked: CheckedCall
    caller: Caller
    account: str
    arrival_s: float
    deadline_s: float | None
    routing_key: str
    request_id: str


@dataclass(frozen=True, slots=True)
class _Limits:
    """What the inputs of one call must keep, by the version that computes them."""

    max_model_len: int  # tokens
    vocab_size: int


class PoolingService(pooling_pb2_grpc.PoolingServiceServicer):
    """See protos/motet/v1/pooling.proto."""

    def __init__(
        self,
        *,
        model: ModelFacts,
        served: WorkerReports,
        texts: AdapterTexts,
        registry: Registry,
        fleet: Fleet,
        gate: ShutdownGate,
        audit: AuditLog | None = None,
        observers: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw_request_id: Callable[[], str] = lambda: f"req-{secrets.token_hex(8)}",
    ) -> None:
        self._model = model
        self._served = served
        self._texts = texts
        self._registry = registry
        self._fleet = fleet
        self._gate = gate
        self._audit = audit or AuditLog()
        self._observers = observers or Observers()
        self._clock = clock
        self._draw_request_id = draw_request_id

    async def Embed(  # noqa: N802 - the stub's name
        self, message: pooling_pb2.EmbedRequest, context: Context
    ) -> pooling_pb2.EmbedResponse:
        """One embedding for each input."""
        violations = Violations()
        options = check_embed(message, violations)
        call = self._begin(message, context, violations)
        requests, resolved = await self._requests(call, Pooling(options.kind))
        response = pooling_pb2.EmbedResponse(
            request_id=call.request_id,
            adapter="" if resolved is None else f"adapters/{resolved.adapter_id}",
            adapter_digest="" if resolved is None else resolved.ref.digest,
            model_fingerprint=self._model.fingerprint,
            tenant=call.caller.tenant,
            pooling=_MESSAGES[options.kind],
            normalized=options.is_normalized,
        )

        def take(pooled: PooledInput) -> None:
            values = embedding_of(pooled.vector, dimensions=options.dimensions, is_normalized=options.is_normalized)
            check_response_size(len(requests), len(values))
            response.embeddings.add(
                values=values.tolist(), prompt_tokens=pooled.num_tokens, cached_tokens=pooled.num_cached_tokens
            )

        await self._compute(call, actions.EMBED, requests, take)
        return response

    async def Classify(  # noqa: N802 - the stub's name
        self, message: pooling_pb2.ClassifyRequest, context: Context
    ) -> pooling_pb2.ClassifyResponse:
        """The classes of each input."""
        violations = Violations()
        check_classify(message, violations)
        call = self._begin(message, context, violations)
        named = self._resolved(call)
        assert named is not None, "a call that names no adapter passed the checks"
        _labels_of(named)  # before anything is tokenised
        requests, resolved = await self._requests(call, None)
        assert resolved is not None, "an adapter does not become the base model"
        labels = _labels_of(resolved)
        problem_type = message.problem_type or _problem_type_of(resolved)
        response = pooling_pb2.ClassifyResponse(
            request_id=call.request_id,
            adapter=f"adapters/{resolved.adapter_id}",
            adapter_digest=resolved.ref.digest,
            model_fingerprint=self._model.fingerprint,
            tenant=call.caller.tenant,
            labels=labels,
            problem_type=problem_type,
        )

        def take(pooled: PooledInput) -> None:
            check_response_size(len(requests), 2 * len(labels))
            response.classifications.add(
                logits=pooled.vector.tolist(),
                probabilities=probabilities_of(pooled.vector, problem_type).tolist(),
                prompt_tokens=pooled.num_tokens,
                cached_tokens=pooled.num_cached_tokens,
            )

        await self._compute(call, actions.CLASSIFY, requests, take)
        return response

    def _begin(self, message: AnyRequest, context: Context, violations: Violations) -> _Call:
        """What both calls check first. Raises what is wrong with the call."""
        arrival_s, remaining_s = self._clock(), context.time_remaining()
        self._gate.check()
        caller = current_caller()
        checked = check_call(
            message, violations, vocab_size=self._model.vocab_size, max_model_len=self._max_model_len(MAX_CONTEXT)
        )
        violations.raise_if_any()
        require_model(message.model_fingerprint, self._model.fingerprint, "model_fingerprint")
        account = self._fleet.account_of(caller.tenant, caller.host, is_authenticated=caller.principal.is_authenticated)
        return _Call(
            checked,
            caller,
            account,
            arrival_s,
            None if remaining_s is None else arrival_s + remaining_s,
            routing_key=checked.client_request_id or secrets.token_hex(8),
            request_id=checked.client_request_id or self._draw_request_id(),
        )

    def _max_model_len(self, context_length: int) -> int:
        """Longest context that workers compute for an adapter trained for so many tokens; 0: as the base model."""
        length = self._served.context_of(context_length)
        if length is None:
            raise NoWorker("no worker has attached yet, so the longest context is not known; try again in a moment")
        return length

    def _resolved(self, call: _Call) -> ResolvedAdapter | None:
        """The adapter's version; None for the base model. Raises AdapterNotFound or PermissionDenied."""
        adapter = call.checked.adapter
        if adapter.adapter_id:
            return self._registry.resolve(
                adapter.adapter_id, call.checked.adapter_digest, selector=adapter.selector, key=call.routing_key
            )
        if not call.caller.principal.may_use(""):
            raise PermissionDenied("adapter: this credential may not use the base model; name an adapter")
        return None

    async def _requests(self, call: _Call, pooling: Pooling | None) -> tuple[list[Request], ResolvedAdapter | None]:
        """A request for each input, and the version that they use. `pooling` None: the adapter's classes."""
        resolved, text = await self._texts.of(lambda: self._resolved(call))
        length = self._max_model_len(0 if resolved is None else resolved.ref.context_length)
        limits = _Limits(length, (resolved.version.vocab_size if resolved else 0) or self._model.vocab_size)
        inputs = range(len(call.checked.inputs))
        prompts = [await self._token_ids(call, index, text.codec, limits) for index in inputs]
        if resolved is not None:  # other tasks had a turn of the event loop
            try:
                resolved = self._registry.resolve(resolved.adapter_id, resolved.ref.digest)
            except AdapterNotFound:
                if call.checked.names_version:
                    raise
                return await self._requests(call, pooling)  # by the active version, which may have other tokens
            _require_all_tokens(resolved)
        if pooling is None:
            assert resolved is not None, "the base model has no classes"
            pooling = Pooling(PoolingKind.LAST, len(_labels_of(resolved)))
        requests = [
            Request(
                request_id=self._fleet.next_request_id(),
                prompt_token_ids=prompt,
                max_tokens=1,
                adapter=None if resolved is None else resolved.ref,
                cache_salt=call.checked.cache_salt,
                arrival_s=call.arrival_s,
                deadline_s=call.deadline_s,
                tenant=call.caller.tenant,
                charged_to=call.account,
                priority=call.checked.priority,
                pooling=pooling,
                log_ids=LogIds(call.request_id, trace_id_of(call.caller.traceparent)),
            )
            for prompt in prompts
        ]
        return requests, resolved

    async def _token_ids(self, call: _Call, index: int, codec: TextCodec, limits: _Limits) -> tuple[int, ...]:
        given = call.checked.inputs[index]
        if not isinstance(given, str):
            if len(given) >= limits.max_model_len:
                raise prompt_too_long(f"inputs[{index}].token_ids", f"{len(given)} tokens", limits.max_model_len)
            return given
        self._fleet.check_room(call.account, 1)  # nothing is tokenised that would be refused in any case
        try:
            ids = await codec.encode_text(given, tenant=call.account, max_model_len=limits.max_model_len)
        except InvalidRequest as error:
            places = (FieldViolation(f"inputs[{index}].{v.field}", v.description) for v in error.violations)
            raise type(error)(*places) from error
        if not ids:
            raise refuse(f"inputs[{index}].text", "no token is left after tokenisation; an input needs at least one")
        if max(ids) >= limits.vocab_size:
            raise refuse(
                f"inputs[{index}].text",
                f"holds the token {max(ids)}, which the model, of vocabulary size {limits.vocab_size}, lacks",
            )
        return tuple(ids)

    async def _compute(
        self, call: _Call, action: str, requests: list[Request], take: Callable[[PooledInput], None]
    ) -> None:
        """Compute every request, and let `take` have the results in order."""
        inputs = PooledInputs(self._fleet, requests)
        with PoolingRecord(
            self._audit,
            call.caller,
            action,
            call.request_id,
            call.checked,
            requests,
            inputs,
            self._clock,
            self._observers,
        ):
            try:
                for _ in requests:
                    take(await inputs.next())
                    await asyncio.sleep(0)  # the numbers of one vector take up to a millisecond
            finally:
                inputs.close()


def _labels_of(resolved: ResolvedAdapter) -> tuple[str, ...]:
    """The labels of an adapter. Raises PoolingNotServed if it has no score head."""
    labels = resolved.version.labels
    if not labels:
        raise PoolingNotServed(
            f"adapter {resolved.adapter_id} has no score head, so it has no classes; name an adapter that was trained "
            'with task_type "SEQ_CLS", or use Embed'
        )
    return labels


def _require_all_tokens(resolved: ResolvedAdapter) -> None:
    """Raises PoolingNotServed for an activated adapter, which acts on a part of an input only."""
    if resolved.version.alora_invocation_tokens:
        raise PoolingNotServed(
            f"adapter {resolved.adapter_id} acts from its invocation tokens on (aLoRA), and embeddings and classes are "
            "not served with such adapters; name another adapter, or none"
        )


def _problem_type_of(resolved: ResolvedAdapter) -> pooling_pb2.ProblemType:
    """What the adapter says of its logits, or what transformers assumes by the number of labels."""
    known = PROBLEM_TYPES.get(resolved.version.problem_type)
    if known is not None:
        return known
    if len(resolved.version.labels) == 1:
        return pooling_pb2.PROBLEM_TYPE_REGRESSION
    return pooling_pb2.PROBLEM_TYPE_SINGLE_LABEL

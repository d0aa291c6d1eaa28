"""GenerationService: one request, one stream.

Checks the request, resolves its adapters, tokenises its prompt, submits it to the fleet, and turns what comes back into
messages. Nothing is sent before the first token: initial metadata would commit the RPC and switch client retries off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
from motet.v1 import generation_pb2, generation_pb2_grpc

from contract.rope_scaling import MAX_CONTEXT
from control_plane.api.gate import ShutdownGate
from control_plane.api.generation.activation import active_from
from control_plane.api.generation.adapter_uses import composition_of, named_uses
from control_plane.api.generation.constraints import Constraints
from control_plane.api.generation.generation_record import GenerationRecord
from control_plane.api.generation.preconditions import require_model, require_prompt, require_text, require_vocabulary
from control_plane.api.generation.request import (
    DEFAULT_MAX_TOKENS,
    CheckedRequest,
    check_prompt_logprobs,
    check_request,
    effective_max_tokens,
    effective_stop_token_ids,
)
from control_plane.api.generation.response_stream import ResponseStream, parts_of
from control_plane.api.generation.sampling_params import set_defaults
from control_plane.api.generation.task_source import TaskSource
from control_plane.api.text.adapter_texts import AdapterTexts
from control_plane.api.text.codec import TextCodec
from control_plane.api.text.stop_strings import StopStrings
from control_plane.api.text.stream import TextStream
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import Caller, current_caller
from control_plane.checks import Violations, refuse
from control_plane.constraints.compiler import ConstraintCompiler
from control_plane.errors import AdapterNotFound, InvalidRequest, MotetError, NoWorker, PermissionDenied
from control_plane.fleet.fleet import Fleet
from control_plane.observers.ended_request import Observer, Observers
from control_plane.observers.trace_context import trace_id_of
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.records import ResolvedAdapter
from control_plane.registry.registry import Registry
from control_plane.registry.versions.version_names import version_name_of
from control_plane.scheduler.types import LogIds, Request, Sampling

logger = logging.getLogger(__name__)

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]
_TOKEN_IDS = ("token_ids.ids[", "resume_from.ids[", "stopping.stop_token_ids[", "sampling.logit_bias[")


def _random_request_id() -> str:
    return f"req-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the service needs to know of the base model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # names the checkpoint, 64 lower-case hexadecimal digits


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that may be submitted."""

    checked: CheckedRequest
    adapters: list[ResolvedAdapter]  # in the order of the request; empty for the base model
    request: Request
    stream: ResponseStream


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """See protos/motet/v1/generation.proto."""

    def __init__(
        self,
        *,
        model: ModelFacts,
        served: WorkerReports,
        codec: TextCodec,
        texts: AdapterTexts | None = None,
        registry: Registry,
        fleet: Fleet,
        gate: ShutdownGate,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        draw_request_id: Callable[[], str] = _random_request_id,
        audit: AuditLog | None = None,
        tasks: TaskSource | None = None,
        observers: Observer | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        """`tasks`: None where requests cannot name LoRA tasks."""
        self._tasks = tasks
        self._constraints = constraints or Constraints(ConstraintCompiler())
        self._audit = audit or AuditLog()
        self._observers = observers or Observers()
        self._model = model
        self._served = served
        self._texts = texts or AdapterTexts(codec, _no_documents)
        self._registry = registry
        self._fleet = fleet
        self._gate = gate
        self._clock = clock
        self._wall_clock = wall_clock
        self._draw_seed = draw_seed
        self._draw_request_id = draw_request_id

    def _max_model_len(self, context_length: int) -> int:
        """Tokens of the longest context that workers compute at present for adapters trained for `context_length`."""
        length = self._served.context_of(context_length)
        if length is None:
            raise NoWorker("no worker has attached yet, so the longest context is not known; try again in a moment")
        return length

    # ruff: noqa: N802 - the stubs name the methods

    def Generate(
        self, message: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Stream one generation."""
        responses = self._responses(message, context)
        if self._tasks is None or not message.HasField("lora_task_id"):
            return responses
        return self._tasks.kept(message.lora_task_id, responses)

    async def GenerateWithTask(
        self, request_iterator: AsyncIterator[generation_pb2.GenerateWithTaskRequest], context: Context
    ) -> AsyncIterator[generation_pb2.GenerateWithTaskResponse]:
        """Receive weights, then stream one generation with them."""
        self._gate.check()
        if self._tasks is None:
            raise refuse("header.request.lora_task_id", "is set, and this server caches no LoRA tasks")
        async with (
            self._tasks.received(request_iterator) as message,
            contextlib.aclosing(self._responses(message, context)) as responses,
        ):
            async for response in responses:
                yield generation_pb2.GenerateWithTaskResponse(response=response)

    async def _responses(
        self, message: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """One generation: prepare the request, submit it to the fleet, turn what comes back into messages."""
        arrival_s = self._clock()
        remaining_s = context.time_remaining()
        self._gate.check()
        caller = current_caller()
        deadline_s = None if remaining_s is None else arrival_s + remaining_s
        prepared = await self._prepare(message, caller, arrival_s, deadline_s)
        checked, request, stream = prepared.checked, prepared.request, prepared.stream
        with GenerationRecord(self._audit, caller, checked, request, stream, self._clock, self._observers) as record:
            if await stream.resume():
                # The client had every token already; only the end of its stream was lost.
                for response in stream.finished_by_resume():
                    yield response
                return
            self._resolve_again(checked, prepared.adapters, routing_key=None)
            job = record.job = self._fleet.submit(request)
            if checked.collecting is not None:
                job.collect(checked.collecting)
            try:
                async for event in job:
                    if event.prompt_logprobs:
                        await stream.take_prompt_logprobs(event.prompt_logprobs)
                    for part in parts_of(event):
                        for response in stream.take(part, job.cancel_index):
                            yield response
                        if part is not event:
                            await asyncio.sleep(0)
                    if stream.is_finished:
                        return
            finally:
                job.cancel()
            raise MotetError(f"the stream of request {stream.request_id} ended without a finish reason")

    async def _prepare(
        self, message: generation_pb2.GenerateRequest, caller: Caller, arrival_s: float, deadline_s: float | None
    ) -> _Prepared:
        """Check the message, resolve its adapters, tokenise its prompt. Raises MotetError.

        Whatever the text of an adapter brings (tokenizer, vocabulary, defaults) is known before the checks. Adapters
        are resolved again after every wait: their versions may have been deleted meanwhile.
        """
        account = self._fleet.account_of(caller.tenant, caller.host, is_authenticated=caller.principal.is_authenticated)
        routing_key = message.routing_key or message.request_id or secrets.token_hex(8)
        text_adapter, text = await self._texts.of(lambda: self._text_adapter(message, routing_key))
        vocab_size = (None if text_adapter is None else text_adapter.ref.vocab_size) or self._model.vocab_size
        set_defaults(message, text.defaults.sampling)
        checked = self._check(message, text_adapter, vocab_size, routing_key)
        eos_token_ids = text.defaults.eos_token_ids or self._model.eos_token_ids
        stop_token_ids = effective_stop_token_ids(checked, eos_token_ids, vocab_size)
        if checked.stop or checked.returns_token_bytes:
            text.codec.require_stop_strings()
        require_model(checked.model_fingerprint, self._model.fingerprint)
        adapters = self._resolve(checked, routing_key)
        max_model_len = self._max_model_len(max((each.ref.context_length for each in adapters), default=0))
        render_time_s = self._render_time_s(checked)
        prompt = await self._prompt_token_ids(checked, text.codec, account, render_time_s, max_model_len, vocab_size)
        constraint = await self._constraints.of(message, text.codec, eos_token_ids, vocab_size, caller.tenant)
        adapters = self._resolve_again(checked, adapters, routing_key)
        if len(adapters) == 1:
            require_vocabulary(vocab_size, adapters[0].ref.vocab_size or self._model.vocab_size)
        require_text(text_adapter, adapters)
        require_prompt(checked.prompt_sha256, prompt)
        default_tokens = text.defaults.max_tokens or DEFAULT_MAX_TOKENS
        max_tokens = effective_max_tokens(checked, len(prompt), max_model_len, default_tokens)
        check_prompt_logprobs(checked, len(prompt))
        decoding = checked.decoding
        request = Request(
            request_id=self._fleet.next_request_id(),
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            generated_token_ids=checked.resume_from,
            adapter=adapters[0].ref if adapters else None,
            composition=composition_of(checked.adapters, adapters),
            active_from=active_from(prompt, adapters, checked.input_field),
            sampling=_ranked_sampling(checked) if decoding.is_ranked else checked.sampling,
            stop_token_ids=stop_token_ids,
            cache_salt=checked.cache_salt,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            tenant=caller.tenant,
            charged_to=account,
            priority=checked.priority,
            num_samples=decoding.best_of if decoding.beam is None else 1,
            beam=decoding.beam,
            constraint=constraint,
            # Not the fleet's number: by two of those a client could count the requests of all tenants between them.
            log_ids=LogIds(checked.client_request_id or self._draw_request_id(), trace_id_of(caller.traceparent)),
        )
        stream = self._response_stream(checked, request, adapters, text.codec, render_time_s, vocab_size)
        return _Prepared(checked, adapters, request, stream)

    def _check(
        self,
        message: generation_pb2.GenerateRequest,
        text_adapter: ResolvedAdapter | None,
        vocab_size: int,
        routing_key: str,
    ) -> CheckedRequest:
        """The request as plain values. Raises what is wrong with it."""
        max_model_len = self._max_model_len(MAX_CONTEXT)
        try:
            return check_request(message, vocab_size=vocab_size, max_model_len=max_model_len, draw_seed=self._draw_seed)
        except InvalidRequest as error:
            if text_adapter is None and all(each.field.startswith(_TOKEN_IDS) for each in error.violations):
                # The base model lacks these tokens. If the adapter is gone, that is the error: they may be its own.
                with contextlib.suppress(InvalidRequest):
                    self._find_adapter(message, routing_key)
            raise

    def _text_adapter(self, message: generation_pb2.GenerateRequest, routing_key: str) -> ResolvedAdapter | None:
        """The adapter whose vocabulary, tokenizer, template and defaults the request uses.

        None: it uses those of the base model, as every request with several adapters does. Also None for an adapter
        that cannot be resolved: the checks that follow raise what is wrong with it.
        """
        try:
            return self._find_adapter(message, routing_key)
        except MotetError:
            return None

    def _find_adapter(self, message: generation_pb2.GenerateRequest, routing_key: str) -> ResolvedAdapter | None:
        """The one adapter that the request names; None where it names none, or several. Raises MotetError."""
        named, digest = message.adapter, message.adapter_digest
        if message.HasField("lora_task_id") and self._tasks is not None:
            return self._tasks.resolve(message.lora_task_id, digest)
        if len(message.adapters) == 1:
            named, digest = message.adapters[0].name, message.adapters[0].digest
        if not named:
            return None
        violations = Violations()
        name = version_name_of(named, digest, "adapter", violations)
        violations.raise_if_any()
        return self._registry.resolve(name.adapter_id, digest, selector=name.selector, key=routing_key)

    def _resolve(self, checked: CheckedRequest, routing_key: str) -> list[ResolvedAdapter]:
        """The versions of the adapters; none for the base model. Raises AdapterNotFound or PermissionDenied."""
        uses = checked.adapters.uses
        if checked.adapters.task_id is not None:
            if self._tasks is None:
                raise refuse("lora_task_id", "is set, and this server caches no LoRA tasks; name an adapter")
            return [self._tasks.resolve(checked.adapters.task_id, checked.adapters.task_digest)]
        if not uses and not current_caller().principal.may_use(""):
            raise PermissionDenied("adapter: this credential may not use the base model; name an adapter")
        return [
            self._registry.resolve(use.adapter_id, use.digest, selector=use.selector, key=routing_key) for use in uses
        ]

    def _resolve_again(
        self, checked: CheckedRequest, adapters: Sequence[ResolvedAdapter], routing_key: str | None
    ) -> list[ResolvedAdapter]:
        """The same versions again, after other tasks had a turn of the event loop.

        A version that was deleted meanwhile must not be loaded again. If the client named no version and there is a
        routing key, the adapter's present version for the key takes its place; otherwise AdapterNotFound is raised.
        The weights of a LoRA task stay as long as the request runs.
        """
        uses = checked.adapters.uses
        if not uses:
            return list(adapters)
        return [
            self._version_again(adapter, None if use.names_version else routing_key)
            for adapter, use in zip(adapters, uses, strict=True)
        ]

    def _version_again(self, adapter: ResolvedAdapter, routing_key: str | None) -> ResolvedAdapter:
        try:
            return self._registry.resolve(adapter.adapter_id, adapter.ref.digest)
        except AdapterNotFound:
            if routing_key is None:
                raise
            return self._registry.resolve(adapter.adapter_id, key=routing_key)

    def _response_stream(
        self,
        checked: CheckedRequest,
        request: Request,
        adapters: Sequence[ResolvedAdapter],
        codec: TextCodec,
        render_time_s: float | None,
        vocab_size: int,
    ) -> ResponseStream:
        stops = StopStrings(checked.stop)
        request_id = request.log_ids.request_id
        logger.debug("request taken name=%s request_id=%d", request_id, request.request_id)
        return ResponseStream(
            client_request_id=request_id,
            adapters=named_uses(checked.adapters, adapters),
            tenant=request.tenant,
            checked=checked,
            model_fingerprint=self._model.fingerprint,
            render_time_s=render_time_s,
            request=request,
            vocab_size=vocab_size,
            make_text=lambda: TextStream(
                codec.detokenizer(keeps_special=not checked.skips_special_tokens),
                stops,
                checked.sampling.min_tokens,
                includes_stop=checked.includes_stop,
            ),
            spell=codec.spell if checked.returns_token_bytes else None,
            clock=self._clock,
            keeps_text=self._audit.has_text,
        )

    def _render_time_s(self, checked: CheckedRequest) -> float | None:
        """When the conversation is rendered, seconds since 1970; None for another input."""
        if checked.conversation is None:
            return None
        return self._wall_clock() if checked.render_time_s is None else checked.render_time_s

    async def _prompt_token_ids(
        self,
        checked: CheckedRequest,
        codec: TextCodec,
        account: str,
        render_time_s: float | None,
        max_model_len: int,
        vocab_size: int,
    ) -> Sequence[int]:
        if checked.token_ids is not None:
            return checked.token_ids
        # Do not tokenise a prompt whose request would be refused in any case.
        self._fleet.check_room(account, checked.decoding.num_indices * (checked.max_tokens or 1))
        if checked.text is not None:
            ids = await codec.encode_text(checked.text, tenant=account, max_model_len=max_model_len)
        else:
            assert checked.conversation is not None
            ids = await codec.encode_chat(
                checked.conversation, render_time_s, tenant=account, max_model_len=max_model_len
            )
        if not ids:
            raise refuse(checked.input_field, "no token is left after tokenisation; a prompt needs at least one")
        if max(ids) >= vocab_size:
            raise refuse(
                checked.input_field,
                f"holds the token {max(ids)}, which the model, of vocabulary size {vocab_size}, lacks",
            )
        return ids


async def _no_documents(_digest: str) -> Mapping[str, bytes]:
    return {}


def _ranked_sampling(checked: CheckedRequest) -> Sampling:
    """Samples are ranked by log-probabilities, whether the client wants to see them or not."""
    sampling = checked.sampling
    if checked.decoding.beam is not None or sampling.num_logprobs is not None:
        return sampling
    return replace(sampling, num_logprobs=0)

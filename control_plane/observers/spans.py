"""Spans of OpenTelemetry for requests that ended: one of the server, and in it queue, adapter load, prefill, decode.

Spans are made when a request has ended, of the times that were taken anyway, so they cost nothing while tokens come.
They go out in batches, from a thread of the library. Which traces are recorded, the client's flag and the variable
OTEL_TRACES_SAMPLER decide. Attributes have the names of OpenTelemetry's conventions for generative models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from motet import __version__

from control_plane.audit import actions
from control_plane.observers.ended_request import EndedRequest, RequestSettings
from control_plane.observers.trace_context import TRACEPARENT_KEY, TRACESTATE_KEY

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Attributes = dict[str, str | int | float | list[str]]

_OPERATIONS = {actions.GENERATE: "text_completion", actions.EMBED: "embeddings", actions.CLASSIFY: "classify"}
_NANOSECONDS = 1_000_000_000
_MAX_INT = 2**63 - 1  # of an attribute: the exporter logs an error for each span with a larger one


class TracingNotInstalled(ValueError):
    """The packages of OpenTelemetry are not there; says which to install."""


def open_spans(endpoint: str) -> RequestSpans:
    """What sends spans to a collector by OTLP over gRPC, HTTP://HOST:PORT. Raises TracingNotInstalled."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise TracingNotInstalled(
            f"--otlp-traces-endpoint: {endpoint}: needs OpenTelemetry: pip install 'motet[tracing]'"
        ) from error
    return RequestSpans(OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://")))


class RequestSpans:
    """An observer of requests that makes their spans."""

    is_on = True

    def __init__(self, exporter: SpanExporter, wall_clock_ns: Callable[[], int] = time.time_ns) -> None:
        """`exporter` is called in a thread. `wall_clock_ns`: nanoseconds since 1970."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Variables such as OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over these.
        own = Resource({"service.name": "motet-control-plane", "service.version": __version__})
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("motet", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._wall_clock_ns = wall_clock_ns

    def ended(self, request: EndedRequest) -> None:
        """Make the spans of one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        end = self._wall_clock_ns()
        begin = end - _nanoseconds(request.total_s)
        operation = _OPERATIONS.get(request.action, request.action)
        model = ",".join(request.adapters)
        carrier = {TRACEPARENT_KEY: request.caller.traceparent, TRACESTATE_KEY: request.caller.tracestate}
        span = self._tracer.start_span(
            f"{operation} {model}".rstrip(),
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            attributes=_attributes(request, operation, model),
            start_time=begin,
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for name, first_s, last_s in _phases(request):
                child = self._tracer.start_span(name, inside, start_time=begin + _nanoseconds(first_s))
                child.end(begin + _nanoseconds(last_s))
        if request.error:
            span.set_attribute("error.type", request.error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def refused(self, reason: str) -> None:
        """A call that was refused has no span: it was not a request yet."""

    def close(self) -> None:
        """Send what waits. Blocks, for at most the exporter's time limit."""
        self._provider.shutdown()


def _phases(request: EndedRequest) -> list[tuple[str, float, float]]:
    """Name, begin and end of each phase, seconds from the arrival."""
    if request.queue_s is None:
        return [("queue", 0.0, request.total_s)]
    phases = [("queue", 0.0, request.queue_s)]
    if request.adapter_wait_s:
        phases.append(("adapter load", 0.0, min(request.adapter_wait_s, request.queue_s)))
    if request.first_token_s is None:
        return [*phases, ("prefill", request.queue_s, request.total_s)]
    first_s = max(request.first_token_s, request.queue_s)
    return [*phases, ("prefill", request.queue_s, first_s), ("decode", first_s, max(request.total_s, first_s))]


def _attributes(request: EndedRequest, operation: str, model: str) -> Attributes:
    found: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "motet",
        "gen_ai.request.model": model or "_base",
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        **({} if request.settings is None else _requested(request.settings)),
        "motet.tenant": request.tenant,
        "motet.workers": list(request.workers),
        "motet.adapter.digests": list(request.digests),
    }
    if not request.error:
        found["gen_ai.response.finish_reasons"] = list(request.reasons)
    if request.first_token_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = request.first_token_s
    return found


def _requested(settings: RequestSettings) -> Attributes:
    """What the request set, or the server for it. What changes nothing is left out, as the conventions have it."""
    sampling = settings.sampling
    found: Attributes = {
        "gen_ai.request.max_tokens": settings.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed <= _MAX_INT:
        found["gen_ai.request.seed"] = sampling.seed
    if settings.num_completions > 1:
        found["gen_ai.request.choice.count"] = settings.num_completions
    if settings.stop:
        found["gen_ai.request.stop_sequences"] = list(settings.stop)
    return found


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)

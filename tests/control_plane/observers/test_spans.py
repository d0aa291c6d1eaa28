"""The spans of requests, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from concurrent import futures
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from contract.v1.sampling import SamplingValues
from control_plane.caller import Caller
from control_plane.config import ConfigError
from control_plane.observers.ended_request import EndedRequest, RequestSettings
from control_plane.observers.spans import RequestSpans
from control_plane.setup.metrics import open_tracing

TRACE, PARENT_SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = f"00-{TRACE:032x}-{PARENT_SPAN:016x}-01"
END_NS = 2_000_000_000
REQUEST = EndedRequest(
    *("acme", ["legal"], ["length"], 10, 4, 5, 0.25, 0.5, 1.0, 0.125, "", "req-1", "generate", ["ab" * 32], ["w0"]),
    Caller(traceparent=PARENT),
)


def spans_of(request: EndedRequest) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    spans = RequestSpans(exporter, wall_clock_ns=lambda: END_NS)
    spans.ended(request)
    spans.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def requested(settings: RequestSettings) -> dict[str, Any]:
    """The attributes of a request with these settings that say what it wanted."""
    span = spans_of(replace(REQUEST, settings=settings))["text_completion legal"]
    return {name: value for name, value in attributes_of(span).items() if name.startswith("gen_ai.request.")}


def times(span: ReadableSpan) -> tuple[float, float]:
    """Seconds from the arrival."""
    assert span.start_time is not None and span.end_time is not None
    return (span.start_time - END_NS) / 1e9 + 1.0, (span.end_time - END_NS) / 1e9 + 1.0


def attributes_of(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def test_a_request_is_a_span_of_the_server_in_the_trace_of_its_client() -> None:
    spans = spans_of(REQUEST)
    span = spans["text_completion legal"]
    assert span.kind is SpanKind.SERVER and times(span) == (0.0, 1.0) and span.status.status_code is StatusCode.UNSET
    assert span.context is not None and span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT_SPAN)
    assert {name: times(child) for name, child in spans.items() if child is not span} == {
        "queue": (0.0, 0.25),
        "adapter load": (0.0, 0.125),
        "prefill": (0.25, 0.5),
        "decode": (0.5, 1.0),
    }
    for child in spans.values():
        assert child is span or (child.parent is not None and child.parent.span_id == span.context.span_id)


def test_what_the_clients_tracing_systems_pass_along_is_on_every_span() -> None:
    caller = Caller(traceparent=PARENT, tracestate="congo=t61rcWkgMzE,rojo=1")
    spans = spans_of(replace(REQUEST, caller=caller))
    assert len(spans) == 5
    for span in spans.values():
        assert span.context is not None and span.context.trace_state.to_header() == "congo=t61rcWkgMzE,rojo=1"


def test_attributes_have_the_names_of_the_conventions() -> None:
    attributes = attributes_of(spans_of(REQUEST)["text_completion legal"])
    known = {getattr(gen_ai_attributes, name) for name in dir(gen_ai_attributes) if name.startswith("GEN_AI_")}
    assert {name for name in attributes if name.startswith("gen_ai.")} <= known
    assert attributes["gen_ai.request.model"] == "legal" and attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_the_settings_of_a_request_have_the_names_of_the_conventions() -> None:
    sampling = SamplingValues(temperature=0.5, top_k=40, top_p=0.75, seed=7, frequency_penalty=1.0)
    attributes = requested(RequestSettings(sampling, 32, 2, ("###", "\n\n")))
    assert attributes == {
        gen_ai_attributes.GEN_AI_REQUEST_MODEL: "legal",
        gen_ai_attributes.GEN_AI_REQUEST_MAX_TOKENS: 32,
        gen_ai_attributes.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        gen_ai_attributes.GEN_AI_REQUEST_TOP_K: 40,
        gen_ai_attributes.GEN_AI_REQUEST_TOP_P: 0.75,
        gen_ai_attributes.GEN_AI_REQUEST_SEED: 7,
        gen_ai_attributes.GEN_AI_REQUEST_FREQUENCY_PENALTY: 1.0,
        gen_ai_attributes.GEN_AI_REQUEST_PRESENCE_PENALTY: 0.0,
        gen_ai_attributes.GEN_AI_REQUEST_CHOICE_COUNT: 2,
        gen_ai_attributes.GEN_AI_REQUEST_STOP_SEQUENCES: ("###", "\n\n"),
    }


def test_settings_that_say_nothing_are_left_out() -> None:
    names = requested(RequestSettings(SamplingValues(), 32, 1))
    absent = ("top_k", "choice.count", "stop_sequences")
    assert not names.keys() & {f"gen_ai.request.{name}" for name in absent}


def test_a_seed_that_no_attribute_can_hold_is_left_out() -> None:
    largest, over = (requested(RequestSettings(SamplingValues(seed=seed), 32, 1)) for seed in (2**63 - 1, 2**63))
    assert largest["gen_ai.request.seed"] == 2**63 - 1
    assert "gen_ai.request.seed" not in over and over["gen_ai.request.max_tokens"] == 32


def test_an_error_is_named() -> None:
    failed = replace(REQUEST, error="NOT_FINITE", reasons=["NOT_FINITE"], first_token_s=None)
    spans = spans_of(failed)
    span = spans["text_completion legal"]
    assert span.status.status_code is StatusCode.ERROR
    assert attributes_of(span)[error_attributes.ERROR_TYPE] == "NOT_FINITE"
    assert "decode" not in spans and times(spans["prefill"]) == (0.25, 1.0)


def test_what_never_ran_waited_in_the_queue_only() -> None:
    spans = spans_of(replace(REQUEST, adapters=[], queue_s=None, adapter_wait_s=None, first_token_s=None))
    assert set(spans) == {"text_completion", "queue"} and times(spans["queue"]) == (0.0, 1.0)


def test_a_client_that_does_not_record_its_trace_gets_no_spans() -> None:
    assert spans_of(replace(REQUEST, caller=Caller(traceparent=PARENT[:-2] + "00"))) == {}


def test_without_a_trace_of_the_client_a_request_has_its_own() -> None:
    span = spans_of(replace(REQUEST, caller=Caller()))["text_completion legal"]
    assert span.parent is None and span.context is not None and span.context.trace_id != TRACE


async def test_a_collector_gets_them() -> None:
    got: list[trace_service_pb2.ExportTraceServiceRequest] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(  # noqa: N802 - the stub's name
            self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
        ) -> trace_service_pb2.ExportTraceServiceResponse:
            got.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        async with AsyncExitStack() as stack:
            spans = open_tracing(f"http://127.0.0.1:{port}", stack)
            assert spans is not None
            spans.ended(REQUEST)
    finally:
        await asyncio.to_thread(server.stop(None).wait)
    (resource,) = got[0].resource_spans
    assert {span.name for span in resource.scope_spans[0].spans} >= {"text_completion legal", "decode"}
    assert any(
        each.key == "service.name" and each.value.string_value == "motet-control-plane"
        for each in resource.resource.attributes
    )


async def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: http://x: .*pip install 'motet\[tracing\]'"):
            open_tracing("http://x", stack)

"""What the SDK sends of the trace that a program is in."""

from __future__ import annotations

import pytest
from motet.connection.trace import TRACEPARENT, TRACESTATE, trace_metadata
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_outside_of_a_trace_nothing_is_sent() -> None:
    assert trace_metadata() == ()


def test_the_span_of_opentelemetry_is_sent() -> None:
    context = SpanContext(
        0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_remote=False, trace_flags=TraceFlags(1)
    )
    with trace.use_span(NonRecordingSpan(context)):
        assert trace_metadata() == (("traceparent", PARENT),)


def test_what_the_program_names_comes_first() -> None:
    token = TRACEPARENT.set(PARENT)
    try:
        assert trace_metadata() == (("traceparent", PARENT),)
    finally:
        TRACEPARENT.reset(token)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("congo", "t61"), ("rojo", "1")], (("tracestate", "congo=t61,rojo=1"),)),
        ([("a", "x" * 250), ("b", "x" * 250), ("c", "x" * 10)], ()),  # more characters than servers pass on
    ],
)
def test_what_tracing_systems_pass_along_is_sent(
    entries: list[tuple[str, str]], expected: tuple[tuple[str, str], ...]
) -> None:
    context = SpanContext(
        0x0AF7651916CD43DD8448EB211C80319C,
        0xB7AD6B7169203331,
        is_remote=False,
        trace_flags=TraceFlags(1),
        trace_state=TraceState(entries),
    )
    with trace.use_span(NonRecordingSpan(context)):
        assert trace_metadata() == (("traceparent", PARENT), *expected)


def test_a_program_names_both_and_never_the_state_alone() -> None:
    state = TRACESTATE.set("a=1")
    try:
        assert trace_metadata() == ()
        parent = TRACEPARENT.set(PARENT)
        try:
            assert trace_metadata() == (("traceparent", PARENT), ("tracestate", "a=1"))
        finally:
            TRACEPARENT.reset(parent)
    finally:
        TRACESTATE.reset(state)

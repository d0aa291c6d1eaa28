"""The trace that calls belong to, sent as the metadata `traceparent` and `tracestate` of W3C Trace Context."""

from __future__ import annotations

import sys
from contextvars import ContextVar

TRACEPARENT_KEY, TRACESTATE_KEY = "traceparent", "tracestate"  # metadata
MAX_TRACESTATE_CHARS = 512  # a longer one is not sent: the server ignores it
# Of the running task, for a program that has it from elsewhere, such as a proxy. Empty: that of OpenTelemetry, if any.
TRACEPARENT: ContextVar[str] = ContextVar("motet_traceparent", default="")
# What tracing systems pass along with TRACEPARENT, for the same program; not sent without it.
TRACESTATE: ContextVar[str] = ContextVar("motet_tracestate", default="")


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """What names the trace of the current task; nothing if it belongs to none.

    OpenTelemetry is used where the program has imported it, and never imported here.
    """
    given = TRACEPARENT.get()
    if given:
        return _pairs(given, TRACESTATE.get())
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ()
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ()
    value = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    return _pairs(value, context.trace_state.to_header())


def _pairs(traceparent: str, tracestate: str) -> tuple[tuple[str, str], ...]:
    parent = (TRACEPARENT_KEY, traceparent)
    return (parent, (TRACESTATE_KEY, tracestate)) if 0 < len(tracestate) <= MAX_TRACESTATE_CHARS else (parent,)

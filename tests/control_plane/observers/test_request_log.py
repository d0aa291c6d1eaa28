"""The line of the log that each request leaves, and the trace that it belongs to."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from control_plane.caller import Caller, acting_as, log_context
from control_plane.observers.ended_request import EndedRequest, Observers
from control_plane.observers.request_log import RequestLog
from control_plane.observers.trace_context import trace_id_of, valid_traceparent, valid_tracestate

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
REQUEST = EndedRequest(
    "acme", ["legal"], ["length"], 10, 4, 5, 0.01, 0.1, 0.5, 0.008, "", "req-1", "generate", ["ab" * 32], ["w0", "w1"]
)


def line_of(request: EndedRequest, caplog: pytest.LogCaptureFixture) -> str:
    caplog.set_level(logging.INFO, "control_plane")
    RequestLog().ended(request)
    return caplog.records[-1].getMessage()


def test_a_request_leaves_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert line_of(REQUEST, caplog) == (
        "request ended request_id=req-1 action=generate tenant=acme adapter=legal digest=abababababab worker=w0,w1 "
        "reason=length prompt_tokens=10 cached_tokens=4 generated_tokens=5 queue_s=0.010000 adapter_wait_s=0.008000 "
        "first_token_s=0.100000 total_s=0.500000"
    )


def test_what_never_ran_has_dashes(caplog: pytest.LogCaptureFixture) -> None:
    request = replace(
        REQUEST, adapters=[], digests=[], workers=[], queue_s=None, adapter_wait_s=None, first_token_s=None
    )
    line = line_of(request, caplog)
    assert "adapter=_base digest=- worker=- " in line and "queue_s=- adapter_wait_s=- first_token_s=- " in line


def test_a_name_that_a_client_chose_stays_on_the_line(caplog: pytest.LogCaptureFixture) -> None:
    assert r"request_id=a\nforged " in line_of(replace(REQUEST, request_id="a\nforged"), caplog)


def test_nothing_is_written_where_the_level_is_higher() -> None:
    log = logging.getLogger("control_plane.observers.request_log")
    former = log.level
    log.setLevel(logging.WARNING)
    try:
        assert not RequestLog().is_on and not Observers(RequestLog()).is_on
    finally:
        log.setLevel(former)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        PARENT.upper(),
        PARENT.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{PARENT}-more",  # version 00 has four parts
        f"01-{TRACE}-b7ad6b7169203331-01-{'x' * 300}",
        f"{PARENT}\n",
    ],
)
def test_a_traceparent_of_another_form_is_ignored(text: str) -> None:
    assert valid_traceparent(text) == ""


def test_a_later_version_may_have_more_parts() -> None:
    text = f"01-{TRACE}-b7ad6b7169203331-01-more"
    assert valid_traceparent(text) == text and trace_id_of(text) == TRACE


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((), ""),
        (("congo=t61rcWkgMzE,rojo=00f067aa0ba902b7",), "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"),
        (("a=1 ,\t b=2", "c@d=3"), "a=1,b=2,c@d=3"),  # several of them are one list; spaces around members are none
        (("a=1,,b=2",), "a=1,b=2"),
        (("a=" + "x" * 256,), "a=" + "x" * 256),
    ],
)
def test_a_tracestate_is_one_list(values: tuple[str, ...], expected: str) -> None:
    assert valid_tracestate(values) == expected


@pytest.mark.parametrize(
    "values",
    [
        ("x",),
        ("a=1,A=2",),
        ("a=1,b=",),
        ("a=1,a=2",),  # a key may be there once
        ("a=1", "b=2=3"),
        ("a=1\nforged=2",),
        ("a=é",),
        ("a=" + "x" * 257,),
        ("a=" + "x" * 250, "b=" + "x" * 250, "c=" + "x" * 10),
        (",".join(f"k{number}=1" for number in range(33)),),
    ],
)
def test_a_tracestate_of_another_form_is_ignored(values: tuple[str, ...]) -> None:
    assert valid_tracestate(values) == ""


def test_records_of_a_call_have_the_id_of_its_trace() -> None:
    assert log_context() == {}
    with acting_as(Caller(traceparent=PARENT)):
        assert log_context() == {"trace_id": TRACE}

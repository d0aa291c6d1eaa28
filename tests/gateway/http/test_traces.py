"""The trace of an HTTP request, as the calls to Motet that it causes have it."""

from __future__ import annotations

import pytest
from motet.connection.trace import TRACEPARENT, TRACESTATE, trace_metadata
from starlette.types import Receive, Scope, Send

from gateway.http.traces import Traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def metadata_of(*headers: tuple[bytes, bytes]) -> tuple[tuple[str, str], ...]:
    seen: list[tuple[tuple[str, str], ...]] = []

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(trace_metadata())

    async def unused(*_: object) -> None:
        raise AssertionError

    token = TRACEPARENT.set("left over from another request of this task")
    state = TRACESTATE.set("left=over")
    try:
        await Traces(app)({"type": "http", "headers": list(headers)}, unused, unused)  # type: ignore[arg-type]
    finally:
        TRACEPARENT.reset(token)
        TRACESTATE.reset(state)
    return seen[0]


async def test_the_header_goes_on() -> None:
    assert await metadata_of((b"traceparent", PARENT.encode())) == (("traceparent", PARENT),)


async def test_all_headers_of_the_state_go_on_with_it() -> None:
    found = await metadata_of((b"tracestate", b"a=1"), (b"traceparent", PARENT.encode()), (b"tracestate", b"b=2,\tc=3"))
    assert found == (("traceparent", PARENT), ("tracestate", "a=1,b=2, c=3"))


@pytest.mark.parametrize("value", [b"", b"a=" + b"x" * 511, "a=é".encode("latin-1"), b"a=\x01"])
async def test_a_state_that_cannot_be_metadata_leaves_the_trace(value: bytes) -> None:
    assert await metadata_of((b"traceparent", PARENT.encode()), (b"tracestate", value)) == (("traceparent", PARENT),)


@pytest.mark.parametrize("value", [b"", b"x" * 257, "é".encode("latin-1"), b"a\x01b"])
async def test_what_cannot_be_metadata_is_left_out(value: bytes) -> None:
    assert await metadata_of((b"traceparent", value)) == ()


async def test_without_the_header_there_is_none() -> None:
    assert await metadata_of() == ()

"""A request that one process of the gateway hands over to another keeps its trace and its key."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from motet.connection.trace import trace_metadata

from gateway.config import GatewayConfig
from gateway.http.bodies import Bodies
from gateway.http.keys import Keys, current_key
from gateway.http.settings import HttpSettings
from gateway.http.siblings import Place, Siblings
from gateway.http.traces import Traces
from gateway.http.upstream import Upstream
from gateway.tinker.futures import Futures
from gateway.tinker.routes import tinker_app, tinker_routes
from gateway.tinker.samples import Samples

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STATE = "vendor=one,other=two"
SAMPLE = {"prompt": {"chunks": [{"tokens": [5], "type": "encoded_text"}]}, "sampling_params": {"max_tokens": 1}}
NUM_PROCESSES = 2


class RecordingFutures(Futures):
    """Starts nothing, and keeps what a call to Motet would have with it."""

    def __init__(self) -> None:
        super().__init__(GatewayConfig().tinker)
        self.started: list[tuple[str, tuple[tuple[str, str], ...]]] = []

    def start(self, request_id: str, owner: str, work: Callable[[], Awaitable[bytes]]) -> None:
        self.started.append((current_key(), trace_metadata()))


@contextlib.asynccontextmanager
async def process(place: Place) -> AsyncIterator[tuple[httpx.AsyncClient, RecordingFutures]]:
    """One of the gateway's processes: a client that is connected to it, and what it started."""
    config = GatewayConfig(http=HttpSettings(server_absence_s=0.0, server="127.0.0.1:1"))
    futures, upstream, siblings, bodies = RecordingFutures(), Upstream(config.http), Siblings(place), Bodies(1 << 20)
    samples = Samples(upstream, futures, bodies, siblings, 10.0)
    app = Traces(Keys(tinker_app(tinker_routes(upstream, samples, bodies, config.http.base_model_names))))
    await siblings.listen(samples.serve)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        try:
            yield client, futures
        finally:
            await siblings.close()
            await futures.close()
            await upstream.close()


@pytest.mark.parametrize("state", [STATE, ""])
async def test_a_request_is_traced_whichever_process_it_came_to(state: str) -> None:
    stated = {"tracestate": state} if state else {}
    headers = {"authorization": "Bearer motet_k1_secret", "traceparent": PARENT, **stated}
    expected = (("traceparent", PARENT), *stated.items())
    with tempfile.TemporaryDirectory() as folder:  # short enough for a socket's name
        places = [Place(index, NUM_PROCESSES, Path(folder)) for index in range(NUM_PROCESSES)]
        async with process(places[0]) as (first, in_first), process(places[1]) as (_second, in_second):
            for number in range(8):
                session = f"motet-{number:032}:sample:0:base"
                body = SAMPLE | {"sampling_session_id": session, "seq_id": 0}
                response = await first.post("asample", json=body, headers=headers)
                assert response.status_code == 200, response.text
    assert in_first.started and in_second.started, "some were at home, and some were handed over"
    assert {trace for _key, trace in in_first.started} == {expected}
    assert {trace for _key, trace in in_second.started} == {expected}
    assert {key for key, _trace in (*in_first.started, *in_second.started)} == {"motet_k1_secret"}

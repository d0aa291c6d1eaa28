"""The worker service over a context that the test plays: how the end of a stream is booked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from contract.v1 import plan_pb2
from control_plane.errors import InvalidRequest, StoreUnavailable
from control_plane.fleet.service import WorkerService
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.session import WorkerSession
from data_plane.wire import encode_hello
from tests.fakes.fleet_rig import CAPACITIES, FakeClock, FakeWeights, InspectedFleet, make_fleet

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class Context:
    """The worker's end of one call."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()  # what `read` gives: messages, EOF, or errors to be raised
        self.code: grpc.StatusCode | None = None
        self.peer_address = "ipv4:127.0.0.1:5005"

    def peer(self) -> str:
        return self.peer_address

    async def read(self) -> Any:
        item = await self.requests.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def send_initial_metadata(self, _metadata: object) -> None:
        return

    async def write(self, _message: object) -> None:
        return

    async def abort(self, code: grpc.StatusCode, _details: str) -> None:
        self.code = code
        raise grpc.aio.AbortError


@contextlib.asynccontextmanager
async def attached(fleet: InspectedFleet) -> AsyncIterator[tuple[WorkerSession, Context, asyncio.Task[None]]]:
    """A session, its worker's end, and its handler."""
    context = Context()
    context.requests.put_nowait(encode_hello(CAPACITIES, "w0"))
    service = WorkerService(fleet, FakeWeights())
    handler = asyncio.create_task(service.Attach(None, context))  # type: ignore[arg-type]  # what is used of a context
    async with asyncio.timeout(30):
        while not fleet.num_workers:
            await asyncio.sleep(0)
        [session] = fleet.parts.sessions.by_id.values()
        yield session, context, handler
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AbortError):
            await handler


@pytest.mark.parametrize("order", ["end of stream first", "cancelled first", "both at once", "an error first"])
async def test_a_stream_that_ends_without_a_word_is_a_loss_in_whatever_order_it_is_noticed(
    clock: FakeClock, order: str
) -> None:
    """When a process dies, gRPC ends the reading and cancels the handler; either may run first."""
    async with attached(make_fleet(clock)) as (session, context, handler):
        if order == "an error first":
            context.requests.put_nowait(RuntimeError("the transport broke"))
        elif order != "cancelled first":
            context.requests.put_nowait(EOF)
        if order == "end of stream first":
            await session.ended.wait()
        if order != "an error first":
            handler.cancel()
    assert session.end_cause is EndCause.LOST


@pytest.mark.parametrize("then", ["end of stream", "cancelled"])
async def test_a_worker_that_says_so_has_left_whatever_follows(clock: FakeClock, then: str) -> None:
    async with attached(make_fleet(clock)) as (session, context, handler):
        context.requests.put_nowait(plan_pb2.AttachRequest(leave=plan_pb2.Leave(reason="stopped by a signal")))
        await session.ended.wait()
        if then == "cancelled":
            handler.cancel()
        else:
            context.requests.put_nowait(EOF)
    assert session.end_cause is EndCause.LEFT
    assert session.end_reason == "the worker left: stopped by a signal"
    assert context.code is None


async def test_a_server_that_cancels_the_handler_of_a_worker_loses_it(clock: FakeClock) -> None:
    async with attached(make_fleet(clock)) as (session, _, handler):
        handler.cancel()
    assert (session.end_cause, session.end_reason) == (EndCause.LOST, "the stream was cut")


async def test_ids_of_workers_that_are_refused_stand_in_one_line_of_the_log_and_are_cut_off(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    service, context = WorkerService(make_fleet(clock), FakeWeights()), Context()
    worker_id = "w\nERROR forged line \x1b[31m" + "x" * 10_000
    context.requests.put_nowait(encode_hello(CAPACITIES, worker_id))
    with pytest.raises(InvalidRequest):
        await service.Attach(None, context)  # type: ignore[arg-type]  # what is used of a context
    request = plan_pb2.FetchAdapterRequest(digest="0" * 64, worker_id=worker_id)
    with pytest.raises(StoreUnavailable):
        async for _ in service.FetchAdapter(request, context):  # type: ignore[arg-type]  # as above
            pass
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" worker_id=")[0] for line in lines] == ["worker refused", "adapter not served"]
    assert all("w\\nERROR forged line \\x1b[31mxxx" in line and "\n" not in line and len(line) < 500 for line in lines)


@pytest.mark.parametrize(
    ("peer", "reads_files", "part"),
    [
        ("ipv4:127.0.0.1:5005", True, "files"),
        ("ipv6:%5B::1%5D:5005", True, "files"),
        ("unix:", True, "files"),
        ("ipv4:127.0.0.1:5005", False, "data"),
        ("ipv4:10.0.0.1:5005", True, "data"),
        ("ipv6:%5B2001:db8::1%5D:5005", True, "data"),
        ("somewhere", True, "data"),
    ],
)
async def test_files_are_named_to_workers_of_this_machine_that_read_them(
    clock: FakeClock, tmp_path: Path, peer: str, reads_files: bool, part: str
) -> None:
    weights, context = FakeWeights(), Context()
    digest = weights.add("poet").digest
    weights.packed[digest] = replace(weights.packed[digest], paths=(tmp_path / "0", tmp_path / "1"))
    context.peer_address = peer
    service = WorkerService(make_fleet(clock), weights)
    request = plan_pb2.FetchAdapterRequest(digest=digest, worker_id="w0", reads_files=reads_files)
    call = service.FetchAdapter(request, context)  # type: ignore[arg-type]  # what is used of a context
    manifest, *rest = [message async for message in call]
    assert manifest.WhichOneof("part") == "manifest" and {message.WhichOneof("part") for message in rest} == {part}
    if part == "files":
        assert [list(message.files.paths) for message in rest] == [[str(tmp_path / "0"), str(tmp_path / "1")]]

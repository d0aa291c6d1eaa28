"""The worker's half of one stream, without a network: its only part here is the iteration of the call."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from contract.v1 import plan_pb2
from data_plane.stream.plan_stream import Ended, InboxItem, PlanStream
from tests.fakes.fleet_rig import FakeClock


class Call:
    """An Attach call that yields what the test says, and keeps what was sent by its end."""

    def __init__(self, messages: Iterator[plan_pb2.AttachResponse]) -> None:
        self._messages = messages
        self.requests: Iterator[plan_pb2.AttachRequest] = iter(())

    def __call__(self, requests: Iterator[plan_pb2.AttachRequest], /) -> Any:
        self.requests = requests
        return self

    def __iter__(self) -> Iterator[plan_pb2.AttachResponse]:
        return self._messages


def open_stream(messages: Iterator[plan_pb2.AttachResponse]) -> tuple[PlanStream, SimpleQueue[InboxItem], Call]:
    inbox: SimpleQueue[InboxItem] = SimpleQueue()
    call = Call(messages)
    return PlanStream(call, "127.0.0.1:1", inbox, FakeClock()), inbox, call


def test_reader_that_fails_for_any_reason_ends_the_session() -> None:
    def broken_stream() -> Iterator[plan_pb2.AttachResponse]:
        yield plan_pb2.AttachResponse(evict_adapter=plan_pb2.EvictAdapter())
        raise RuntimeError("no message of ours")

    stream, inbox, _ = open_stream(broken_stream())
    stream.read()
    first, ended = inbox.get_nowait(), inbox.get_nowait()
    assert isinstance(first, plan_pb2.AttachResponse) and first.WhichOneof("message") == "evict_adapter"
    assert isinstance(ended, Ended) and "no message of ours" in ended.reason
    assert stream.ended is ended


def test_a_ping_is_answered_past_the_plans_that_wait() -> None:
    """By the reader: nobody takes a plan out of the inbox here."""
    plan = plan_pb2.AttachResponse(step_plan=plan_pb2.StepPlan(step_id=1))
    stream, inbox, call = open_stream(iter([plan, plan_pb2.AttachResponse(ping=plan_pb2.Ping(sequence=7))]))
    stream.read()
    stream.close_outbox()
    assert [request.pong.sequence for request in call.requests] == [7]
    assert inbox.get_nowait() == plan
    assert inbox.get_nowait() == Ended("the control plane closed the stream")


def test_nothing_leaves_after_the_outbox_was_closed() -> None:
    stream, _, call = open_stream(iter(()))
    leave = plan_pb2.AttachRequest(leave=plan_pb2.Leave(reason="stop requested"))
    stream.send(leave)
    stream.close_outbox()
    stream.send(plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat()))
    assert list(call.requests) == [leave]

"""Messages leave in order, and none leaves once the session has ended."""

from __future__ import annotations

import asyncio

from contract.v1 import plan_pb2
from control_plane.fleet.workers.outbox import Outbox


def ping(sequence: int) -> plan_pb2.AttachResponse:
    return plan_pb2.AttachResponse(ping=plan_pb2.Ping(sequence=sequence))


async def test_messages_are_taken_once_and_in_order() -> None:
    outbox = Outbox()
    outbox.send(ping(1))
    outbox.send(ping(2))
    assert [message.ping.sequence for message in await outbox.wait()] == [1, 2]
    assert outbox.take() == []


async def test_wait_returns_with_the_first_message() -> None:
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.send(ping(1))
    assert [message.ping.sequence for message in await waiting] == [1]


async def test_close_wakes_who_waits_and_drops_what_was_not_taken() -> None:
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    outbox.close()
    assert await waiting == []
    outbox.send(ping(1))
    assert await outbox.wait() == [] and outbox.take() == []

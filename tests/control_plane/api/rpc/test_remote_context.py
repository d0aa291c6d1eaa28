"""The context of an RPC whose client is connected to a front end."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from control_plane.api.rpc.frames import ACKNOWLEDGE_EVERY, MAX_UNWRITTEN, Call, Kind, Status
from control_plane.api.rpc.remote_context import ClientGone, RemoteContext

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class Rig:
    """A context, and what it sent."""

    def __init__(self, remaining_s: float | None = None) -> None:
        self.sent: list[tuple[Kind, bytes]] = []
        self.now_s = 100.0
        call = Call("/a.B/C", "ipv4:1.2.3.4:5", (("k", "v"),), {"t": [b"ssl"]}, remaining_s)
        self.context = RemoteContext(call, lambda *frame: self.sent.append(frame), clock=lambda: self.now_s)

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind, _ in self.sent]


async def waiting(work: asyncio.Task[object]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert not work.done()


async def test_the_context_says_what_the_client_sent() -> None:
    rig = Rig(remaining_s=2.0)
    context = rig.context
    assert (context.method, context.peer(), context.invocation_metadata()) == (
        "/a.B/C",
        "ipv4:1.2.3.4:5",
        (("k", "v"),),
    )
    assert context.auth_context() == {"t": [b"ssl"]}
    rig.now_s += 0.5
    assert context.time_remaining() == 1.5
    rig.now_s += 5
    assert context.time_remaining() == 0.0 and Rig().context.time_remaining() is None


async def test_messages_are_requested_one_by_one() -> None:
    rig = Rig()
    rig.context.use(lambda raw: raw.decode(), None)
    first = asyncio.ensure_future(rig.context.read())
    await waiting(first)
    assert rig.sent == [(Kind.READ, b"")]
    rig.context.on_request(b"one")
    assert await first == "one"
    second = asyncio.ensure_future(rig.context.read())
    await waiting(second)
    assert rig.sent == [(Kind.READ, b"")] * 2
    rig.context.on_end()
    assert await second is EOF and await rig.context.read() is EOF and rig.kinds == [Kind.READ] * 2
    assert [message async for message in rig.context.requests()] == []


async def test_responses_go_out_at_once_until_the_front_end_has_enough() -> None:
    rig = Rig()
    rig.context.use(None, lambda text: text.encode())
    for number in range(MAX_UNWRITTEN):
        assert rig.context.write_at_once(str(number))
    assert not rig.context.write_at_once("too many")
    writing = asyncio.ensure_future(rig.context.write("late"))
    await waiting(writing)
    rig.context.on_written(ACKNOWLEDGE_EVERY)
    await writing
    assert [body.decode() for _, body in rig.sent] == [*map(str, range(MAX_UNWRITTEN)), "late"]
    assert set(rig.kinds) == {Kind.RESPONSE}


async def test_the_first_status_counts_and_ends_the_call() -> None:
    rig = Rig()
    with pytest.raises(grpc.aio.AbortError):
        await rig.context.abort(grpc.StatusCode.NOT_FOUND, "gone", (("key", b"\x01"),))
    rig.context.end(Status(0))
    assert rig.kinds == [Kind.STATUS] and rig.context.done()
    assert Status.decode(rig.sent[0][1]) == Status(5, "gone", (("key", b"\x01"),))


async def test_nothing_is_sent_to_a_client_that_has_left() -> None:
    rig = Rig()
    rig.context.on_gone()
    rig.context.end(Status(0))
    assert rig.sent == [] and rig.context.done()


@pytest.mark.parametrize("is_sent", [True, False])
async def test_initial_metadata_fails_where_the_front_end_cannot_send_it(*, is_sent: bool) -> None:
    rig = Rig()
    beginning = asyncio.ensure_future(rig.context.send_initial_metadata(()))
    await waiting(beginning)
    assert rig.kinds == [Kind.BEGIN]
    rig.context.on_begun(is_sent=is_sent)
    if is_sent:
        await beginning
    else:
        with pytest.raises(ClientGone):
            await beginning

"""Frames between the control plane and its front ends: whole whatever the pieces that the socket gives."""

from __future__ import annotations

import asyncio
import random
import socket

from control_plane.api.rpc.frames import HEADER, Call, Kind, Link, Status
from tests.secret_scan import JWT, METADATA


def test_a_call_and_a_status_arrive_as_they_were() -> None:
    call = Call(
        method="/motet.v1.StatusService/GetStatus",
        peer="ipv4:127.0.0.1:1",
        metadata=(("motet-tenant", "ä"), ("key-bin", bytes(range(256))), ("empty", "")),
        auth_context={"x509_pem_cert": [b"\xff pem", b""], "transport_security_type": [b"ssl"]},
        remaining_s=1.5,
    )
    assert Call.decode(call.encode()) == call
    status = Status(5, "no such adapter: \N{SNOWMAN}", (("grpc-status-details-bin", b"\x08\x05\xff"),))
    assert Status.decode(status.encode()) == status


def test_a_call_shows_no_credential() -> None:
    call = Call("/motet.v1.StatusService/GetStatus", "ipv4:127.0.0.1:1", METADATA, {}, None)
    assert "GetStatus" in repr(call) and JWT not in repr(call)


def frame(call_id: int, kind: Kind, body: bytes) -> bytes:
    return HEADER.pack(len(body), call_id, kind) + body


async def test_frames_are_whole_whatever_the_pieces() -> None:
    draw = random.Random(3)
    sent = [
        (draw.randrange(2**32), draw.choice(list(Kind)), draw.randbytes(draw.choice([0, 1, 9, 70_000])))
        for _ in range(60)
    ]
    stream = b"".join(frame(*one) for one in sent)
    for largest in (1, 8, 9, 4096, len(stream)):
        got: list[tuple[int, int, bytes]] = []
        link = Link(lambda *one, got=got: got.append(one), lambda: None)
        start = 0
        while start < len(stream):
            size = draw.randint(1, largest) if largest > 1 else max(1, 1 if start < 40 else len(stream))
            link.data_received(stream[start : start + size])
            start += size
        assert got == sent, f"pieces of up to {largest} bytes"


async def test_frames_of_one_turn_leave_together_and_in_order() -> None:
    got: list[tuple[int, int, bytes]] = []
    lost = asyncio.Event()
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, sender = await loop.create_unix_connection(lambda: Link(lambda *_: None, lambda: None), sock=ours)
    await loop.create_unix_connection(lambda: Link(lambda *one: got.append(one), lost.set), sock=theirs)
    for number in range(5):
        sender.send(number, Kind.RESPONSE, bytes([number]))
    sender.close()  # what was sent before it arrives
    await asyncio.wait_for(lost.wait(), 30)
    assert got == [(number, Kind.RESPONSE, bytes([number])) for number in range(5)]
    sender.send(9, Kind.STATUS)  # nobody is there: nothing happens
    await asyncio.sleep(0)

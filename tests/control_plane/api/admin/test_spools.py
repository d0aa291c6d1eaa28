"""Uploads that break and go on: what the server keeps, for whom, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from motet.v1 import adapters_pb2

from control_plane.access.principal import Principal, Role
from control_plane.api.admin import spools
from control_plane.api.admin.upload import UploadReceiver
from control_plane.awake import AwakeClock
from control_plane.caller import Caller, acting_as
from control_plane.errors import DigestMismatch, InvalidRequest, UploadNotFound, UploadTakenOver
from control_plane.registry.peft.ingest import FILE_NAMES
from tests.control_plane.api.admin.test_upload import MIB, PEER, Clock, chunk, header, receiver_of

WEIGHTS = FILE_NAMES[1]
OTHER = Caller(principal=Principal("other", roles=frozenset({Role.ADMIN})))


def named(upload_id: str, size_bytes: int = MIB, data: bytes = bytes(MIB)) -> adapters_pb2.UploadAdapterRequest:
    message = header(size_bytes, data)
    message.header.upload_id = upload_id
    return message


async def broken(receiver: UploadReceiver, upload_id: str, num_bytes: int = 1000, size_bytes: int = MIB) -> None:
    """An upload that ends after so many bytes of the weights."""

    async def messages() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named(upload_id, size_bytes)
        yield chunk(0, 0, b"{}")
        yield chunk(1, 0, bytes(num_bytes))

    with pytest.raises(InvalidRequest, match="ended after"):
        async with receiver.open(messages(), PEER) as upload:
            await upload.receive()


def num_spools(directory: Path) -> int:
    return len(list((directory / "uploads").iterdir()))


async def test_further_call_sends_only_what_is_missing(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path, Clock())
    await broken(receiver, "u")
    assert receiver.received_bytes("u") == [2, 1000]

    async def rest() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named("u")
        yield chunk(1, 1000, bytes(MIB - 1000))

    async with receiver.open(rest(), PEER) as upload:
        paths = await upload.receive()
        assert paths[WEIGHTS].read_bytes() == bytes(MIB)
        upload.end()
    assert num_spools(tmp_path) == 0
    with pytest.raises(UploadNotFound):
        receiver.received_bytes("u")


async def test_resumed_bytes_that_are_not_the_announced_ones_fail_by_digest_and_leave_nothing(tmp_path: Path) -> None:
    """The digest is that of the whole file: bytes of the first call and of the second one."""
    receiver = receiver_of(tmp_path, Clock())
    await broken(receiver, "u")

    async def other_bytes() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named("u")
        yield chunk(1, 1000, bytes(MIB - 1001) + b"x")

    with pytest.raises(DigestMismatch, match=f"{WEIGHTS}: the bytes that arrived do not have the announced sha256"):
        async with receiver.open(other_bytes(), PEER) as upload:
            await upload.receive()
    assert num_spools(tmp_path) == 0
    with pytest.raises(UploadNotFound):
        receiver.received_bytes("u")


@pytest.mark.parametrize(("offset", "message"), [(0, "is 0, but 1000 bytes"), (2000, "is 2000, but 1000 bytes")])
async def test_wrong_offset_is_refused_with_the_right_one_and_keeps_the_rest(
    tmp_path: Path, offset: int, message: str
) -> None:
    receiver = receiver_of(tmp_path, Clock())
    await broken(receiver, "u")

    async def wrong() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named("u")
        yield chunk(1, offset, b"x")

    with pytest.raises(InvalidRequest, match=message):
        async with receiver.open(wrong(), PEER) as upload:
            await upload.receive()
    assert receiver.received_bytes("u") == [2, 1000]


async def test_other_files_under_the_same_id_are_refused(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path, Clock())
    await broken(receiver, "u")

    async def other() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named("u", MIB, b"other")

    with pytest.raises(InvalidRequest, match="use a new id for other files"):
        async with receiver.open(other(), PEER):
            pass
    assert receiver.received_bytes("u") == [2, 1000]


async def test_broken_upload_is_gone_after_its_time(tmp_path: Path) -> None:
    clock = Clock()
    receiver = receiver_of(tmp_path, clock)
    await broken(receiver, "u")
    clock.now_s += spools.KEPT_S - 1
    assert receiver.received_bytes("u") == [2, 1000]
    clock.now_s += 1
    with pytest.raises(UploadNotFound):
        receiver.received_bytes("u")
    assert num_spools(tmp_path) == 0


async def test_broken_upload_is_gone_after_its_time_also_if_no_other_upload_runs(tmp_path: Path) -> None:
    """The clock that judges clients stands still while nothing reads it."""
    source = Clock()
    receiver = receiver_of(tmp_path, AwakeClock(source), kept_clock=source)
    await broken(receiver, "u")
    source.now_s += spools.KEPT_S
    with pytest.raises(UploadNotFound):
        receiver.received_bytes("u")
    assert num_spools(tmp_path) == 0


async def test_upload_without_an_id_leaves_nothing(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path, Clock())
    await broken(receiver, "")
    assert num_spools(tmp_path) == 0
    with pytest.raises(UploadNotFound):
        receiver.received_bytes("")


async def test_tenant_has_a_bounded_number_and_loses_its_oldest(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path, Clock())
    with acting_as(Caller(tenant="other")):
        await broken(receiver, "u")
    for index in range(spools.MAX_KEPT_PER_TENANT + 1):
        await broken(receiver, f"u{index}", 1)
    assert num_spools(tmp_path) == spools.MAX_KEPT_PER_TENANT + 1
    with pytest.raises(UploadNotFound):
        receiver.received_bytes("u0")
    assert receiver.received_bytes("u1") == [2, 1]
    with acting_as(Caller(tenant="other")):
        assert receiver.received_bytes("u") == [2, 1000]


async def test_tenant_has_bounded_bytes(tmp_path: Path) -> None:
    receiver = UploadReceiver(tmp_path / "uploads", max_adapter_bytes=2 * MIB, clock=Clock())
    await broken(receiver, "first", MIB // 2)
    await broken(receiver, "second", MIB, 2 * MIB - 2)
    assert receiver.received_bytes("first") == [2, MIB // 2]
    await broken(receiver, "third", MIB, 2 * MIB - 2)
    for gone in ("first", "second"):
        with pytest.raises(UploadNotFound):
            receiver.received_bytes(gone)
    assert receiver.received_bytes("third") == [2, MIB]


async def test_all_tenants_together_have_bounded_bytes(tmp_path: Path) -> None:
    receiver = UploadReceiver(tmp_path / "uploads", max_adapter_bytes=MIB, clock=Clock())
    for tenant in range(5):
        with acting_as(Caller(tenant=f"t{tenant}")):
            await broken(receiver, "u", MIB - 10, MIB - 2)
    assert num_spools(tmp_path) == 4
    with acting_as(Caller(tenant="t4")), pytest.raises(UploadNotFound):
        receiver.received_bytes("u")


async def test_kept_files_are_removed_for_an_upload_that_needs_the_disk(tmp_path: Path) -> None:
    def free_bytes(directory: Path) -> int:
        return (65 * MIB + 2) if not list(directory.iterdir()) or len(list(directory.iterdir())) < 2 else 0

    receiver = receiver_of(tmp_path, Clock(), free_bytes=free_bytes)
    await broken(receiver, "first")
    await broken(receiver, "second")
    with pytest.raises(UploadNotFound):
        receiver.received_bytes("first")
    assert receiver.received_bytes("second") == [2, 1000]


@pytest.mark.parametrize(
    "other", [Caller(tenant="b"), Caller(principal=Principal("other", roles=frozenset({Role.ADMIN})))]
)
async def test_upload_of_another_does_not_exist(tmp_path: Path, other: Caller) -> None:
    receiver = receiver_of(tmp_path, Clock())
    await broken(receiver, "u")
    with acting_as(other):
        with pytest.raises(UploadNotFound):
            receiver.received_bytes("u")
        await broken(receiver, "u", 10)  # begins at its own beginning
    assert receiver.received_bytes("u") == [2, 1000]


async def test_second_call_takes_over_from_one_that_still_receives(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path, Clock())
    waits = asyncio.Event()

    async def silent() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named("u")
        yield chunk(0, 0, b"{}")
        yield chunk(1, 0, bytes(1000))
        waits.set()
        await asyncio.Event().wait()

    async def first() -> None:
        async with receiver.open(silent(), PEER) as upload:
            await upload.receive()

    task = asyncio.create_task(first())
    await waits.wait()

    async def rest() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named("u")
        yield chunk(1, 1000, bytes(MIB - 1000))

    async with receiver.open(rest(), PEER) as upload:
        with pytest.raises(UploadTakenOver):
            await task
        await upload.receive()
        upload.end()
    assert num_spools(tmp_path) == 0


async def test_of_calls_that_take_over_at_once_every_one_ends(tmp_path: Path) -> None:
    """One of them goes on; each of the others ends with UploadTakenOver."""
    receiver = receiver_of(tmp_path, Clock())
    first_waits = asyncio.Event()

    async def messages(waits: asyncio.Event) -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named("u")
        waits.set()
        await asyncio.Event().wait()

    async def call(waits: asyncio.Event) -> None:
        async with receiver.open(messages(waits), PEER) as upload:
            await upload.receive()

    first = asyncio.create_task(call(first_waits))
    await first_waits.wait()
    others = [asyncio.create_task(call(asyncio.Event())) for _ in range(3)]
    tasks = {first, *others}
    for _ in others:  # one call goes on
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with pytest.raises(UploadTakenOver):
                await task
        if len(tasks) == 1:
            break
    (last,) = tasks
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last


async def test_cancelled_call_keeps_every_byte_that_came(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path, Clock())
    waits = asyncio.Event()

    async def silent() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield named("u")
        yield chunk(0, 0, b"{}")
        yield chunk(1, 0, bytes(300_000))
        yield chunk(1, 300_000, bytes(7))
        waits.set()
        await asyncio.Event().wait()

    async def first() -> None:
        async with receiver.open(silent(), PEER) as upload:
            await upload.receive()

    task = asyncio.create_task(first())
    await waits.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert receiver.received_bytes("u") == [2, 300_007]

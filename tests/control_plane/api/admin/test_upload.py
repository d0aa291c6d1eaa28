"""The upload receiver: who waits for whom, for how long, and on whose disk space."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from motet.v1 import adapters_pb2

from control_plane.api.admin.disk_space import SPARE_BYTES
from control_plane.api.admin.upload import DROP_BYTES, GRACE_S, LEAST_BYTES_PER_S, UploadReceiver, check_header
from control_plane.awake import AwakeClock
from control_plane.errors import DeadlineExceeded, Exhausted, InvalidRequest
from control_plane.registry.adapter_files import CONFIG_FILE, EXACT_ARRAY, ROWS_ARRAY, WEIGHTS_ARRAY
from control_plane.registry.peft.ingest import FILE_NAMES

PEER = ("ipv4:10.0.0.1", "ipv4:10.0.0.1:1")
MIB = 1 << 20


class Clock(AwakeClock):
    """The test says how long the server ran."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def header(size_bytes: int, data: bytes = b"") -> adapters_pb2.UploadAdapterRequest:
    """Of a small config and of weights of `size_bytes`, whose hash is that of `data`."""
    files = [
        adapters_pb2.UploadFile(name=FILE_NAMES[0], size_bytes=2, sha256=hashlib.sha256(b"{}").hexdigest()),
        adapters_pb2.UploadFile(name=FILE_NAMES[1], size_bytes=size_bytes, sha256=hashlib.sha256(data).hexdigest()),
    ]
    return adapters_pb2.UploadAdapterRequest(header=adapters_pb2.UploadHeader(adapter_id="a", files=files))


def chunk(file_index: int, offset: int, data: bytes) -> adapters_pb2.UploadAdapterRequest:
    return adapters_pb2.UploadAdapterRequest(chunk={"file_index": file_index, "offset": offset, "data": data})


async def upload_of(
    size_bytes: int, chunk_bytes: int, clock: Clock, seconds_per_chunk: float
) -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
    """The messages of a client that takes so long for each chunk of the weights."""
    data = bytes(size_bytes)
    yield header(size_bytes, data)
    yield chunk(0, 0, b"{}")
    for start in range(0, size_bytes, chunk_bytes):
        clock.now_s += seconds_per_chunk
        yield chunk(1, start, data[start : start + chunk_bytes])


def receiver_of(directory: Path, clock: AwakeClock, **settings: Any) -> UploadReceiver:
    settings = {"kept_clock": clock, **settings}
    return UploadReceiver(directory / "uploads", max_adapter_bytes=1 << 30, clock=clock, **settings)


async def test_trickling_upload_ends_soon_after_its_grace(tmp_path: Path) -> None:
    """A byte every 29 s keeps every idle timeout quiet: 1 GiB of that would take a thousand years."""
    clock = Clock()
    receiver = receiver_of(tmp_path, clock)
    with pytest.raises(DeadlineExceeded, match="4 bytes came in 58 s; after 30 s an upload must bring 65536 bytes per"):
        async with receiver.open(upload_of(1 << 20, 1, clock, 29.0), PEER) as upload:
            await upload.receive()
    assert clock.now_s <= GRACE_S + 29.0
    assert not list((tmp_path / "uploads").iterdir())


async def test_upload_at_the_least_rate_is_taken(tmp_path: Path) -> None:
    clock = Clock()
    receiver = receiver_of(tmp_path, clock)
    messages = upload_of(4 * MIB, MIB, clock, seconds_per_chunk=MIB / LEAST_BYTES_PER_S)
    async with receiver.open(messages, PEER) as upload:
        paths = await upload.receive()
        assert paths[FILE_NAMES[1]].read_bytes() == bytes(4 * MIB)
    assert clock.now_s == 4 * MIB / LEAST_BYTES_PER_S > GRACE_S


async def test_time_that_the_server_takes_is_not_the_clients(tmp_path: Path) -> None:
    """The clock goes on by an hour between two messages, while the server is busy with the first."""
    clock = Clock()

    async def messages() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield header(MIB, bytes(MIB))
        yield chunk(0, 0, b"{}")
        yield chunk(1, 0, bytes(MIB))

    async with receiver_of(tmp_path, clock).open(messages(), PEER) as upload:
        clock.now_s += 3600.0
        await upload.receive()


async def test_silent_upload_ends_by_itself(tmp_path: Path) -> None:
    async def silent() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield header(MIB)
        await asyncio.Event().wait()

    receiver = receiver_of(tmp_path, AwakeClock(), idle_timeout_s=0.01)
    with pytest.raises(DeadlineExceeded, match=r"no chunk came for 0\.01 s"):
        async with receiver.open(silent(), PEER) as upload:
            assert list((tmp_path / "uploads").iterdir())
            await upload.receive()
    assert not list((tmp_path / "uploads").iterdir())


async def test_small_chunks_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 chunks of 1 KiB in one change of threads."""
    hops = 0
    to_thread = asyncio.to_thread

    async def counted(*call: Any) -> Any:
        nonlocal hops
        hops += 1
        return await to_thread(*call)

    monkeypatch.setattr("control_plane.api.admin.upload.asyncio.to_thread", counted)
    clock = Clock()
    async with receiver_of(tmp_path, clock).open(upload_of(64 << 10, 1 << 10, clock, 0.0), PEER) as upload:
        await upload.receive()
    assert hops == 2, "one for each file"


async def only_header(size_bytes: int) -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
    yield header(size_bytes)


async def test_uploads_do_not_count_on_the_same_free_bytes(tmp_path: Path) -> None:
    """Room for one and a half uploads: the second one is refused while the first is open, and taken after it."""
    size = 100 * MIB
    receiver = receiver_of(tmp_path, Clock(), free_bytes=lambda _: SPARE_BYTES + size * 3 // 2)
    async with receiver.open(only_header(size), PEER):
        with pytest.raises(
            Exhausted, match=r"bytes are announced, more than the server's disk can take beside the uploads that run"
        ) as caught:
            async with receiver.open(only_header(size), PEER):
                pass
        assert caught.value.retry_after_s == 60.0
    async with receiver.open(only_header(size), PEER):
        pass


async def test_written_bytes_are_not_counted_twice(tmp_path: Path) -> None:
    """What an upload wrote is gone from the disk's free bytes; only the rest is kept for it."""
    half, small = MIB, 4  # bytes; `small` is all of an upload with weights of 2 bytes
    free = SPARE_BYTES + 2 + 2 * half + small
    receiver = receiver_of(tmp_path, Clock(), free_bytes=lambda _: free)
    taken = []

    async def messages() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        nonlocal free
        yield header(2 * half, bytes(2 * half))
        yield chunk(0, 0, b"{}")
        yield chunk(1, 0, bytes(half))
        free -= 2 + half
        async with receiver.open(only_header(2), "ipv4:10.0.0.2:1") as other:
            taken.append(other)
        yield chunk(1, half, bytes(half))

    async with receiver.open(messages(), PEER) as upload:
        await upload.receive()
    assert len(taken) == 1


async def test_one_host_leaves_places_to_the_others(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path, Clock(), max_open=4)
    async with contextlib.AsyncExitStack() as held:
        for port in range(4):
            await held.enter_async_context(receiver.open(only_header(2), ("ipv4:10.0.0.1", str(port))))
        with pytest.raises(Exhausted, match="at most 4 uploads at once") as caught:
            await held.enter_async_context(receiver.open(only_header(2), ("ipv4:10.0.0.1", "9")))
        assert caught.value.retry_after_s == pytest.approx(2.5, abs=0.5)
        for port in range(2):
            await held.enter_async_context(receiver.open(only_header(2), ("ipv4:10.0.0.2", str(port))))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((WEIGHTS_ARRAY, ROWS_ARRAY), ""),
        ((ROWS_ARRAY, CONFIG_FILE, WEIGHTS_ARRAY, EXACT_ARRAY, "model.sig"), ""),
        ((*FILE_NAMES, "model.sig"), ""),
        ((WEIGHTS_ARRAY,), "has 1 files; send adapter_config.json and .*, or model.lora_weights.npy and"),
        ((WEIGHTS_ARRAY, ROWS_ARRAY, ROWS_ARRAY), "has 3 files"),
        ((*FILE_NAMES, WEIGHTS_ARRAY, ROWS_ARRAY), "has 4 files"),
        ((*FILE_NAMES, EXACT_ARRAY), "has 3 files"),
        ((*FILE_NAMES, "model.sig", "model.sig"), "has model.sig twice"),
    ],
)
def test_the_files_of_an_upload_are_those_of_one_format(names: tuple[str, ...], words: str) -> None:
    header = adapters_pb2.UploadHeader(
        adapter_id="a",
        files=[adapters_pb2.UploadFile(name=name, size_bytes=1, sha256="0" * 64) for name in names],
    )
    if not words:
        check_header(header, 1 << 20)
        return
    with pytest.raises(InvalidRequest, match=words):
        check_header(header, 1 << 20)


async def refused(stream: AsyncIterator[adapters_pb2.UploadAdapterRequest], directory: Path, drop_s: float) -> None:
    receiver = UploadReceiver(directory, max_adapter_bytes=1000, drop_s=drop_s)
    with pytest.raises(InvalidRequest, match="--max-adapter-bytes"):
        async with receiver.open(stream, PEER):
            pytest.fail("its header is refused")


@pytest.mark.parametrize(("num_sent", "num_read"), [(5, 5), (1000, DROP_BYTES // MIB)])
async def test_what_a_refused_client_still_sends_is_read_up_to_a_bound(
    tmp_path: Path, num_sent: int, num_read: int
) -> None:
    """A client of grpc.aio whose write fails does not see the refusal."""
    taken = 0

    async def stream() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        nonlocal taken
        yield header(num_sent * MIB)
        data = bytes(MIB)
        for number in range(num_sent):
            taken += 1
            yield chunk(1, number * MIB, data)

    await refused(stream(), tmp_path, drop_s=60.0)
    assert taken == num_read


async def test_a_refused_client_that_sends_nothing_gets_its_refusal(tmp_path: Path) -> None:
    async def stream() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
        yield header(2000)
        await asyncio.Event().wait()

    await refused(stream(), tmp_path, drop_s=0.01)

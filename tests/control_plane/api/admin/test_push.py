"""The bytes of a push are written while the next ones come, and a full disk is still noticed."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from motet.v1 import push_pb2

from control_plane.access.principal import Principal, Role, of_roles
from control_plane.adapters.pushes import Pushed
from control_plane.api.admin import push
from control_plane.api.admin.disk_space import DiskSpace
from control_plane.api.admin.upload import Accepted, PacedMessages
from control_plane.awake import AwakeClock
from control_plane.caller import Caller, acting_as
from control_plane.errors import Exhausted, InvalidRequest
from control_plane.registry.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from control_plane.registry.records import Registered
from tests.control_plane.api.fake_adapters import DIGEST, adapter_record, adapter_version

CHUNK = 1000


async def chunks(count: int) -> AsyncIterator[push_pb2.PushVersionRequest]:
    for index in range(count):
        yield push_pb2.PushVersionRequest(chunk=push_pb2.PushChunk(data=bytes([index]) * CHUNK))


async def receive(path: Path, *, num_sent: int, num_announced: int) -> int:
    """The bytes that the reservation still has when all were received."""
    header = push_pb2.PushHeader(weights_bytes=num_announced * CHUNK)
    messages = PacedMessages(chunks(num_sent), idle_timeout_s=30.0, clock=AwakeClock())
    with DiskSpace(lambda: 1 << 40).reserved(header.weights_bytes) as space:
        await push.receive(Accepted(header, messages, path.parent, space), path)
        return space.num_bytes


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
async def test_every_byte_is_in_the_file_and_off_the_reservation(
    tmp_path: Path, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "WRITE_BYTES", 2 * CHUNK)
    assert await receive(tmp_path / "weights", num_sent=num_chunks, num_announced=num_chunks) == 0
    expected = b"".join(bytes([index]) * CHUNK for index in range(num_chunks))
    assert (tmp_path / "weights").read_bytes() == expected


@pytest.mark.parametrize("num_good", [0, 1, 2])
async def test_a_full_disk_ends_the_push_at_whichever_batch_it_comes(
    tmp_path: Path, num_good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.BytesIO):
        def writelines(self, lines: Any) -> None:
            nonlocal num_good
            if not num_good:
                raise OSError(errno.ENOSPC, "No space left on device")
            num_good -= 1

    monkeypatch.setattr(push, "WRITE_BYTES", CHUNK)
    monkeypatch.setattr(Path, "open", lambda *_: FullDisk())
    with pytest.raises(Exhausted, match="out of disk space"):
        await receive(tmp_path / "weights", num_sent=3, num_announced=3)


async def test_a_push_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="ended after 2000 of 3000 bytes"):
        await receive(tmp_path / "weights", num_sent=2, num_announced=3)


async def test_a_push_that_breaks_off_waits_for_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is removed when the push has ended: a file that is written after that would bring it back."""
    may_write, has_written = threading.Event(), threading.Event()

    def write_bytes(_path: Path, _data: bytes) -> int:
        may_write.wait(60)
        has_written.set()
        return 0

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    header = push_pb2.PushHeader(weights_bytes=3 * CHUNK)
    messages = PacedMessages(chunks(2), idle_timeout_s=30.0, clock=AwakeClock())
    with DiskSpace(lambda: 1 << 40).reserved(header.weights_bytes) as space:
        files = {CONFIG_FILE: tmp_path / "config", WEIGHTS_FILE: tmp_path / "weights"}
        asyncio.get_running_loop().call_later(0.2, may_write.set)  # long after the stream has ended
        with pytest.raises(InvalidRequest, match="ended after 2000 of 3000 bytes"):
            await push.receive_all(Accepted(header, messages, tmp_path, space), files)
    assert has_written.is_set()


async def test_a_cancelled_push_waits_for_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a cancelled stream looks like an orderly one. The cancellation comes while the end waits."""
    may_write, writes = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def write_bytes(_path: Path, _data: bytes) -> int:
        loop.call_soon_threadsafe(writes.set)
        may_write.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    header = push_pb2.PushHeader(weights_bytes=3 * CHUNK)
    messages = PacedMessages(chunks(2), idle_timeout_s=30.0, clock=AwakeClock())
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: errors.append(context))
    with DiskSpace(lambda: 1 << 40).reserved(header.weights_bytes) as space:
        files = {CONFIG_FILE: tmp_path / "config", WEIGHTS_FILE: tmp_path / "weights"}
        task = asyncio.create_task(push.receive_all(Accepted(header, messages, tmp_path, space), files))
        await writes.wait()
        while not (tmp_path / "weights").exists():
            await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
            assert not task.done(), "a thread writes into the directory"
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    del task
    gc.collect()
    assert not errors


@pytest.mark.parametrize(("role", "shown"), [(Role.ADAPTERS_WRITE, 0), (Role.ADMIN, 2)])
def test_only_an_admin_learns_on_how_many_workers_the_weights_are(role: Role, shown: int) -> None:
    """The push goes where the version before it is, and another tenant with equal weights may have brought it there."""
    record = adapter_record("poet", (adapter_version(DIGEST, number=1),), DIGEST)
    times = {"pack_s": 0.1, "cache_s": 0.1, "load_s": 0.1, "visible_s": 0.3, "durable_s": 0.4}
    pushed = Pushed(Registered(record.active_digest, record, None), ("w0", "w1"), "", **times)
    with acting_as(Caller("team-a", Principal("key:team-a", of_roles({role}), ("team-a",)), "ipv4:10.0.0.1:5")):
        assert push.response_to(pushed, 0.1).num_workers == shown

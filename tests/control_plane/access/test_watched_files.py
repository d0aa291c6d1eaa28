"""Files of the operator take effect when they change, and never when they are half-written."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from control_plane.access.watched_files import FileWatcher, WatchedFiles

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]


def write(path: Path, text: str, time_s: int) -> None:
    path.write_text(text, "utf-8")
    os.utime(path, (time_s, time_s))


def watched(path: Path) -> WatchedFiles[dict[str, int]]:
    return WatchedFiles([path], json.loads, what="numbers")


def into(seen: asyncio.Queue[T]) -> Callable[[T], None]:
    """Puts values into a queue of the running loop, from any thread."""
    loop = asyncio.get_running_loop()

    def put(value: T) -> None:
        loop.call_soon_threadsafe(seen.put_nowait, value)

    return put


def test_a_changed_file_takes_effect_at_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write(path, '{"a": 1}', 1)
    files, seen = watched(path), list[dict[str, int]]()
    files.on_change(seen.append)
    assert files.value == {"a": 1} and not files.refresh()
    write(path, '{"a": 2}', 2)
    assert files.value == {"a": 1}
    assert files.refresh() and files.value == {"a": 2} and seen == [{"a": 2}]
    assert not files.refresh()


def test_a_half_written_or_missing_file_keeps_the_former_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "numbers.json"
    write(path, '{"a": 1}', 1)
    files = watched(path)
    with caplog.at_level(logging.WARNING):
        write(path, '{"a":', 2)
        assert not files.refresh() and not files.refresh()
        assert [record.message.split(" what=")[0] for record in caplog.records] == [
            "file not read again, the former content stays"
        ]
        caplog.clear()
        path.unlink()
        assert not files.refresh() and not files.refresh() and files.value == {"a": 1}
        assert len(caplog.records) == 1 and "No such file" in caplog.text
    write(path, '{"a": 3}', 2)
    assert files.refresh() and files.value == {"a": 3}


def test_a_file_that_could_not_be_opened_is_read_once_it_can_be_although_it_did_not_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process without a free descriptor, for one, does not see that a key was revoked until it has one again."""
    path = tmp_path / "numbers.json"
    write(path, '{"a": 1}', 1)
    files, reasons = watched(path), ["Too many open files", "Too many open files", "Input/output error"]
    write(path, '{"a": 2}', 2)
    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.WARNING):

        def refuse(*_arguments: object) -> int:
            raise OSError(reasons.pop(0))

        patched.setattr(os, "open", refuse)
        assert not any(files.refresh() for _ in range(3)) and not reasons
        assert [record.message.rpartition("error=")[2] for record in caplog.records] == [
            "Too many open files",
            "Input/output error",
        ]
    assert files.refresh() and files.value == {"a": 2}
    assert not files.refresh()


def test_a_mistake_of_ours_in_one_call_keeps_a_change_from_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The audit log learns of a change first, then who ends the calls of denied clients."""
    path = tmp_path / "numbers.json"
    write(path, '{"a": 1}', 1)
    files, noted = watched(path), list[object]()

    def fail(_value: object) -> None:
        raise RuntimeError("no room for the line")

    files.on_change(fail)
    files.on_change(noted.append)
    write(path, '{"a": 2}', 2)
    assert files.refresh() and noted == [{"a": 2}]
    assert "no room for the line" in caplog.text


def test_a_file_that_cannot_be_used_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        watched(tmp_path / "none.json")
    write(tmp_path / "bad.json", "{", 1)
    with pytest.raises(ValueError):
        watched(tmp_path / "bad.json")


@pytest.mark.timeout(60)
def test_a_named_pipe_is_refused_at_once_and_a_file_in_its_place_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "numbers.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"numbers\.json is not a regular file"):
        watched(path)
    path.unlink()
    write(path, '{"a": 1}', 1)
    files = watched(path)
    path.unlink()
    os.mkfifo(path)
    assert not files.refresh() and not files.refresh() and files.value == {"a": 1}
    assert len(caplog.records) == 1 and "is not a regular file" in caplog.text
    path.unlink()
    write(path, '{"a": 2}', 2)
    assert files.refresh() and files.value == {"a": 2}


async def test_a_look_that_hangs_stops_neither_the_other_files_nor_the_end(tmp_path: Path) -> None:
    hung, other = tmp_path / "hung", tmp_path / "numbers.json"
    write(hung, "1", 1)
    write(other, "1", 1)
    begun, release, seen = threading.Event(), threading.Event(), asyncio.Queue[int]()

    def parse(content: bytes) -> bytes:
        if content != b"1":
            begun.set()
            assert release.wait(60)
        return content

    async def sleep(_seconds: float) -> None:
        await asyncio.sleep(0)

    watcher = FileWatcher(sleep=sleep)
    watcher.add(WatchedFiles([hung], parse, what="hung"))
    files = watcher.add(WatchedFiles([other], json.loads, what="numbers"))
    files.on_change(into(seen))
    write(hung, "2", 2)
    watcher.start()
    assert await asyncio.to_thread(begun.wait, 60)
    for number in (2, 3, 4):
        write(other, str(number), number)
        assert await asyncio.wait_for(seen.get(), 60) == number
    await asyncio.wait_for(watcher.close(), 60)
    release.set()


async def test_a_look_that_takes_long_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "hung"
    write(path, "1", 1)
    begun, release, pauses = threading.Event(), threading.Event(), asyncio.Queue[None]()

    def parse(content: bytes) -> bytes:
        if content != b"1":
            begun.set()
            assert release.wait(60)
        return content

    async def sleep(_seconds: float) -> None:
        await pauses.get()

    watcher = FileWatcher(sleep=sleep, slow_after_s=0.0)
    watcher.add(WatchedFiles([path], parse, what="hung"))
    write(path, "2", 2)
    watcher.start()
    for _ in range(3):  # more looks are due, and none begins before the first one has ended
        pauses.put_nowait(None)
    assert await asyncio.to_thread(begun.wait, 60)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"look at files has not ended, the former content stays what=hung files={path} after_s=0"]
    await watcher.close()
    release.set()


async def test_a_mistake_of_ours_in_one_look_does_not_end_the_looks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "numbers.json"
    write(path, "1", 1)
    seen, pauses = asyncio.Queue[int](), asyncio.Queue[None]()

    def parse(content: bytes) -> int:
        return 6 // (int(content) - 2)

    watcher = FileWatcher(sleep=lambda _seconds: pauses.get())
    watcher.add(WatchedFiles([path], parse, what="numbers")).on_change(into(seen))
    watcher.start()
    write(path, "2", 2)
    pauses.put_nowait(None)
    while "look at files failed" not in caplog.text:
        await asyncio.sleep(0)
    write(path, "3", 3)
    pauses.put_nowait(None)
    assert await asyncio.wait_for(seen.get(), 60) == 6
    await watcher.close()


def test_a_look_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    program = """
import asyncio, sys, threading
from pathlib import Path
from control_plane.access.watched_files import FileWatcher, WatchedFiles
path, begun = Path(sys.argv[1]), threading.Event()
def parse(content):
    if content != b"1":
        begun.set()
        threading.Event().wait()
async def main():
    path.write_bytes(b"1")
    watcher = FileWatcher(interval_s=0.0)
    watcher.add(WatchedFiles([path], parse, what="hung"))
    path.write_bytes(b"22")
    watcher.start()
    while not begun.is_set():
        await asyncio.sleep(0)
    await watcher.close()
    print("leaving", flush=True)
asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "file")], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, b"leaving", b"")


async def test_the_watcher_looks_after_every_pause_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write(path, '{"a": 1}', 1)
    pauses: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def sleep(_seconds: float) -> None:
        event = asyncio.Event()
        await pauses.put(event)
        await event.wait()

    watcher = FileWatcher(sleep=sleep)
    files = watcher.add(watched(path))
    watcher.start()
    first = await pauses.get()
    write(path, '{"a": 2}', 2)
    first.set()
    await pauses.get()  # the look is over, the next pause has begun
    assert files.value == {"a": 2}
    await watcher.close()

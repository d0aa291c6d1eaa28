"""Files of the operator take effect when they change, and never when they are half-written."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

import pytest

from control_plane.access.watched_files import FileWatcher, WatchedFiles


def write(path: Path, text: str, time_s: int) -> None:
    path.write_text(text, "utf-8")
    os.utime(path, (time_s, time_s))


def watched(path: Path) -> WatchedFiles[dict[str, int]]:
    return WatchedFiles([path], json.loads, what="numbers")


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
        path.unlink()
        assert not files.refresh() and not files.refresh() and files.value == {"a": 1}
    write(path, '{"a": 3}', 2)
    assert files.refresh() and files.value == {"a": 3}


def test_a_file_that_cannot_be_used_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        watched(tmp_path / "none.json")
    write(tmp_path / "bad.json", "{", 1)
    with pytest.raises(ValueError):
        watched(tmp_path / "bad.json")


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

"""Threads for calls that may hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from control_plane.daemon_threads import DaemonThreads

ROOT = Path(__file__).resolve().parents[2]


async def test_calls_run_side_by_side_and_give_what_they_return_or_raise() -> None:
    threads = DaemonThreads(3, name="t")
    together = threading.Barrier(3)  # passed only by three calls at once

    def meet(number: int) -> int:
        together.wait(30)
        return number

    assert await asyncio.gather(*(threads.run(meet, number) for number in range(3))) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()


async def test_no_more_threads_than_allowed_and_no_more_than_needed() -> None:
    threads = DaemonThreads(2, name="bounded")
    for _ in range(5):
        await threads.run(lambda: None)
    names = {await threads.run(lambda: threading.current_thread().name) for _ in range(5)}
    assert names <= {"bounded-1", "bounded-2"}
    release, begun = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        assert release.wait(30)

    hung = [asyncio.ensure_future(threads.run(hang)) for _ in range(2)]
    assert await asyncio.to_thread(begun.acquire, timeout=30) and await asyncio.to_thread(begun.acquire, timeout=30)
    waiting = asyncio.ensure_future(threads.run(lambda: "late"))
    cancelled = asyncio.ensure_future(threads.run(begun.release))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    release.set()
    assert await waiting == "late"
    await asyncio.gather(*hung)
    assert not begun.acquire(blocking=False)  # the call that was cancelled before it began never ran
    threads.close()


def test_a_hung_call_does_not_keep_the_process_from_ending() -> None:
    program = """
import asyncio, threading
from control_plane.daemon_threads import DaemonThreads
async def main():
    threads = DaemonThreads(1, name="t")
    call = asyncio.ensure_future(threads.run(threading.Event().wait))
    await asyncio.sleep(0)
    print("leaving", flush=True)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, b"leaving", b"")

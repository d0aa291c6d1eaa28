"""Children of the control plane start without a fork and are waited for on its event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import uvloop

from control_plane.child_process import ChildProcess, module_command
from control_plane.framed_child.child import SocketChild
from control_plane.host_cache.embedded import EmbeddedRedis


def test_embedded_redis_starts_without_a_fork(tmp_path: Path) -> None:
    """gRPC's fork handlers would run in the child and kill it before it is redis-server."""
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(1))

    async def start_twice() -> None:
        async with EmbeddedRedis(tmp_path) as server:
            first = server.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(30):
                while server.pid in (None, first):
                    await asyncio.sleep(0.01)

    uvloop.run(start_twice())
    assert forks == []


async def test_a_child_gets_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template runs in one, which a mistake in its sandbox would show the whole environment."""
    for name in ("MOTET_REDIS_URL", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.setenv(name, "planted")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    for environment in (None, module_command("json.tool")[1]):
        reading, writing = os.pipe()
        with open(reading, encoding="utf-8") as from_child, open(writing, "wb") as to_us:  # noqa: PTH123  # descriptors
            program = "import os; print(dict(os.environ))"
            child = ChildProcess([sys.executable, "-c", program], stdout=to_us, environment=environment)
            to_us.close()
            seen = from_child.read()
        assert await child.wait() == 0
        assert "planted" not in seen and "TOKENIZERS_PARALLELISM" in seen


async def test_exit_status_is_reported_once_the_child_ended() -> None:
    stdin, to_child = os.pipe()
    child = ChildProcess([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=stdin)
    os.close(stdin)
    assert child.returncode is None
    os.close(to_child)
    assert await asyncio.wait_for(child.wait(), 30) == 3 == child.returncode


async def test_killed_child_is_reported_by_its_signal() -> None:
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    child.kill()
    assert await asyncio.wait_for(child.wait(), 30) == -signal.SIGKILL
    child.kill()  # gone already


async def test_program_that_cannot_be_run_is_an_error() -> None:
    with pytest.raises(OSError):
        ChildProcess(["/no/such/program"])


async def test_a_child_whose_start_is_cancelled_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """It would read the end of its input in place of what to do, and write a traceback to the server's log."""
    before = set(psutil.Process().children())
    start = asyncio.create_task(SocketChild.start("control_plane.constraints.compile_process"))
    await asyncio.sleep(0)
    (child,) = set(psutil.Process().children()) - before
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    async with asyncio.timeout(30):
        while child.is_running():
            await asyncio.sleep(0.01)
    assert capfd.readouterr().err == ""

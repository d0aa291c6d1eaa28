"""A control plane that is started with the command of a document, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from tests.control_plane.server_processes import STEP_S, checkpoint, ready_line, start
from tests.docs_commands import block, commands

Motet = Callable[..., Awaitable[tuple[int, str]]]


@contextlib.asynccontextmanager
async def started(
    document: str, name: str, directory: Path, words: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[list[str], Motet]]:
    """Runs the control plane of a block's first command. Gives the second one, and a way to run it.

    `words` replaces words of the block that stand for something of the reader's.
    """
    text = block(document, name).replace("DIR", str(checkpoint(directory / "model")))
    for word, value in (words or {}).items():
        assert word in text
        text = text.replace(word, value)
    control_plane, client = commands(text)
    assert control_plane[:2] == ["motet", "control-plane"] and client[0] == "motet"
    ports = ("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--host-cache", "memory")
    plane = await start("control_plane", *control_plane[2:], *ports, "--data-dir", "data", cwd=directory)
    try:
        match = await ready_line(plane, r" ready clients=127\.0\.0\.1:(\d+) ")

        async def motet(*arguments: str) -> tuple[int, str]:
            """The exit code of a command, and what it printed."""
            shown = [word.replace("HOST:50051", f"localhost:{match[1]}") for word in arguments]
            process = await start("motet", *shown, cwd=directory)
            out, err = await asyncio.wait_for(process.communicate(), STEP_S)
            assert process.returncode is not None
            return process.returncode, out.decode() + err.decode()

        yield client[1:], motet
    finally:
        if plane.returncode is None:
            plane.kill()
        await plane.communicate()

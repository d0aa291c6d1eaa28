"""The commands of docs/security.md set up what they say, as they are printed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.control_plane.server_processes import STEP_S, checkpoint, ready_line, start
from tests.docs_commands import block, commands, run

DOCUMENT = "docs/security.md"


async def test_tls_is_set_up_and_rotated_with_the_commands_of_the_document(tmp_path: Path) -> None:
    """Five commands make the files, three start the parts, and two replace the server's certificate."""
    run(block(DOCUMENT, "setup-tls"), tmp_path)
    assert len(commands(block(DOCUMENT, "setup-tls"))) == 5
    model = str(checkpoint(tmp_path / "model"))
    control_plane, worker, status = commands(block(DOCUMENT, "start-tls").replace("DIR", model))
    assert control_plane[:2] == ["motet", "control-plane"] and worker[:2] == ["motet", "worker"]
    flags = [re.sub(r"^0\.0\.0\.0:\d+$", "0.0.0.0:0", word) for word in control_plane[2:]]
    plane = await start("control_plane", *flags, "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    processes = [plane]
    try:
        match = await ready_line(plane, r" ready clients=0\.0\.0\.0:(\d+) workers=0\.0\.0\.0:(\d+)$")
        ports = {"HOST:50051": f"localhost:{match[1]}", "HOST:50052": f"127.0.0.1:{match[2]}"}
        attached = await start("tests.fakes.hash_worker", *(ports.get(word, word) for word in worker[2:]), cwd=tmp_path)
        processes.append(attached)
        await ready_line(attached, r"^motet worker ready worker_id=gpu-1 epoch=\d+$")
        shown = await start("motet", *(ports.get(word, word) for word in status[1:]), cwd=tmp_path)
        processes.append(shown)
        out, err = await asyncio.wait_for(shown.communicate(), STEP_S)
        assert shown.returncode == 0 and "gpu-1" in out.decode(), err.decode()

        run(block(DOCUMENT, "rotate-tls"), tmp_path)
        assert plane.stderr is not None
        async with asyncio.timeout(STEP_S):
            while b"certificate of the clients' port valid until" not in await plane.stderr.readline():
                pass
        again = await start("motet", *(ports.get(word, word) for word in status[1:]), cwd=tmp_path)
        processes.append(again)
        out, err = await asyncio.wait_for(again.communicate(), STEP_S)
        assert again.returncode == 0, err.decode()
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()

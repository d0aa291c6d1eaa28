"""A server process that can be killed: serves Generate by one of a few behaviours, on a port that it keeps.

`python -m tests.client.lost_server ADDRESS BEHAVIOUR` prints "ready ADDRESS" and a line for every call that arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from motet.v1 import generation_pb2, generation_pb2_grpc

from tests.client.scripted_server import Response, delta, finished, started, text_of

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [5, 6, 7, 8]
TEXT = "".join(text_of(token) for token in TOKENS)
CLOSE_GRACE_S = 0.2  # how the control plane closes its port


class LostServer:
    """One address and the process that listens there, if one does."""

    def __init__(self) -> None:
        self.target = "127.0.0.1:0"
        self._process: subprocess.Popen[str] | None = None

    def start(self, behaviour: str) -> None:
        """Respond there with `behaviour`: "serve", "silent", "half" or "whole", the last three without an end."""
        command = [sys.executable, "-m", "tests.client.lost_server", self.target, behaviour]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.target = self._line().split()[1]

    def wait_for_calls(self, number: int) -> None:
        """Return when so many calls more have arrived."""
        for _ in range(number):
            assert self._line() == "call\n"

    def kill(self) -> None:
        """SIGKILL; nothing responds then."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: it cancels its calls and closes its port, as the control plane does at the end of a shutdown."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.communicate(timeout=60)

    def _line(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.readline()


class _Servicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, behaviour: str) -> None:
        self._behaviour = behaviour

    async def Generate(  # noqa: N802 - the stub's name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[Response]:
        print("call", flush=True)
        position = len(request.resume_from.ids)
        assert list(request.resume_from.ids) == TOKENS[:position]
        end = {"serve": len(TOKENS), "silent": 0, "half": 2, "whole": len(TOKENS)}[self._behaviour]
        n = request.decoding.n or 1
        if end:
            yield started(n=n)
            for index in range(n):
                for token in TOKENS[position:end]:
                    yield delta(position, [token], text_of(token), index=index)
                    position += 1
                if end == len(TOKENS):
                    yield finished(len(TOKENS), index=index)
                position = len(request.resume_from.ids)
        if self._behaviour != "serve":
            await asyncio.Event().wait()


async def _serve(address: str, behaviour: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(_Servicer(behaviour), server)
    port = server.add_insecure_port(address)
    await server.start()
    print(f"ready 127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(CLOSE_GRACE_S)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(*sys.argv[1:]))

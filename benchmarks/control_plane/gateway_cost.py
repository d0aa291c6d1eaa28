"""What the HTTP gateway costs: time to first token beside plain gRPC in turn, and tokens per second of its core.

`python -m benchmarks.control_plane.gateway_cost` prints one JSON object. The worker only hashes. The time to
first token is of one request at a time, the two ways alternate, and the clients stand in this process. Tokens per
second are of concurrent streams, divided by the CPU time of the gateway's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop
from motet import AsyncClient

from benchmarks.serving.checkpoints import make_base
from benchmarks.system import ROOT, Child, System
from contract.ready_lines import GATEWAY_READY

PROMPT = list(range(1, 33))


class Connection:
    """A kept HTTP connection. It reads no more of a response than it must: its own time counts as the gateway's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 20))

    async def first_token_s(self, num_tokens: int) -> tuple[float, int]:
        """Seconds to the first token of a streamed completion, and how many of its events came."""
        content = {"model": "tiny", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps({**content, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        began_s = time.perf_counter()
        self._writer.write(head + body)
        await self._reader.readuntil(b"data: ")
        first_s = time.perf_counter() - began_s
        rest = await self._reader.readuntil(b"data: [DONE]")
        await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return first_s, rest.count(b"data: ")

    def close(self) -> None:
        self._writer.close()


async def grpc_first_token_s(client: AsyncClient, num_tokens: int) -> float:
    """Seconds to the first token of a generation."""
    began_s = time.perf_counter()
    first_s = 0.0
    async with client.generate(PROMPT, max_tokens=num_tokens, ignore_eos=True) as stream:
        async for _chunk in stream:
            first_s = first_s or time.perf_counter() - began_s
    return first_s


async def measure(server: str, gateway: str, process: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turn, then concurrent streams."""
    over_http, over_grpc = [], []
    connection = await Connection.open(gateway)
    async with AsyncClient(server) as client:
        for turn in range(args.requests + 10):
            http_s, grpc_s = (await connection.first_token_s(2))[0], await grpc_first_token_s(client, 2)
            if turn >= 10:  # the first ones warm up
                over_http.append(http_s)
                over_grpc.append(grpc_s)
    connection.close()
    connections = [await Connection.open(gateway) for _ in range(args.streams)]
    rounds = []
    for turn in range(args.rounds + 1):
        cpu, began_s = process.cpu_times(), time.perf_counter()
        events = await asyncio.gather(*(one.first_token_s(args.tokens) for one in connections))
        wall_s, after = time.perf_counter() - began_s, process.cpu_times()
        cpu_s = after.user + after.system - cpu.user - cpu.system
        num_tokens = args.tokens * args.streams
        if turn > 0:
            rounds.append(
                {
                    "tokens_per_s": round(num_tokens / wall_s),
                    "tokens_per_cpu_s": round(num_tokens / cpu_s),
                    "tokens_per_event": round(num_tokens / sum(count for _, count in events), 2),
                }
            )
    for one in connections:
        one.close()
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    http_ms, grpc_ms = (statistics.median(values) * 1e3 for values in (over_http, over_grpc))
    first = {"http_ms": round(http_ms, 2), "grpc_ms": round(grpc_ms, 2), "ratio": round(http_ms / grpc_ms, 3)}
    return {"time_to_first_token": first, "medians": medians, "rounds": rounds}


def main() -> None:
    """Measure as the flags say and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="requests of each way, one at a time (default 200)")
    parser.add_argument("--step-time-ms", type=float, default=20.0, help="least time of a worker's step (default 20)")
    parser.add_argument("--streams", type=int, default=128, help="concurrent streams, a count (default 128)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each stream (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of the streams (default 3)")
    args = parser.parse_args()
    cache = ROOT / ".motet" / "bench"
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as data_dir:
        control_flags = ["--max-streams-per-connection", "4096", "--log-level", "warning"]
        with System(make_base("tiny", cache), Path(data_dir), control_flags=control_flags) as system:
            worker_flags = ["--max-rows", str(args.streams), "--num-blocks", str(args.streams * 16)]
            worker_flags += ["--step-time-ms", str(args.step_time_ms)]
            system.start_worker(flags=worker_flags, command=("-m", "tests.fakes.hash_worker"))
            flags = ["--listen", "127.0.0.1:0", "--server", system.address, "--base-model-name", "tiny"]
            gateway = Child("gateway", ["-m", "gateway", *flags], Path(data_dir) / "gateway.log")
            try:
                address = gateway.wait_ready(GATEWAY_READY, 60.0)["listen"]
                found = uvloop.run(measure(system.address, address, psutil.Process(gateway.pid), args))
            finally:
                gateway.stop()
    settings = {name: getattr(args, name) for name in ("requests", "step_time_ms", "streams", "tokens")}
    print(json.dumps({**settings, **found}, indent=1))


if __name__ == "__main__":
    main()

"""The latency of one tenant while others hold all that they can get, and do nothing with it.

`python -m benchmarks.control_plane.idle_clients` prints one JSON object: percentiles of a quiet tenant's calls, alone
and beside idle RPCs, watches of health, silent connections and uploads of one byte at a time. A process of their own
holds those, so that a call of the quiet tenant never waits for its own process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from motet.errors import error_from_rpc
from motet.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc, status_pb2, status_pb2_grpc

from benchmarks.serving.checkpoints import make_base
from benchmarks.system import ROOT, System

NUM_CONNECTIONS, STREAMS_PER_CONNECTION = 41, 100
NUM_SILENT, NUM_UPLOADS, NUM_WATCHES = 41, 4, 1500
PAUSE_S = 10.0  # where the server names none
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
HOG_VARIABLE = "MOTET_BENCH_HOG"  # its metadata, JSON
Metadata = tuple[tuple[str, str], ...]


def make_keys(path: Path, *tenants: str) -> list[Metadata]:
    """A file with a key for each tenant, and the metadata of each key."""
    keys = [f"motet_{tenant}_{secrets.token_hex(32)[:43]}" for tenant in tenants]
    entries = [
        {"id": tenant, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenants": [tenant], "roles": roles}
        for tenant, key in zip(tenants, keys, strict=True)
        for roles in [["infer", "adapters.write"]]
    ]
    path.write_text(json.dumps({"keys": entries}), encoding="utf-8")
    return [(("authorization", f"Bearer {key}"),) for key in keys]


class Hostile:
    """Holds what it can. What the server ends is begun again after the time that the server names, or PAUSE_S."""

    def __init__(self, address: str, metadata: Metadata) -> None:
        self._address = address
        self._metadata = metadata
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[socket.socket] = []
        self._never = asyncio.Event()  # kept: a task that waits for what nobody else knows is garbage
        self.ended: Counter[str] = Counter()  # calls that the server ended, by what they were and their status

    async def begin(self, stack: contextlib.AsyncExitStack) -> None:
        """Take everything. `stack` owns the channels."""
        channels = [await self._connect(stack) for _ in range(NUM_CONNECTIONS)]
        for channel in channels:
            for _ in range(STREAMS_PER_CONNECTION):
                self._again("idle", lambda channel=channel: self._idle(channel))  # type: ignore[misc]
        watching = [await self._connect(stack) for _ in range(NUM_WATCHES // STREAMS_PER_CONNECTION)]
        for number in range(NUM_WATCHES):
            channel = watching[number % len(watching)]
            self._again("watch", lambda channel=channel: self._watch(channel))  # type: ignore[misc]
        extra = await self._connect(stack)
        for _ in range(NUM_UPLOADS):
            self._again("upload", lambda: self._trickle(extra))
        loop = asyncio.get_running_loop()
        for number in range(NUM_SILENT):
            connection = socket.socket()
            connection.setblocking(False)
            self._sockets.append(connection)
            host, _, port = self._address.rpartition(":")
            await loop.sock_connect(connection, (host, int(port)))
            if number % 2:
                await loop.sock_sendall(connection, HTTP2_PREFACE)

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return await stack.enter_async_context(grpc.aio.insecure_channel(self._address, options=options))

    def _again(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        async def repeat() -> None:
            while True:
                pause_s = PAUSE_S
                try:
                    await call()
                except grpc.aio.AioRpcError as error:
                    self.ended[f"{what} {error.code().name}"] += 1
                    pause_s = error_from_rpc(error).retry_after_s or PAUSE_S
                await asyncio.sleep(pause_s)

        self._tasks.append(asyncio.create_task(repeat()))

    async def _idle(self, channel: Any) -> None:
        async def silence() -> AsyncIterator[bytes]:
            await self._never.wait()
            yield b""

        await channel.stream_unary("/motet.v1.GenerationService/Generate")(silence(), metadata=self._metadata)

    async def _watch(self, channel: Any) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
            pass

    async def _trickle(self, channel: Any) -> None:
        async def messages() -> AsyncIterator[adapters_pb2.UploadAdapterRequest]:
            digest = hashlib.sha256(b"").hexdigest()
            files = [
                {"name": "adapter_config.json", "size_bytes": 1000, "sha256": digest},
                {"name": "adapter_model.safetensors", "size_bytes": 1 << 20, "sha256": digest},
            ]
            header = {"adapter_id": "slow", "files": files}
            yield adapters_pb2.UploadAdapterRequest(header=header)
            for offset in range(1000):
                yield adapters_pb2.UploadAdapterRequest(chunk={"file_index": 0, "offset": offset, "data": b"x"})
                await asyncio.sleep(5.0)

        stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)  # type: ignore[no-untyped-call]
        await stub.UploadAdapter(messages(), metadata=self._metadata)


async def latencies_ms(address: str, metadata: Metadata, count: int) -> dict[str, list[float]]:
    """Of the quiet tenant's calls, one after the other over one connection."""
    found: dict[str, list[float]] = {"status": [], "generate": [], "connect": []}
    request = generation_pb2.GenerateRequest(
        token_ids={"ids": [3, 4, 5, 6]}, stopping={"max_tokens": 8, "ignore_eos": True}
    )
    options = [("grpc.use_local_subchannel_pool", 1)]

    async def timed(kind: str, call: Callable[[], Awaitable[object]]) -> None:
        began_s = time.perf_counter()
        await call()
        found[kind].append((time.perf_counter() - began_s) * 1e3)

    async def connect() -> None:
        async with grpc.aio.insecure_channel(address, options=options) as fresh:
            stub: Any = status_pb2_grpc.StatusServiceStub(fresh)  # type: ignore[no-untyped-call]
            await stub.GetStatus(status_pb2.GetStatusRequest(), metadata=metadata, timeout=60)

    async with grpc.aio.insecure_channel(address, options=options) as channel:
        status: Any = status_pb2_grpc.StatusServiceStub(channel)  # type: ignore[no-untyped-call]
        generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

        async def generate() -> None:
            async for _ in generation.Generate(request, metadata=metadata, timeout=60):
                pass

        for number in range(count):
            await timed(
                "status", lambda: status.GetStatus(status_pb2.GetStatusRequest(), metadata=metadata, timeout=60)
            )
            await timed("generate", generate)
            if number % 10 == 0:
                await timed("connect", connect)
    return found


def percentiles(numbers: list[float]) -> dict[str, float]:
    """The median and the 99th percentile."""
    ranked = sorted(numbers)
    return {"p50_ms": round(statistics.median(ranked), 2), "p99_ms": round(ranked[int(len(ranked) * 0.99)], 2)}


@contextlib.asynccontextmanager
async def hostile_process(address: str, hog: Metadata) -> AsyncIterator[dict[str, int]]:
    """A process that holds what it can; what the server ended of it is entered at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.control_plane.idle_clients", "--hold", address),
        env={**os.environ, HOG_VARIABLE: json.dumps(hog)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    ended: dict[str, int] = {}
    try:
        await process.stdout.readline()
        yield ended
    finally:
        process.stdin.close()
        ended.update(json.loads(await process.stdout.readline() or b"{}"))
        await process.wait()


async def hold(address: str) -> None:
    """Hold what a client can until the standard input ends."""
    hostile = Hostile(address, tuple(tuple(pair) for pair in json.loads(os.environ[HOG_VARIABLE])))
    await hostile.begin(contextlib.AsyncExitStack())
    print("begun", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(hostile.ended), flush=True)
    os._exit(0)  # everything is given back at once, as by a client that dies


async def measure(address: str, hog: Metadata, quiet: Metadata, args: argparse.Namespace) -> dict[str, Any]:
    """Alone, beside the idle clients, and alone again."""
    report: dict[str, Any] = {}
    await latencies_ms(address, quiet, 50)
    report["alone"] = await latencies_ms(address, quiet, args.calls)
    async with hostile_process(address, hog) as ended:
        await asyncio.sleep(args.settle_s)
        report["beside"] = await latencies_ms(address, quiet, args.calls)
    report["ended"] = ended
    await asyncio.sleep(args.settle_s)
    report["after"] = await latencies_ms(address, quiet, args.calls)
    for when in ("alone", "beside", "after"):
        report[when] = {kind: percentiles(numbers) for kind, numbers in report[when].items()}
    return report


def main() -> int:
    """Measure as the flags say and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300, help="calls of each kind in each phase (default 300)")
    parser.add_argument("--settle-s", type=float, default=10.0, help="seconds between two phases (default 10)")
    parser.add_argument("--hold", metavar="ADDRESS", help="be the process with the idle clients of this server")
    args = parser.parse_args()
    if args.hold:
        uvloop.run(hold(args.hold))
        return 0
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        hog, quiet = make_keys(Path(name) / "keys.json", "hog", "quiet")
        flags = ["--api-keys", f"{name}/keys.json", "--log-level", "error", "--host-cache", "memory"]
        base = make_base("tiny", ROOT / ".motet" / "bench")
        with System(base, Path(name) / "system", control_flags=flags) as system:
            system.start_worker(command=("-m", "tests.fakes.hash_worker"))
            print(json.dumps(uvloop.run(measure(system.address, hog, quiet, args)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the HTTP gateway costs: time to first token beside plain gRPC in turn, and tokens per second of its cores.

`python -m benchmarks.control_plane.gateway_cost` prints one JSON object. The worker only hashes and takes
`--step-time-ms` for a step, 0 for what the ways cost by themselves; with `--model 205m` it computes prompts of
`--prompt-tokens`. The time to first token is of one request at a time; the ways alternate, and the clients stand in
this process. A prompt is used whose first token is text by itself: a token that is not has no event over HTTP.
Tokens per second are of concurrent streams, also divided by the CPU time of all processes of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import uvloop
from motet import AsyncClient
from motet.requests import Prompt

from benchmarks.serving.checkpoints import SHAPES, make_base
from benchmarks.system import ROOT, Child, System
from contract.ready_lines import GATEWAY_READY

NAME = "bench"  # of the base model over HTTP
WARM_UP = 10  # requests of each way that are not counted
MAX_PROMPTS = 200  # that are tried for one whose first token is text
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Connection:
    """A kept HTTP connection. It reads no more of a response than it must: its own time counts as the gateway's."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address  # a gateway on loopback refuses names of other hosts
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        return cls(address, *await asyncio.open_connection(host, int(port), limit=1 << 20))

    async def first_token_s(self, prompt: Prompt, num_tokens: int, salt: str = "") -> tuple[float, int]:
        """Seconds to the first token of a streamed completion, and how many of its events came."""
        is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        path, field = ("/v1/chat/completions", "messages") if is_chat else ("/v1/completions", "prompt")
        content = {"model": NAME, field: prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps({**content, "temperature": 0, "cache_salt": salt or None}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        began_s = time.perf_counter()
        self._writer.write(head + body)
        for _ in range(2 if is_chat else 1):  # of a chat, the first event has the role
            await self._reader.readuntil(b"data: ")
        first_s = time.perf_counter() - began_s
        rest = await self._reader.readuntil(b"data: [DONE]")
        await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return first_s, rest.count(b"data: ")

    def close(self) -> None:
        self._writer.close()


async def grpc_first_token_s(client: AsyncClient, prompt: Prompt, num_tokens: int, salt: str = "") -> float:
    """Seconds to the first token of a generation."""
    began_s = time.perf_counter()
    first_s = 0.0
    async with client.generate(prompt, max_tokens=num_tokens, ignore_eos=True, cache_salt=salt) as stream:
        async for _chunk in stream:
            first_s = first_s or time.perf_counter() - began_s
    return first_s


async def find_prompt(client: AsyncClient, prompts: Iterator[Prompt]) -> Prompt:
    """The first of them whose first token is text."""
    for prompt in itertools.islice(prompts, MAX_PROMPTS):
        # Two tokens: after the last one, what is not text by itself is text all the same.
        async with client.generate(prompt, max_tokens=2, ignore_eos=True) as stream:
            if (await anext(stream)).text:
                return prompt
    raise SystemExit(f"{MAX_PROMPTS} prompts were tried, and the first token of none is text")


async def first_tokens(client: AsyncClient, gateway: str, args: argparse.Namespace) -> dict[str, Any]:
    """Completions and chat completions, each over HTTP and over gRPC in turn."""
    length = args.prompt_tokens
    kinds: dict[str, Iterator[Prompt]] = {
        "completions": ([(first + at) % 200 + 1 for at in range(length)] for first in itertools.count()),
        "chat": ([{"role": "user", "content": f"{number:0{length}}"}] for number in itertools.count()),
    }
    connection = await Connection.open(gateway)
    found = {}
    for kind, prompts in kinds.items():
        prompt = await find_prompt(client, prompts)
        salts = (f"{kind}{number}" for number in itertools.count())  # nothing is found in the prefix cache

        async def http(prompt: Prompt = prompt, salts: Iterator[str] = salts) -> float:
            return (await connection.first_token_s(prompt, 2, next(salts)))[0]

        async def grpc(prompt: Prompt = prompt, salts: Iterator[str] = salts) -> float:
            return await grpc_first_token_s(client, prompt, 2, next(salts))

        found[kind] = compared(await in_turn([http, grpc], args.requests))
    connection.close()
    return found


async def in_turn(ways: list[Callable[[], Awaitable[float]]], num_requests: int) -> list[list[float]]:
    """Times of each way. The first ones warm up."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(num_requests + WARM_UP):
        for way, taken in zip(ways, times, strict=True):
            seconds = await way()
            if turn >= WARM_UP:
                taken.append(seconds)
    return times


def compared(times: list[list[float]]) -> dict[str, float]:
    """Medians in milliseconds, what HTTP adds, and the ratio; the added time of the tenth percentiles, too."""
    http_ms, grpc_ms = (statistics.median(taken) * 1e3 for taken in times)
    low_http_ms, low_grpc_ms = (statistics.quantiles(taken, n=10)[0] * 1e3 for taken in times)
    return {
        "http_ms": round(http_ms, 2),
        "grpc_ms": round(grpc_ms, 2),
        "added_ms": round(http_ms - grpc_ms, 2),
        "ratio": round(http_ms / grpc_ms, 3),
        "added_p10_ms": round(low_http_ms - low_grpc_ms, 2),
    }


def cpu_s(gateway: psutil.Process) -> float:
    """CPU time of all processes of the gateway."""
    times = [process.cpu_times() for process in (gateway, *gateway.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


async def throughput(gateway: str, process: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    """Concurrent streams, of which each has its own connection."""
    connections = [await Connection.open(gateway) for _ in range(args.streams)]
    rounds = []
    for turn in range(args.rounds + 1):
        before_s, began_s = cpu_s(process), time.perf_counter()
        prompt = list(range(1, 33))
        events = await asyncio.gather(*(one.first_token_s(prompt, args.tokens) for one in connections))
        wall_s, used_s = time.perf_counter() - began_s, cpu_s(process) - before_s
        num_tokens = args.tokens * args.streams
        if turn > 0:
            rounds.append(
                {
                    "tokens_per_s": round(num_tokens / wall_s),
                    "tokens_per_cpu_s": round(num_tokens / used_s),
                    "tokens_per_event": round(num_tokens / sum(count for _, count in events), 2),
                }
            )
    for one in connections:
        one.close()
    return {"medians": {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}, "rounds": rounds}


async def measure(server: str, gateway: str, process: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, one after the other."""
    found: dict[str, Any] = {}
    async with AsyncClient(server) as client:
        if args.requests:
            found["time_to_first_token"] = await first_tokens(client, gateway, args)
        if args.rounds:
            found["throughput"] = await throughput(gateway, process, args)
    return found


def with_chat_template(checkpoint: Path, directory: Path) -> Path:
    """A copy that renders conversations."""
    shutil.copytree(checkpoint, directory, copy_function=lambda source, to: Path(to).symlink_to(source))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return directory


def start_worker(system: System, args: argparse.Namespace) -> None:
    """One that computes, or one that hashes."""
    blocks = ["--num-blocks", str(max(1024, args.streams * 16))]
    if args.model:
        system.start_worker(flags=blocks)
        return
    flags = [*blocks, "--max-rows", str(args.streams), "--step-time-ms", str(args.step_time_ms)]
    system.start_worker(flags=flags, command=("-m", "tests.fakes.hash_worker"))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=200, help="requests of each way, one at a time; 0: none (default 200)"
    )
    parser.add_argument("--step-time-ms", type=float, default=20.0, help="least time of a worker's step (default 20)")
    parser.add_argument("--model", choices=sorted(SHAPES), help="computed by the worker; --step-time-ms is unused")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="length of a prompt, 8 to 1024 (default 32)")
    parser.add_argument("--processes", type=int, default=1, help="of the gateway (default 1)")
    parser.add_argument("--streams", type=int, default=128, help="concurrent streams, a count (default 128)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each stream (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of the streams; 0: none (default 3)")
    return parser.parse_args(argv)


def main() -> None:
    """Measure as the flags say and print JSON."""
    args = parse()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as work_dir:
        checkpoint = make_base(args.model or "tiny", ROOT / ".motet" / "bench")
        checkpoint = with_chat_template(checkpoint, Path(work_dir) / "model")
        control_flags = ["--max-streams-per-connection", "4096", "--log-level", "warning"]
        with System(checkpoint, Path(work_dir), control_flags=control_flags) as system:
            start_worker(system, args)
            flags = ["--listen", "127.0.0.1:0", "--server", system.address, "--base-model-name", NAME]
            if args.processes > 1:
                flags += ["--processes", str(args.processes)]
            gateway = Child("gateway", ["-m", "gateway", *flags], Path(work_dir) / "gateway.log")
            try:
                address = gateway.wait_ready(GATEWAY_READY, 60.0)["listen"]
                found = uvloop.run(measure(system.address, address, psutil.Process(gateway.pid), args))
            finally:
                gateway.stop()
    print(json.dumps({**vars(args), **found}, indent=1))


if __name__ == "__main__":
    main()

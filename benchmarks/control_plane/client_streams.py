"""Tokens per second from the control plane to concurrent gRPC streams: real processes, a worker that only hashes.

`python -m benchmarks.control_plane.client_streams` prints one JSON object. The clients share the machine with what is
measured, so CPU time per token is the figure that compares between busy machines: of the control plane's own process,
and of all its processes with `--frontends`. `--forms 0:1 0:8 2:1 2:8` measures several forms by turns in one run, each
FRONTENDS:DELTA_TOKENS; all of them must give every stream the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import uvloop
from motet import Client
from motet.v1 import generation_pb2, generation_pb2_grpc

from benchmarks.serving.checkpoints import make_adapters, make_base
from benchmarks.system import ROOT, System

Metadata = tuple[tuple[str, str], ...]
PROMPT_TOKENS = 32


async def measure(
    target: str, adapters: list[str], args: argparse.Namespace, seed: int, metadata: Metadata = ()
) -> tuple[int, int]:
    """All streams at once over one connection; tokens and messages that arrived. `metadata` goes with every request."""
    async with grpc.aio.insecure_channel(target) as channel:
        found = await run_streams(channel, adapters, range(args.streams), args.tokens, seed, metadata=metadata)
    return found.num_tokens, found.num_messages


@dataclass
class Found:
    """What came out of streams."""

    num_tokens: int
    num_messages: int
    digests: dict[int, str]  # of the tokens, by stream


async def run_streams(
    channel: grpc.aio.Channel,
    adapters: list[str],
    streams: range,
    num_tokens: int,
    seed: int,
    *,
    delta_tokens: int = 1,
    metadata: Metadata = (),
) -> Found:
    """These streams at once. Raises AssertionError where one has not all its tokens, in order."""
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
    found = Found(0, 0, {})

    async def run(idx: int) -> None:
        rng = random.Random(f"{seed} {idx}")
        request = generation_pb2.GenerateRequest(
            adapter=["", *adapters][idx % (len(adapters) + 1)],
            token_ids={"ids": [rng.randrange(1, 500) for _ in range(PROMPT_TOKENS)]},
            sampling={"seed": idx},
            stopping={"max_tokens": num_tokens, "ignore_eos": True},
        )
        if delta_tokens > 1:
            request.output.delta_tokens = delta_tokens
        tokens: list[int] = []
        async for response in stub.Generate(request, metadata=metadata):
            if response.WhichOneof("event") == "delta":
                assert response.delta.token_offset == len(tokens), f"stream {idx} is not contiguous"
                tokens.extend(response.delta.token_ids)
            found.num_messages += 1
        assert len(tokens) == num_tokens, f"{len(tokens)} tokens of stream {idx} arrived"
        found.num_tokens += num_tokens
        found.digests[idx] = hashlib.sha256(str(tokens).encode()).hexdigest()[:16]

    await asyncio.gather(*[run(idx) for idx in streams])
    return found


def client_main(job: dict[str, Any]) -> None:
    """One client process: connects, says so, and runs each line of standard input as a round."""

    async def serve() -> None:
        async with grpc.aio.insecure_channel(job["target"]) as channel:
            await channel.channel_ready()
            print("connected", flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                streams = range(job["first"], job["streams"], job["step"])
                options = {"delta_tokens": job["delta_tokens"]}
                found = await run_streams(channel, job["adapters"], streams, job["tokens"], int(line), **options)
                print(json.dumps([found.num_tokens, found.num_messages, found.digests]), flush=True)

    uvloop.run(serve())


class Form:
    """One form of the server and of the requests: what is compared."""

    def __init__(self, name: str, system: System, adapters: list[str], args: argparse.Namespace) -> None:
        self.name = name
        self._delta_tokens = int(name.partition(":")[2])
        self._system = system
        self._adapters = adapters
        self._args = args
        self.rounds: list[dict[str, float]] = []

    def run_round(self, seed: int) -> dict[int, str]:
        """Measure once; the digests of the streams' tokens."""
        with contextlib.ExitStack() as stack:
            clients = [self._client(index, stack) for index in range(self._args.clients)]
            before, began_s = _cpu_s(self._system.control_plane.pid), time.perf_counter()
            for client in clients:
                _pipe(client.stdin).write(f"{seed}\n")
                _pipe(client.stdin).flush()
            results = [json.loads(_pipe(client.stdout).readline()) for client in clients]
            wall_s, after = time.perf_counter() - began_s, _cpu_s(self._system.control_plane.pid)
        num_tokens, num_messages = (sum(result[part] for result in results) for part in (0, 1))
        own_s, others_s = (now - then for now, then in zip(after, before, strict=True))
        if seed > 0:  # the first one warms up
            self.rounds.append(
                {
                    "tokens_per_s": round(num_tokens / wall_s),
                    "tokens_per_message": round(num_tokens / num_messages, 2),
                    "cpu_us_per_token": round((own_s + others_s) / num_tokens * 1e6, 1),
                    "of_these_in_front_ends": round(others_s / num_tokens * 1e6, 1),
                    "cores_used": round((own_s + others_s) / wall_s, 2),
                }
            )
        return {int(idx): digest for result in results for idx, digest in result[2].items()}

    def _client(self, index: int, stack: contextlib.ExitStack) -> subprocess.Popen[str]:
        job = {
            "target": self._system.address,
            "adapters": self._adapters,
            "delta_tokens": self._delta_tokens,
            "tokens": self._args.tokens,
            "streams": self._args.streams,
            "first": index,
            "step": self._args.clients,
        }
        command = [sys.executable, "-m", "benchmarks.control_plane.client_streams", "--client-job", json.dumps(job)]
        pipe = subprocess.PIPE
        client = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True))
        stack.callback(_pipe(client.stdin).close)  # which ends it
        assert _pipe(client.stdout).readline() == "connected\n", "a client did not connect"
        return client


def _pipe(pipe: Any) -> Any:
    assert pipe is not None, "the process has pipes"
    return pipe


def _cpu_s(pid: int) -> tuple[float, float]:
    """CPU time of the control plane's process, and of its front ends, seconds."""
    process = psutil.Process(pid)
    front_ends = [child for child in process.children() if "control_plane.frontends.process" in child.cmdline()]
    own, *others = (sum(one.cpu_times()[:2]) for one in (process, *front_ends))
    return own, sum(others)


def _started(num_frontends: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[System, list[str]]:
    """A system with its adapters, for all forms with so many front ends."""
    cache = ROOT / ".motet" / "bench"
    data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-bench-"))
    flags = ["--max-streams-per-connection", "4096", "--log-level", "warning", "--frontends", num_frontends]
    system = stack.enter_context(System(make_base("tiny", cache), Path(data_dir), control_flags=flags))
    worker_flags = ["--max-rows", str(args.streams), "--num-blocks", str(args.streams * 16)]
    system.start_worker(flags=worker_flags, command=("-m", "tests.fakes.hash_worker"))
    names = [f"bench-{idx}" for idx in range(args.adapters)]
    with Client(system.address) as client:
        for name, directory in zip(names, make_adapters("tiny", args.adapters, cache), strict=True):
            client.adapters.register(name, directory)
    return system, names


def main() -> None:
    """Measure as the flags say and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams, a count (default 256)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream (default 128)")
    parser.add_argument("--adapters", type=int, default=16, help="adapters beside the base model (default 16)")
    parser.add_argument("--clients", type=int, default=1, help="client processes, a connection each (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each form (default 5)")
    parser.add_argument("--forms", nargs="+", default=["0:1"], help="FRONTENDS:DELTA_TOKENS (default 0:1)")
    parser.add_argument("--client-job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client_job is not None:
        client_main(json.loads(args.client_job))
        return
    with contextlib.ExitStack() as stack:
        systems = {
            num: _started(num, args, stack) for num in dict.fromkeys(form.partition(":")[0] for form in args.forms)
        }
        forms = [Form(name, *systems[name.partition(":")[0]], args) for name in args.forms]
        for seed in range(args.rounds + 1):
            digests = [form.run_round(seed) for form in forms]
            assert all(one == digests[0] and len(one) == args.streams for one in digests), "forms differ in tokens"
    report = {
        "streams": args.streams,
        "tokens": args.tokens,
        "clients": args.clients,
        "cores": os.cpu_count(),
        "forms": {
            form.name: {key: statistics.median(one[key] for one in form.rounds) for key in form.rounds[0]}
            | {"rounds": form.rounds}
            for form in forms
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

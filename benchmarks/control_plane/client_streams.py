"""Tokens per second from the control plane to concurrent gRPC streams: real processes, a worker that only hashes.

`python -m benchmarks.control_plane.client_streams` prints one JSON object. The clients share the machine with what is
measured, so the control plane's CPU time per token is the figure that compares between busy machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
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


async def measure(
    target: str, adapters: list[str], args: argparse.Namespace, seed: int, metadata: Metadata = ()
) -> tuple[int, int]:
    """All streams at once; tokens and messages that arrived. `metadata` goes with every request."""
    rng = random.Random(seed)
    num_tokens = num_messages = 0
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

        async def run(idx: int) -> None:
            nonlocal num_tokens, num_messages
            name = ["", *adapters][idx % (len(adapters) + 1)]
            request = generation_pb2.GenerateRequest(
                adapter=name,
                token_ids={"ids": [rng.randrange(1, 500) for _ in range(32)]},
                stopping={"max_tokens": args.tokens, "ignore_eos": True},
            )
            async for response in stub.Generate(request, metadata=metadata):
                num_tokens += len(response.delta.token_ids)
                num_messages += 1

        await asyncio.gather(*[run(idx) for idx in range(args.streams)])
    assert num_tokens == args.streams * args.tokens, f"{num_tokens} tokens arrived"
    return num_tokens, num_messages


def main() -> None:
    """Measure as the flags say and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams, a count (default 256)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream (default 128)")
    parser.add_argument("--adapters", type=int, default=16, help="adapters beside the base model (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions (default 5)")
    args = parser.parse_args()
    cache = ROOT / ".motet" / "bench"
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as data_dir:
        system = System(
            make_base("tiny", cache),
            Path(data_dir),
            control_flags=["--max-streams-per-connection", "4096", "--log-level", "warning"],
        )
        with system:
            worker_flags = ["--max-rows", str(args.streams), "--num-blocks", str(args.streams * 16)]
            system.start_worker(flags=worker_flags, command=("-m", "tests.fakes.hash_worker"))
            names = [f"bench-{idx}" for idx in range(args.adapters)]
            with Client(system.address) as client:
                for name, directory in zip(names, make_adapters("tiny", args.adapters, cache), strict=True):
                    client.adapters.register(name, directory)
            process = psutil.Process(system.control_plane.pid)
            rounds = []
            for seed in range(args.rounds + 1):
                cpu, began_s = process.cpu_times(), time.perf_counter()
                num_tokens, num_messages = uvloop.run(measure(system.address, names, args, seed))
                wall_s, cpu_after = time.perf_counter() - began_s, process.cpu_times()
                cpu_s = cpu_after.user + cpu_after.system - cpu.user - cpu.system
                if seed > 0:  # the first one warms up
                    rounds.append(
                        {
                            "tokens_per_s": round(num_tokens / wall_s),
                            "tokens_per_message": round(num_tokens / num_messages, 2),
                            "cpu_us_per_token": round(cpu_s / num_tokens * 1e6, 1),
                        }
                    )
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    print(json.dumps({"streams": args.streams, "tokens": args.tokens, "medians": medians, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()

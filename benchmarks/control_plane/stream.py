"""How fast the plan stream and the fleet are: a real worker port, a hash worker in another process, no model.

`python -m benchmarks.control_plane.stream` prints one JSON object: steps (plan round trips) per second, tokens per
second that came out of the job streams, and CPU time of this process per step. `--delay-ms` puts a relay with that
one-way delay between the two ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from tests.fakes.fleet_rig import FINGERPRINT, GrpcRig, expected, make_request, read_all
from tests.fakes.tcp_proxy import TcpProxy

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """Figures of one run."""

    num_requests: int
    num_tokens: int  # in all
    num_adapters: int
    step_time_ms: float  # least time of a step on the worker
    delay_ms: float  # one way
    steps_per_s: float
    tokens_per_s: float
    control_cpu_ms_per_step: float


async def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests once, check every token, and count."""
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(GrpcRig())
        port = rig.port
        if args.delay_ms:
            port = (await stack.enter_async_context(TcpProxy(port, delay_s=args.delay_ms / 1000))).port
        worker = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "tests.fakes.hash_worker", "--control-plane", f"127.0.0.1:{port}"],
            *["--fingerprint", FINGERPRINT, "--max-rows", str(args.requests), "--num-blocks", "16384"],
            *["--token-budget", "8192", "--step-time-ms", str(args.step_time_ms)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": ".:client"},
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            await rig.until(lambda: rig.fleet.num_workers == 1)
            return await _run(rig, args)
        finally:
            worker.terminate()
            await worker.wait()


async def _run(rig: GrpcRig, args: argparse.Namespace) -> Outcome:
    adapters = [None, *(rig.weights.add(f"a{i}") for i in range(args.adapters))]
    requests = [
        make_request(rig.fleet, [i % 256, 3, 5, i // 256], args.tokens, adapters[i % len(adapters)])
        for i in range(args.requests)
    ]
    cpu_s, start_s = time.process_time(), time.perf_counter()
    answers = await asyncio.gather(*[read_all(rig.fleet.submit(request)) for request in requests])
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - start_s
    assert answers == [expected(request) for request in requests], "a token is wrong"
    [snapshot] = rig.fleet.worker_snapshots()
    num_tokens = args.requests * args.tokens
    return Outcome(
        num_requests=args.requests,
        num_tokens=num_tokens,
        num_adapters=args.adapters,
        step_time_ms=args.step_time_ms,
        delay_ms=args.delay_ms,
        steps_per_s=round(snapshot.num_steps / wall_s, 1),
        tokens_per_s=round(num_tokens / wall_s, 1),
        control_cpu_ms_per_step=round(cpu_s / snapshot.num_steps * 1000, 3),
    )


def main() -> None:
    """Measure as the flags say and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256, help="requests at once (default 256)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each request (default 200)")
    parser.add_argument("--adapters", type=int, default=16, help="adapters beside the base model (default 16)")
    parser.add_argument("--step-time-ms", type=float, default=0.0, help="least time of a step (default 0)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one-way delay on the stream (default 0)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (default 3)")
    args = parser.parse_args()
    outcomes = [asdict(uvloop.run(measure(args))) for _ in range(args.rounds)]
    print(json.dumps({"rounds": outcomes}, indent=1))


if __name__ == "__main__":
    main()

"""How fast the plan stream and the fleet are, and what a longer way to the worker costs: a real port, no model.

`python -m benchmarks.control_plane.stream` prints one JSON object. A hash worker in another process waits for its step
time and computes next to nothing; clients in this process each send one request after another, of random lengths, so
rows end and begin all the time. `--added-ms 0 5 10` adds those round trips in turn, round by round: the worker holds
every message for half of it, each way, in threads that sleep. Every token is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from control_plane.scheduler.types import Request
from tests.fakes.fleet_rig import FINGERPRINT, GrpcRig, expected, make_request

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """Figures of one round."""

    added_ms: float  # round trip
    round_trip_ms: float  # as the session measured it
    max_steps: int  # that a plan stood for at the end
    steps_per_s: float
    tokens_per_s: float  # out of the streams
    plans_per_step: float
    control_cpu_ms_per_step: float


@dataclass
class Load:
    """Clients that send one request after another until they are cancelled."""

    rig: GrpcRig
    args: argparse.Namespace
    rng: random.Random
    completions: list[tuple[Request, list[int]]] = field(default_factory=list)
    num_tokens: int = 0

    async def client(self, adapters: list[object]) -> None:
        """One after another, each of a random length."""
        while True:
            prompt = [self.rng.randrange(256) for _ in range(self.rng.randint(1, self.args.prompt))]
            num_tokens = self.rng.randint(1, 2 * self.args.tokens)
            request = make_request(self.rig.fleet, prompt, num_tokens, self.rng.choice(adapters))  # type: ignore[arg-type]  # adapters or None
            tokens: list[int] = []
            async for event in self.rig.fleet.submit(request):
                tokens += event.token_ids
                self.num_tokens += len(event.token_ids)
            self.completions.append((request, tokens))


async def measure(args: argparse.Namespace, added_ms: float, seed: int) -> Outcome:
    """One round: warm up, count for a while, check every completion."""
    async with GrpcRig(plan_depth=args.depth) as rig:
        worker = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "tests.fakes.hash_worker", "--control-plane", f"127.0.0.1:{rig.port}"],
            *["--fingerprint", FINGERPRINT, "--max-rows", str(args.clients), "--num-blocks", "16384"],
            *["--token-budget", "8192", "--step-time-ms", str(args.step_time_ms), "--delay-ms", str(added_ms / 2)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": ".:client"},
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            await rig.until(lambda: rig.fleet.num_workers == 1)
            outcome, completions = await _run(rig, args, added_ms, seed)
        finally:
            worker.terminate()
            await worker.wait()
    assert completions, "no request ended: measure for longer"
    for request, tokens in completions:
        assert tokens == expected(request), "a token is wrong"
    return outcome


async def _run(
    rig: GrpcRig, args: argparse.Namespace, added_ms: float, seed: int
) -> tuple[Outcome, list[tuple[Request, list[int]]]]:
    adapters = [None, *(rig.weights.add(f"a{i}") for i in range(args.adapters))]
    load = Load(rig, args, random.Random(seed))
    clients = [asyncio.create_task(load.client(list(adapters))) for _ in range(args.clients)]
    await asyncio.sleep(args.warm_up_s)
    [before], num_tokens = rig.fleet.worker_snapshots(), load.num_tokens
    cpu_s, start_s = time.process_time(), time.perf_counter()
    await asyncio.sleep(args.measure_s)
    [after], num_tokens = rig.fleet.worker_snapshots(), load.num_tokens - num_tokens
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - start_s
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    num_steps = after.num_steps - before.num_steps
    outcome = Outcome(
        added_ms=added_ms,
        round_trip_ms=round(after.round_trip_ms, 2),
        max_steps=after.max_plan_steps,
        steps_per_s=round(num_steps / wall_s, 1),
        tokens_per_s=round(num_tokens / wall_s, 1),
        plans_per_step=round((after.num_plans - before.num_plans) / num_steps, 2),
        control_cpu_ms_per_step=round(cpu_s / num_steps * 1000, 3),
    )
    return outcome, load.completions


def main() -> None:
    """Measure as the flags say and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64, help="requests at once (default 64)")
    parser.add_argument("--prompt", type=int, default=32, help="longest prompt, tokens (default 32)")
    parser.add_argument("--tokens", type=int, default=128, help="mean tokens of a request (default 128)")
    parser.add_argument("--adapters", type=int, default=16, help="adapters beside the base model (default 16)")
    parser.add_argument("--step-time-ms", type=float, default=5.0, help="time of a step (default 5)")
    parser.add_argument("--depth", type=int, default=2, help="plan depth (default 2)")
    parser.add_argument("--added-ms", type=float, nargs="+", default=[0.0], help="added round trips (default 0)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each (default 3)")
    parser.add_argument("--warm-up-s", type=float, default=2.0)
    parser.add_argument("--measure-s", type=float, default=4.0)
    args = parser.parse_args()
    rounds = [[uvloop.run(measure(args, added_ms, seed)) for added_ms in args.added_ms] for seed in range(args.rounds)]
    medians = [statistics.median(outcome.tokens_per_s for outcome in column) for column in zip(*rounds, strict=True)]
    ratios = [
        statistics.median(row[i].tokens_per_s / row[0].tokens_per_s for row in rounds) for i in range(len(medians))
    ]
    print(
        json.dumps(
            {
                "rounds": [[asdict(outcome) for outcome in row] for row in rounds],
                "median_tokens_per_s": dict(zip(map(str, args.added_ms), medians, strict=True)),
                "median_ratio_to_the_first": dict(
                    zip(map(str, args.added_ms), [round(ratio, 4) for ratio in ratios], strict=True)
                ),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

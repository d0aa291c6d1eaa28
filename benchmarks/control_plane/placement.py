"""What it costs to place one request among many workers: `python -m benchmarks.control_plane.placement`.

Every worker runs some requests, holds a few adapters and caches a prompt of every second one. Prints CPU time per
placement of the thread, median and 99th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import time

from contract.v1 import plan_pb2
from control_plane.awake import AwakeClock
from control_plane.fleet.placement import placement
from control_plane.fleet.placement.shortlist import Shortlist
from control_plane.fleet.settings import FleetSettings, PlacementCosts
from control_plane.fleet.workers.session import SessionOwner, WorkerSession
from control_plane.host_cache.base import CacheAddress
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.probe import SchedulerProbe
from control_plane.scheduler.types import AdapterRef, LoadSlot, Request, RequestId, SlotReady, StepResult

COSTS = PlacementCosts()
PROMPT = tuple(range(512))


class _Nobody:
    """Listens to a session and does nothing."""

    def __getattr__(self, _name: str) -> object:
        return lambda *_args: None


def make_session(idx: int, adapters: list[AdapterRef], rng: random.Random) -> WorkerSession:
    """A worker in the middle of its work."""
    hello = plan_pb2.Hello(
        worker_id=f"w{idx:04d}", num_blocks=4096, block_size=16, max_rows=64, max_step_tokens=8192, num_slots=16
    )
    hello.arena_bytes, hello.max_model_len, hello.vocab_size = 1 << 30, 8192, 32000
    owner: SessionOwner = _Nobody()  # type: ignore[assignment]  # it has whatever is called
    settings, host_cache, awake = FleetSettings(), CacheAddress(), AwakeClock()
    session = WorkerSession(hello, idx + 1, settings, owner, host_cache, time.monotonic, awake, VirtualCounters())
    scheduler = session.scheduler
    for number in range(rng.randint(1, 12)):
        prompt = PROMPT if number == 0 and idx % 2 else tuple(rng.randrange(32000) for _ in range(64))
        adapter = None if number == 0 else rng.choice(adapters)
        scheduler.add(Request(RequestId(number + 1), prompt, 256, adapter=adapter))
    for _ in range(4):
        for command in scheduler.slot_commands():
            if isinstance(command, LoadSlot):
                scheduler.apply_slot_report(SlotReady(command.slot_idx, command.generation), 0.0)
        plan = scheduler.plan(0.0)
        assert plan is not None, "nothing to do for a worker that was given requests"
        rows = SchedulerProbe(scheduler).sampled_rows()
        scheduler.apply(StepResult(plan.step_id, rows, [1] * len(rows)))
    return session


async def measure(num_workers: int, num_requests: int) -> list[float]:
    """Seconds of each placement, ascending."""
    rng = random.Random(0)
    adapters = [AdapterRef(hashlib.sha256(b"%d" % i).hexdigest(), 64 << 20) for i in range(200)]
    made = [make_session(idx, adapters, rng) for idx in range(num_workers)]
    sessions, shortlist = {session.worker_id: session for session in made}, Shortlist()
    times_s = []
    for number in range(num_requests):
        prompt = PROMPT if number % 2 else tuple(rng.randrange(32000) for _ in range(512))
        adapter = rng.choice([None, *adapters])
        request = Request(RequestId(number), prompt, 256, adapter=adapter)
        start_s = time.thread_time()
        need = placement.need_of(request, COSTS, lambda _digest: True)
        chosen = next(placement.by_preference(shortlist.choose(sessions, request), need, COSTS))
        shortlist.placed(request, chosen.worker_id)
        times_s.append(time.thread_time() - start_s)
    return sorted(times_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    for num_workers in args.workers:
        times_s = asyncio.run(measure(num_workers, args.requests))
        median_ms, p99_ms = times_s[len(times_s) // 2] * 1000, times_s[int(len(times_s) * 0.99)] * 1000
        print(f"{num_workers:5d} workers: median {median_ms:.3f} ms, p99 {p99_ms:.3f} ms of CPU time per placement")


if __name__ == "__main__":
    main()

"""Time of plan and apply per step of steady decode: 256 running rows, waiting requests behind them, many adapters.

`python -m benchmarks.control_plane.scheduler_step [--waiting N] [--adapters N] [--steps N]`: no worker, tokens from a
seeded generator; prints median and p99 in microseconds of CPU time of the thread, for several lengths of the waiting
queue.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import time

from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.types import (
    AdapterRef,
    LoadSlot,
    Request,
    RequestId,
    StepPlan,
    StepResult,
    WorkerLimits,
)


def answer(plan: StepPlan, prefill_left: dict[int, int], rng: random.Random) -> StepResult:
    """The result that a worker would send, with random tokens."""
    for new in plan.new_rows:
        prefill_left[new.row] = len(new.token_ids) - new.num_computed_tokens
    rows = []
    for scheduled in plan.scheduled:
        if not scheduled.is_decode:
            prefill_left[scheduled.row] -= scheduled.num_tokens
        if scheduled.is_decode or prefill_left[scheduled.row] == 0:
            rows.append(scheduled.row)
    return StepResult(plan.step_id, rows, [rng.randrange(32_000) for _ in rows])


def obey(scheduler: Scheduler) -> None:
    """Load and evict at once."""
    while commands := scheduler.slot_commands():
        for command in commands:
            report = scheduler.slot_ready if isinstance(command, LoadSlot) else scheduler.slot_empty
            report(command.slot, command.generation)


def measure(
    num_rows: int, num_waiting: int, num_adapters: int, num_slots: int, num_steps: int, seed: int
) -> tuple[list[float], float]:
    """Seconds of each step (plan and apply), and of all admissions to the queue together."""
    rng = random.Random(seed)
    limits = WorkerLimits(
        num_blocks=num_rows * 80,
        block_size=16,
        max_rows=num_rows,
        max_step_tokens=8192,
        num_slots=num_slots,
        arena_bytes=num_slots << 20,
        max_model_len=4096,
        plan_depth=2,
    )
    scheduler = Scheduler(limits)
    adapters = [AdapterRef(hashlib.sha256(b"%d" % i).hexdigest(), 1 << 20) for i in range(num_adapters)]
    requests = [
        Request(
            request_id=RequestId(idx + 1),
            prompt_token_ids=tuple(rng.randrange(32_000) for _ in range(rng.randrange(96, 160))),
            max_tokens=1024,
            adapter=rng.choice(adapters) if adapters else None,
            arrival_s=idx * 1e-3,
        )
        for idx in range(num_rows + num_waiting)
    ]
    began = time.thread_time()
    for request in requests:
        scheduler.add(request, request.arrival_s)
    add_s = time.thread_time() - began
    obey(scheduler)
    prefill_left: dict[int, int] = {}
    warm_up, durations, pending = 40, [], []
    gc.collect()
    gc.freeze()
    for step in range(warm_up + num_steps):
        spent = 0.0
        while True:
            began = time.thread_time()
            plan = scheduler.plan(0.0)
            spent += time.thread_time() - began
            if plan is None:
                break
            pending.append(answer(plan, prefill_left, rng))
        began = time.thread_time()
        scheduler.apply(pending.pop(0), 0.0)
        spent += time.thread_time() - began
        obey(scheduler)
        if step >= warm_up:
            durations.append(spent)
    gc.unfreeze()
    num_running = len(scheduler.running)
    assert num_running == num_rows or num_slots < num_adapters, f"{num_running} rows run, {num_rows} should"
    return durations, add_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256, help="running requests, a count (default 256)")
    parser.add_argument("--waiting", type=int, default=1000, help="waiting requests, a count (default 1000)")
    parser.add_argument("--adapters", type=int, default=200, help="distinct adapters, a count (default 200)")
    parser.add_argument("--slots", type=int, default=256, help="adapter slots, a count (default 256)")
    parser.add_argument("--steps", type=int, default=800, help="measured steps, a count (default 800)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, adapters and tokens (default 1)")
    args = parser.parse_args()
    print(f"{args.rows} rows, {args.adapters} adapters, {args.steps} steps; plan + apply in microseconds of CPU time")
    print(f"{'waiting':>8} {'median':>8} {'p99':>8} {'add, each':>10}")
    for num_waiting in sorted({0, args.waiting, 10 * args.waiting}):
        durations, add_s = measure(args.rows, num_waiting, args.adapters, args.slots, args.steps, args.seed)
        median_us = statistics.median(durations) * 1e6
        p99_us = sorted(durations)[int(len(durations) * 0.99)] * 1e6
        add_us = add_s / (args.rows + num_waiting) * 1e6
        print(f"{num_waiting:>8} {median_us:>8.0f} {p99_us:>8.0f} {add_us:>10.1f}")


if __name__ == "__main__":
    main()

"""Time of a control-plane step of steady decode: 256 running rows, waiting requests behind them, many adapters.

`python -m benchmarks.control_plane.scheduler_step [--waiting N] [--adapters N] [--steps N]`: no worker, tokens from a
seeded generator. A step is the scheduler's plan and apply, and the plan's encoding and the result's decoding on the
wire; prints medians and the p99 of the whole in microseconds of CPU time of the thread, for several lengths of the
waiting queue.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
from motet.v1 import plan_pb2

from control_plane.fleet.wire import PlanEncoder
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.types import (
    AdapterRef,
    LoadSlot,
    Request,
    RequestId,
    StepPlan,
    WorkerLimits,
)

VOCAB_SIZE = 32_000


@dataclass
class Durations:
    """Seconds of each measured step."""

    scheduler: list[float] = field(default_factory=list)  # plan and apply
    wire: list[float] = field(default_factory=list)  # encode and decode
    add_s: float = 0.0  # all admissions to the queue together

    def medians_us(self) -> tuple[float, float, float, float]:
        """Medians of scheduler, wire and both, and the p99 of both, in microseconds."""
        both = [a + b for a, b in zip(self.scheduler, self.wire, strict=True)]
        medians = [statistics.median(values) * 1e6 for values in (self.scheduler, self.wire, both)]
        return medians[0], medians[1], medians[2], sorted(both)[int(len(both) * 0.99)] * 1e6


def answer(plan: StepPlan, prefill_left: dict[int, int], rng: random.Random) -> plan_pb2.StepResult:
    """The message that a worker would send, with random tokens."""
    for new in plan.new_rows:
        prefill_left[new.row] = len(new.token_ids) - new.num_computed_tokens
    rows = []
    for scheduled in plan.scheduled:
        if not scheduled.is_decode:
            prefill_left[scheduled.row] -= scheduled.num_tokens
        if scheduled.is_decode or prefill_left[scheduled.row] == 0:
            rows.append(scheduled.row)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in rows]
    return plan_pb2.StepResult(step_id=plan.step_id, epoch=1, rows=packed(rows), token_ids=packed(tokens))


def packed(values: list[int]) -> bytes:
    """As they travel."""
    return np.array(values, dtype="<i4").tobytes()


def obey(scheduler: Scheduler) -> None:
    """Load and evict at once."""
    while commands := scheduler.slot_commands():
        for command in commands:
            report = scheduler.slot_ready if isinstance(command, LoadSlot) else scheduler.slot_empty
            report(command.slot, command.generation)


def measure(num_rows: int, num_waiting: int, num_adapters: int, num_slots: int, num_steps: int, seed: int) -> Durations:
    """Times of steady decode."""
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
    durations = Durations(add_s=time.thread_time() - began)
    obey(scheduler)
    prefill_left: dict[int, int] = {}
    encoder = PlanEncoder(epoch=1, vocab_size=VOCAB_SIZE)
    warm_up, pending = 40, []
    gc.collect()
    gc.freeze()
    for step in range(warm_up + num_steps):
        spent_s = wire_s = 0.0
        while True:
            began = time.thread_time()
            plan = scheduler.plan(0.0)
            planned = time.thread_time()
            spent_s += planned - began
            if plan is None:
                break
            encoder.encode(plan).SerializeToString()
            wire_s += time.thread_time() - planned
            pending.append(answer(plan, prefill_left, rng).SerializeToString())
        began = time.thread_time()
        result = encoder.decode_result(plan_pb2.StepResult.FromString(pending.pop(0)))
        decoded = time.thread_time()
        assert result is not None, "a stale result"
        scheduler.apply(result, 0.0)
        spent_s += time.thread_time() - decoded
        wire_s += decoded - began
        obey(scheduler)
        if step >= warm_up:
            durations.scheduler.append(spent_s)
            durations.wire.append(wire_s)
    gc.unfreeze()
    num_running = len(scheduler.running)
    assert num_running == num_rows or num_slots < num_adapters, f"{num_running} rows run, {num_rows} should"
    return durations


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
    print(f"{args.rows} rows, {args.adapters} adapters, {args.steps} steps; microseconds of CPU time, medians")
    print(f"{'waiting':>8} {'scheduler':>10} {'wire':>8} {'both':>8} {'p99':>8} {'add, each':>10}")
    for num_waiting in sorted({0, args.waiting, 10 * args.waiting}):
        durations = measure(args.rows, num_waiting, args.adapters, args.slots, args.steps, args.seed)
        scheduler_us, wire_us, both_us, p99_us = durations.medians_us()
        add_us = durations.add_s / (args.rows + num_waiting) * 1e6
        print(f"{num_waiting:>8} {scheduler_us:>10.0f} {wire_us:>8.0f} {both_us:>8.0f} {p99_us:>8.0f} {add_us:>10.1f}")


if __name__ == "__main__":
    main()

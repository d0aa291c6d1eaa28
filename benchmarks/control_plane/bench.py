"""What a step of the control plane costs, and what a queued request does: time and memory of scheduler and wire alone.

    python -m benchmarks.control_plane.bench [--rows N] [--steps N] [--chart FILE]

No worker: tokens come from a seeded generator, adapters load at once. A step is the scheduler's plan and apply, and the
plan's encoding and the result's decoding on the wire. Prints CPU time of the thread per step over the number of waiting
requests, over the number of adapters, and where requests end and begin; the time to queue 10 000 requests, the memory
that each takes beside its tokens, and the targets. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import sys
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from contract.v1 import plan_pb2
from control_plane.fleet.workers.wire import PlanEncoder
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.types import (
    AdapterRef,
    LoadSlot,
    Request,
    RequestId,
    SlotEmptied,
    SlotReady,
    StepPlan,
    WorkerLimits,
)

VOCAB_SIZE = 32_000
NUM_SLOTS = 256
WARM_UP_STEPS = 40
STEADY = range(1024, 1025)  # tokens that a request generates: none ends while steps are measured

MEDIAN_TARGET_MS = 1.0  # of a step with 256 rows, 1 000 waiting requests, 200 adapters
P99_TARGET_MS = 3.0
QUEUE_TARGET_S = 1.0  # to queue 10 000 requests
MEMORY_TARGET_BYTES = 4096  # of one queued request beside its tokens
TOKEN_BYTES = 8  # of one token id in a tuple


@dataclass
class StepTimes:
    """Seconds of CPU time of each measured step."""

    scheduler: list[float] = field(default_factory=list)  # plan and apply
    wire: list[float] = field(default_factory=list)  # encode and decode

    def both(self) -> list[float]:
        """Of each step as a whole, ascending."""
        return sorted(a + b for a, b in zip(self.scheduler, self.wire, strict=True))


def result_of(plan: StepPlan, prefill_left: dict[int, int], rng: random.Random) -> plan_pb2.StepResult:
    """The message that a worker would send, with random tokens."""
    for new in plan.new_rows:
        prefill_left[new.row] = new.num_tokens - new.num_computed_tokens
    rows = list(plan.decode_rows)
    for row, num_tokens in plan.prefills:
        prefill_left[row] -= num_tokens
        if prefill_left[row] == 0:
            rows.append(row)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in rows]
    return plan_pb2.StepResult(step_id=plan.step_id, epoch=1, rows=packed(rows), token_ids=packed(tokens))


def packed(values: list[int]) -> bytes:
    """As they travel."""
    return np.array(values, dtype="<i4").tobytes()


def obey(scheduler: Scheduler) -> None:
    """Load and evict at once."""
    while commands := scheduler.slot_commands():
        for command in commands:
            report = SlotReady if isinstance(command, LoadSlot) else SlotEmptied
            scheduler.apply_slot_report(report(command.slot_idx, command.generation), 0.0)


def make_scheduler(num_rows: int) -> Scheduler:
    """One with room for all rows."""
    limits = WorkerLimits(
        num_blocks=num_rows * 80,
        block_size=16,
        max_rows=num_rows,
        max_step_tokens=8192,
        num_slots=NUM_SLOTS,
        arena_bytes=NUM_SLOTS << 20,
        max_model_len=4096,
        plan_depth=2,
    )
    return Scheduler(limits)


def make_requests(count: int, num_adapters: int, rng: random.Random, num_generated: range = STEADY) -> list[Request]:
    """Requests of 96 to 159 tokens that generate so many, each with one of the adapters, 1 ms apart."""
    adapters = [AdapterRef(hashlib.sha256(b"%d" % i).hexdigest(), 1 << 20) for i in range(num_adapters)]
    return [
        Request(
            request_id=RequestId(idx + 1),
            prompt_token_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(96, 160))),
            max_tokens=rng.choice(num_generated),
            adapter=rng.choice(adapters) if adapters else None,
            arrival_s=idx * 1e-3,
        )
        for idx in range(count)
    ]


def time_steps(
    num_rows: int, num_waiting: int, num_adapters: int, num_steps: int, seed: int, num_generated: range = STEADY
) -> StepTimes:
    """Steps with so many rows running and requests waiting; nothing but decodes where every request is a long one."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_rows)
    # With more adapters than slots the first rows take the first adapters, so that all rows run.
    running = make_requests(num_rows, min(num_adapters, NUM_SLOTS), rng, num_generated)
    waiting = make_requests(num_rows + num_waiting, num_adapters, rng, num_generated)[num_rows:]
    for request in running + waiting:
        scheduler.add(request)
    obey(scheduler)
    encoder = PlanEncoder(epoch=1, vocab_size=VOCAB_SIZE)
    prefill_left: dict[int, int] = {}
    pending: list[bytes] = []
    times = StepTimes()
    gc.collect()
    gc.freeze()
    for step in range(WARM_UP_STEPS + num_steps):
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
            pending.append(result_of(plan, prefill_left, rng).SerializeToString())
        began = time.thread_time()
        result = encoder.decode_result(plan_pb2.StepResult.FromString(pending.pop(0)))
        decoded = time.thread_time()
        assert result is not None, "a stale result"
        scheduler.apply(result)
        spent_s += time.thread_time() - decoded
        wire_s += decoded - began
        obey(scheduler)
        if step >= WARM_UP_STEPS:
            times.scheduler.append(spent_s)
            times.wire.append(wire_s)
    gc.unfreeze()
    stats = scheduler.stats()
    assert stats.num_waiting > 0 or num_waiting == 0, "requests ran out"
    assert stats.num_running == num_rows or num_generated != STEADY, f"{stats.num_running} rows run, not {num_rows}"
    return times


def time_queueing(count: int, seed: int) -> float:
    """Seconds of CPU time to queue so many requests behind a full batch."""
    scheduler = make_scheduler(256)
    requests = make_requests(count, 200, random.Random(seed))
    began = time.thread_time()
    for request in requests:
        scheduler.add(request)
    return time.thread_time() - began


def queued_bytes(count: int, seed: int) -> float:
    """Memory of one queued request beside its tokens, the request itself included."""
    scheduler = make_scheduler(256)
    rng = random.Random(seed)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    num_tokens = 0
    for request in make_requests(count, 200, rng):
        num_tokens += len(request.prompt_token_ids)
        scheduler.add(request)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Every token id of the generator is an int object of 28 bytes beside its place in the tuple; small ones are shared.
    return (after - before - num_tokens * (TOKEN_BYTES + sys.getsizeof(VOCAB_SIZE))) / count


def curve(
    args: argparse.Namespace, title: str, points: list[tuple[int, int]], num_generated: range = STEADY
) -> list[tuple[int, int, float, float]]:
    """Print a line per (waiting, adapters) and return them with median and p99 in microseconds."""
    print(
        f"\n{title}\n{'waiting':>8} {'adapters':>8} {'scheduler':>10} {'wire':>8} {'both':>8} {'p99':>8}  us, CPU time"
    )
    rows = []
    for num_waiting, num_adapters in points:
        times = time_steps(args.rows, num_waiting, num_adapters, args.steps, args.seed, num_generated)
        both = times.both()
        median_us, p99_us = statistics.median(both) * 1e6, both[int(len(both) * 0.99)] * 1e6
        print(
            f"{num_waiting:>8} {num_adapters:>8} {statistics.median(times.scheduler) * 1e6:>10.0f} "
            f"{statistics.median(times.wire) * 1e6:>8.0f} {median_us:>8.0f} {p99_us:>8.0f}",
            flush=True,
        )
        rows.append((num_waiting, num_adapters, median_us, p99_us))
    return rows


def draw(
    path: Path, by_waiting: list[tuple[int, int, float, float]], by_adapters: list[tuple[int, int, float, float]]
) -> None:
    """Both curves as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, rows, column, label in (
        (axes[0], by_waiting, 0, "waiting requests"),
        (axes[1], by_adapters, 1, "adapters of the waiting requests"),
    ):
        axis.plot([max(row[column], 1) for row in rows], [row[2] / 1e3 for row in rows], marker="o", label="median")
        axis.plot([max(row[column], 1) for row in rows], [row[3] / 1e3 for row in rows], marker="o", label="p99")
        axis.axhline(MEDIAN_TARGET_MS, color="grey", linestyle=":", label="target of the median")
        axis.set(xscale="log", xlabel=label, ylim=(0, None))
    axes[0].set_ylabel("CPU time of a step, ms")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Measure, print, and say whether the targets are reached."""
    parser = argparse.ArgumentParser(prog="benchmarks.control_plane.bench", description="Cost of a control-plane step.")
    parser.add_argument("--rows", type=int, default=256, help="running requests, a count (default 256)")
    parser.add_argument("--steps", type=int, default=800, help="measured steps of each line, a count (default 800)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, adapters and tokens (default 1)")
    parser.add_argument("--chart", type=Path, help="draw the curves there, as PNG or SVG (needs make setup-bench)")
    args = parser.parse_args()
    print(f"{args.rows} rows, {args.steps} steps a line, plan depth 2")
    by_waiting = curve(args, "over the waiting requests", [(n, 200) for n in (0, 1_000, 10_000, 50_000)])
    by_adapters = curve(args, "over their adapters", [(10_000, n) for n in (1, 200, 2_000, 10_000)])
    # As many tokens as rows on average.
    changing = range(1, 2 * args.rows)
    curve(args, "where one request ends and one begins in each step", [(10_000, 200)], changing)
    if args.chart is not None:
        draw(args.chart, by_waiting, by_adapters)
    queue_s, request_bytes = time_queueing(10_000, args.seed), queued_bytes(10_000, args.seed)
    _, _, median_us, p99_us = by_waiting[1]
    checks = [
        ("step, median, 1 000 waiting", median_us / 1e3, MEDIAN_TARGET_MS, "ms"),
        ("step, p99, 1 000 waiting", p99_us / 1e3, P99_TARGET_MS, "ms"),
        ("queueing 10 000 requests", queue_s, QUEUE_TARGET_S, "s"),
        ("a queued request beside its tokens", request_bytes, MEMORY_TARGET_BYTES, "bytes"),
    ]
    print()
    for name, value, target, unit in checks:
        print(f"{name:<36} {value:>10.2f} {unit:<5} target {target:g}: {'reached' if value <= target else 'MISSED'}")
    return 0 if all(value <= target for _, value, target, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

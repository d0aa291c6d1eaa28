"""Measures launch parameters on the GPU at hand and writes the tables that `kernels.tuning` reads.

    python -m benchmarks.kernels.tune [--op NAME ...] [--dtype bfloat16] [--repeats N] [--out DIR] [--short]

Every candidate must first give the reference's bits on inputs of small integers, of which every sum is exact. What is
right is then timed in turn with the defaults; the fastest replaces them in a bucket if it wins a second time by more
than the margin. Buckets of an earlier table that were not measured again are kept. Prints one line per bucket; exit
status 1 if any candidate gave wrong bits, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import tune_attention, tune_lora, tune_rows
from benchmarks.kernels.measure import Call, time_calls
from benchmarks.kernels.problem import Found, Problem
from kernels.tuning import TABLES, bucket_name, read_tables, write_table

# A candidate must be faster by so much, twice: less is noise, and a table should say only what it knows.
MARGIN = 0.03
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# op -> its buckets on a device, in a dtype; fewer where `is_short`
PROBLEMS: dict[str, Callable[[torch.device, torch.dtype, bool], Iterable[Problem]]] = {
    "linear_rows": tune_rows.linear_problems,
    "lora_expand": tune_lora.expand_problems,
    "lora_shrink": tune_lora.shrink_problems,
    "paged_attention_decode": tune_attention.decode_problems,
    "paged_attention_prefill": tune_attention.prefill_problems,
    "sample": tune_rows.sample_problems,
}

# Seconds of each call, measured in turn.
Timer = Callable[[Sequence[Call]], Sequence[float]]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        print("tune: no CUDA device here; launch parameters are of a GPU, run this on one", file=sys.stderr)
        return 2
    device, repeats = torch.device("cuda"), options.repeats
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {options.dtype}, medians of {repeats} runs")

    def timer(calls: Sequence[Call]) -> list[float]:
        times = time_calls({str(index): [call] for index, call in enumerate(calls)}, device, repeats=repeats)
        return [times[str(index)][0] for index in range(len(calls))]

    with torch.inference_mode():
        results = [
            tune(op, PROBLEMS[op](device, DTYPES[options.dtype], options.short), timer, name, options.out)
            for op in options.op or sorted(PROBLEMS)
        ]
    return 0 if all(results) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.tune", description="Measure launch parameters.")
    parser.add_argument("--op", action="append", choices=sorted(PROBLEMS), help="only this one; may be repeated")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each candidate (default: 30)")
    parser.add_argument("--out", type=Path, default=TABLES, help="folder of the tables (default: the checkout's)")
    parser.add_argument("--short", action="store_true", help="fewer buckets")
    return parser.parse_args(argv)


def tune(op: str, problems: Iterable[Problem], timer: Timer, device_name: str, folder: Path) -> bool:
    """Search every bucket of an op, print what was found and write the table. False if anything was wrong."""
    earlier = read_tables(device_name, folder).get(op)
    buckets = dict(earlier.buckets) if earlier else {}
    is_right = True
    for problem in problems:
        found, name = search(problem, timer), bucket_name(**problem.sizes)
        buckets[name] = changes(problem.default, found.best)
        print(line(op, name, found, buckets[name]), flush=True)
        for candidate in found.wrong:
            is_right = False
            print(f"WRONG BITS: {op} {name} {candidate}", file=sys.stderr, flush=True)
    print(f"wrote {write_table(op, device_name, made_with(), buckets, folder)}")
    return is_right


def search(problem: Problem, timer: Timer) -> Found:
    """The fastest candidate that is right, or the default. Raises RuntimeError if the default itself is wrong."""
    wrong: list[Any] = []
    cannot_run: list[tuple[Any, str]] = []
    right: list[Any] = []
    for candidate in dict.fromkeys((problem.default, *problem.candidates)):
        try:
            (right if problem.is_right(candidate) else wrong).append(candidate)
        except Exception as error:  # such as too much shared memory; the next one may do
            cannot_run.append((candidate, f"{type(error).__name__}: {error}".splitlines()[0]))
    if problem.default not in right:
        why = dict(cannot_run).get(problem.default, "its bits are wrong")
        raise RuntimeError(f"{bucket_name(**problem.sizes)}: the default {problem.default}: {why}")

    def time_s(candidates: Sequence[Any]) -> Sequence[float]:
        return timer([partial(problem.run, candidate) for candidate in candidates])

    times = dict(zip(right, time_s(right), strict=True))
    best = min(right, key=lambda candidate: times[candidate])
    default_s = times[problem.default]
    if times[best] < (1 - MARGIN) * default_s:
        default_s, best_s = time_s([problem.default, best])
        if best_s < (1 - MARGIN) * default_s:
            return Found(best, default_s, best_s, wrong, cannot_run)
    return Found(problem.default, default_s, default_s, wrong, cannot_run)


def changes(default: Any, best: Any) -> dict[str, int]:
    """The fields of a launch dataclass in which `best` differs."""
    before, after = asdict(default), asdict(best)
    return {name: after[name] for name in after if after[name] != before[name]}


def line(op: str, name: str, found: Found, changed: Mapping[str, int]) -> str:
    chosen = " ".join(f"{key}={value}" for key, value in changed.items()) or "defaults"
    failed = f"; {len(found.cannot_run)} cannot run, as {found.cannot_run[0][1]}" if found.cannot_run else ""
    return f"{op} {name}: {found.default_s * 1e6:.1f} -> {found.best_s * 1e6:.1f} us with {chosen}{failed}"


def made_with() -> dict[str, str]:
    import triton

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "torch": torch.__version__, "triton": triton.__version__}


if __name__ == "__main__":
    sys.exit(main())

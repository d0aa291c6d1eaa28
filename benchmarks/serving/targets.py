"""Holds the CPU's throughput and latency against their targets: `python -m benchmarks.serving.targets --help`.

Every row of the table below compares two measurements. Those of a group of rows are taken in turn, `--repeats` times,
on engines that are all loaded, of which the others stand still meanwhile; a row compares the medians. Groups follow one
another, so that the engines of one fit in memory. Ours go the whole way over gRPC; peers run offline, in processes of
their own. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving.contest import MAX_REPEATS, Contest, Figures
from benchmarks.serving.peer_process import PeerFailed
from benchmarks.serving.report import machine, write_json
from benchmarks.system import ROOT, StartFailed

TOKENS, ITL, TTFT = "output_tokens_per_s", "itl_ms_p50", "ttft_ms_p50"
UNITS = {TOKENS: "tokens/s", ITL: "ITL p50 ms", TTFT: "TTFT ms"}
EQUAL = "equal_tokens"


@dataclass(frozen=True)
class Row:
    """One target."""

    name: str  # for --only
    group: str  # of rows that are measured together
    workload: str  # for people
    ours: str  # a measurement (see contest.WORKLOADS)
    against: tuple[str, ...]  # the others; the best of them counts
    metric: str
    target: float  # least ratio of tokens/s; largest ratio of times
    all_tokens_equal: bool = False  # of both

    @property
    def is_time(self) -> bool:
        """Whether less is better."""
        return self.metric != TOKENS


VLLM = ("vllm", "vllm-all-cores")
ROWS = (
    Row("base", "base", "base only, 32 requests", "base-32", tuple(f"{v} base-32" for v in VLLM), TOKENS, 1.6),
    Row("base-products", "base", "base only, 32 requests", "base-32", ("products base-32",), TOKENS, 0.8),
    Row("one", "base", "one request, base only", "base-1", tuple(f"{v} base-1" for v in VLLM), TOKENS, 1.3),
    Row("one-adapter", "adapters", "one request, one adapter of rank 16", "adapter-1", ("base-1",), ITL, 1.1),
    Row("adapters-16", "PEFT", "16 adapters, 32 requests", "adapters-16", ("peft adapters-16",), TOKENS, 3.5),
    Row("adapters-16-base", "adapters", "16 adapters, 32 requests", "adapters-16", ("base-32",), TOKENS, 0.75),
    Row("adapters-64", "adapters", "64 adapters, 64 requests", "adapters-64", ("base-64",), TOKENS, 0.6),
    Row("dora-16", "adapters", "16 DoRA adapters, 32 requests", "dora-16", ("base-32",), TOKENS, 0.7),
    Row("full-arena", "arena", "base only, arena full of adapters", "full-base-32", ("empty-base-32",), TOKENS, 0.99),
    Row("float32", "float32", "float32, 16 adapters", "float32-16", ("peft float32-16",), TOKENS, 4.0, True),
    Row("ttft", "base", "one request of 512 tokens", "ttft-512", tuple(f"{v} ttft-512" for v in VLLM), TTFT, 0.7),
)


@dataclass(frozen=True)
class Outcome:
    """A row's verdict."""

    row: Row
    ours: float
    peer: str  # the measurement that counts
    theirs: float
    equal_tokens: float | None  # share of ours that the peer has too, where the row compares them

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs

    @property
    def is_met(self) -> bool:
        """Whether the target is reached."""
        is_reached = self.ratio <= self.row.target if self.row.is_time else self.ratio >= self.row.target
        return is_reached and self.equal_tokens in (None, 1.0)


def judge(row: Row, figures: Figures) -> Outcome:
    """Medians of both sides, of the peer the best measurement's."""

    def median(name: str, metric: str) -> float:
        return statistics.median(run[metric] for run in figures[name])

    best = (min if row.is_time else max)(row.against, key=lambda name: median(name, row.metric))
    equal = min(run[EQUAL] for run in figures[best]) if row.all_tokens_equal else None
    return Outcome(row, median(row.ours, row.metric), best, median(best, row.metric), equal)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.targets",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = out.add_argument
    add("--only", action="append", choices=[row.name for row in ROWS], help="rows to measure (default: all)")
    add("--repeats", type=int, default=3, help=f"times that everything is measured, at most {MAX_REPEATS}")
    add("--model-shape", default="205m", choices=("205m", "tiny"), help="random Llama to serve")
    add("--threads", type=int, default=os.cpu_count() or 1, help="compute threads of every engine, a count")
    add("--peer-python", default=sys.executable, help="interpreter that has vllm; without it name rows by --only")
    add("--worker-arg", action="append", default=[], help="further argument of the workers")
    add("--cache", type=Path, default=ROOT / ".motet" / "bench", help="where checkpoints and adapters are kept")
    add("--out", type=Path, help="write every run here as JSON")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 150)
    if not 1 <= args.repeats <= MAX_REPEATS:
        console.print(f"--repeats: {args.repeats} is not in 1..{MAX_REPEATS}: every one needs prompts of its own")
        return 2
    rows = [row for row in ROWS if args.only is None or row.name in args.only]
    outcomes: list[Outcome] = []
    notes: list[str] = []
    runs: dict[str, Figures] = {}
    try:
        for group in dict.fromkeys(row.group for row in rows):
            of_group = [row for row in rows if row.group == group]
            names = list(dict.fromkeys(name for row in of_group for name in (row.ours, *row.against)))
            with Contest(args, names, console) as contest:
                runs[group] = contest.run(args.repeats)
                notes += contest.describe()
            outcomes += [judge(row, runs[group]) for row in of_group]
    except (PeerFailed, StartFailed) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    show(console, outcomes, args)
    for line in notes:
        console.print(line, markup=False, soft_wrap=True)
    if args.out:
        write_json(args.out, to_json(args, outcomes, runs, notes))
        console.print(f"written: {args.out}")
    return 0 if all(outcome.is_met for outcome in outcomes) else 1


def show(console: Console, outcomes: Sequence[Outcome], args: argparse.Namespace) -> None:
    here = machine()
    title = f"{here['cpu']}, {here['cores']} cores, {args.threads} threads; medians of {args.repeats}"
    table = Table(title=title)
    for heading in ("workload", "figure", "ours", "peer", "", "ratio", "target", "verdict"):
        table.add_column(heading, justify="right" if heading in ("ours", "peer", "ratio", "target") else "left")
    for outcome in outcomes:
        row = outcome.row
        verdict = "met" if outcome.is_met else "MISSED"
        if outcome.equal_tokens is not None:
            verdict += f", {100 * outcome.equal_tokens:.1f}% of the tokens equal"
        bound = f"{'<=' if row.is_time else '>='} {row.target:g}x"
        cells = (row.workload, UNITS[row.metric], f"{outcome.ours:.1f}", f"{outcome.theirs:.1f}", outcome.peer)
        table.add_row(*cells, f"{outcome.ratio:.2f}x", bound, verdict)
    console.print(table)


def to_json(
    args: argparse.Namespace, outcomes: Sequence[Outcome], runs: dict[str, Figures], notes: Sequence[str]
) -> dict[str, Any]:
    """What a report file holds."""
    return {
        "machine": machine(),
        "settings": {key: str(value) for key, value in vars(args).items()},
        "notes": list(notes),
        "rows": [{**asdict(one), "ratio": one.ratio, "is_met": one.is_met} for one in outcomes],
        "runs": runs,
    }


if __name__ == "__main__":
    sys.exit(main())

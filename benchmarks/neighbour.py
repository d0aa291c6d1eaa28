"""What a busy neighbour costs a step of the engine: `python -m benchmarks.neighbour --help`.

The engine runs in this process, without a server. Its steps are timed alone, beside one process that keeps a core busy,
and beside one per core, in turn; the neighbours stand still while they are not wanted. A step is to take at most 1.7x
its idle time beside one neighbour and 2.5x beside one per core. Exits with 1 where it takes more.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.table import Table

from benchmarks.engine.__main__ import counts
from benchmarks.engine.driver import Driver, make_engine
from benchmarks.serving.checkpoints import SHAPES, make_base
from benchmarks.serving.report import machine, write_json
from benchmarks.system import ROOT
from kernels.native import clock_ns

LIMITS = {"one": 1.7, "one per core": 2.5}  # of a step, against its idle time
IDLE = "idle"
_SPIN = "print(flush=True)\nwhile True: pass"


class Neighbours:
    """Processes that each keep a core busy, all of them stopped at first. A context manager."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for _ in range(self._count):
            process = subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE)
            self._processes.append(process)
            assert process.stdout is not None
            process.stdout.readline()
        self.let_run(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order in which `let_run` starts them."""
        return [process.pid for process in self._processes]

    def let_run(self, count: int) -> None:
        """From now on so many of them are busy."""
        for index, process in enumerate(self._processes):
            process.send_signal(signal.SIGCONT if index < count else signal.SIGSTOP)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.neighbour",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = out.add_argument
    add("--model-shape", choices=sorted(SHAPES), default="205m", help="random Llama to run")
    add("--rows", default="1,32", help="rows that decode, counts separated by commas")
    add("--context", type=int, default=160, help="tokens of context of a row")
    add("--steps", type=int, default=20, help="steps of each turn, a count")
    add("--turns", type=int, default=5, help="turns of every state, a count")
    add("--threads", type=int, help="compute threads, a count (default: as a worker chooses)")
    add("--cache", type=Path, default=ROOT / ".motet" / "bench", help="where checkpoints are kept")
    add("--out", type=Path, help="write every turn here as JSON")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    num_cores = len(os.sched_getaffinity(0))
    states = {IDLE: 0, "one": 1, "one per core": num_cores}
    rows = counts(args.rows)
    engine = make_engine(
        make_base(args.model_shape, args.cache),
        threads=args.threads,
        max_rows=max(rows),
        tokens_per_row=args.context + len(states) * args.turns * args.steps + 32,
        arena_bytes=0,
        native_code="on",
    )
    driver = Driver(engine)
    with Neighbours(num_cores) as neighbours:
        turns = {num_rows: measure(driver, neighbours, states, num_rows, args) for num_rows in rows}
    outcomes = [judge(num_rows, state, of_rows) for num_rows, of_rows in turns.items() for state in LIMITS]
    show(console, turns, outcomes, num_cores)
    if args.out:
        runs = {str(num_rows): of_rows for num_rows, of_rows in turns.items()}
        settings = {key: str(value) for key, value in vars(args).items()}
        write_json(args.out, {"machine": machine(), "settings": settings, "turns_ms": runs})
        console.print(f"written: {args.out}")
    return 0 if all(is_met for *_, is_met in outcomes) else 1


def measure(
    driver: Driver, neighbours: Neighbours, states: dict[str, int], num_rows: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """The mean step of each turn, ms, by state; the states take turns."""
    num_steps = len(states) * args.turns * args.steps
    driver.begin_decodes(num_rows, 0, num_context=args.context, num_steps=num_steps)
    turns_ms: dict[str, list[float]] = {state: [] for state in states}
    for _ in range(args.turns):
        for state, count in states.items():
            neighbours.let_run(count)
            steps_ms = []
            for _ in range(args.steps):
                began_ns = clock_ns()
                driver.decode()
                steps_ms.append((clock_ns() - began_ns) / 1e6)
            neighbours.let_run(0)
            # The mean: a neighbour holds some steps up for a whole slice of time, and others not at all.
            turns_ms[state].append(statistics.fmean(steps_ms))
    driver.end()
    return turns_ms


def judge(num_rows: int, state: str, turns_ms: dict[str, list[float]]) -> tuple[int, str, float, bool]:
    """Rows, state, the ratio of the medians to the idle one, and whether it is within the limit."""
    ratio = statistics.median(turns_ms[state]) / statistics.median(turns_ms[IDLE])
    return num_rows, state, ratio, ratio <= LIMITS[state]


def show(
    console: Console,
    turns: dict[int, dict[str, list[float]]],
    outcomes: Sequence[tuple[int, str, float, bool]],
    num_cores: int,
) -> None:
    table = Table(title=f"{machine()['cpu']}, {num_cores} cores; ms of a step, medians over the turns")
    for heading in ("rows", "busy neighbours", "ms", "least", "most", "ratio", "limit", "verdict"):
        table.add_column(heading, justify="left" if heading in ("busy neighbours", "verdict") else "right")
    ratios = {(num_rows, state): (ratio, is_met) for num_rows, state, ratio, is_met in outcomes}
    for num_rows, of_rows in turns.items():
        for state, turns_ms in of_rows.items():
            figures = (statistics.median(turns_ms), min(turns_ms), max(turns_ms))
            cells = [str(num_rows), state, *(f"{value:.1f}" for value in figures)]
            if state in LIMITS:
                ratio, is_met = ratios[num_rows, state]
                cells += [f"{ratio:.2f}x", f"{LIMITS[state]:g}x", "met" if is_met else "MISSED"]
            table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

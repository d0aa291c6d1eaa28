"""How throughput changes with the number of adapters: `python -m benchmarks.serving.growth --help`.

Three curves of tokens/s in one chart, of the same requests: over the adapters that are registered (small ones beside
those in use), over those resident in the worker's memory (small ones beside those in use), and over those in use at
once. A server is started for every number of registered adapters, since its store is filled while it does not run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from motet import Client
from rich.console import Console
from rich.table import Table

from benchmarks.serving.checkpoints import SHAPES, describe, make_adapters, make_base, make_small_adapter
from benchmarks.serving.measure import Record, drive, summarise
from benchmarks.serving.registered import fill_store, small_name
from benchmarks.serving.report import machine, write_json
from benchmarks.serving.run import NUM_MARKS, register, renewed, warm_up
from benchmarks.serving.workloads import Job, offline
from benchmarks.system import ROOT, StartFailed, System

REGISTERED, RESIDENT, ACTIVE = "registered", "resident", "active"
START_TIMEOUT_S = 900.0  # with 100 000 adapters the server reads 300 000 files
ARENA_BYTES, NUM_SLOTS = 1536 << 20, 256
SEED = 42


@dataclass(frozen=True)
class Point:
    """One place on one curve."""

    curve: str
    count: int  # adapters
    tokens_per_s: float  # the median
    runs: list[float]
    start_s: float  # until its control plane was ready


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.growth",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = out.add_argument
    add("--model-shape", choices=sorted(SHAPES), default="205m", help="random Llama to serve")
    add("--registered", default="10,100,1000,10000,100000", help="small adapters in the store, counts; empty: none")
    add("--resident", default="16,64,256,1024", help="adapters in the worker's memory, counts; empty: none")
    add("--active", default="0,1,2,4,8,16,32,64", help="adapters that the requests take in turn, counts; empty: none")
    add("--in-use", type=int, default=16, help="adapters of the requests on the other two curves, a count")
    add("--requests", type=int, default=64, help="requests of one run, all at once, a count")
    add("--prompt-tokens", type=int, default=128, help="prompt length, tokens")
    add("--output-tokens", type=int, default=64, help="tokens to generate per request")
    add("--repeats", type=int, default=3, help=f"runs of every point, at most {NUM_MARKS}")
    add("--threads", type=int, default=os.cpu_count() or 1, help="compute threads, a count")
    add("--work-dir", type=Path, help="where the servers' data goes meanwhile (default: the system's for such files)")
    add("--cache", type=Path, default=ROOT / ".motet" / "bench", help="where checkpoints and adapters are kept")
    add("--out", type=Path, help="write the report here as JSON, and a chart beside it as PNG")
    return out


def counts(text: str) -> list[int]:
    """The numbers of a list with commas, ascending."""
    return sorted(int(count) for count in text.split(",") if count)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    if args.out and importlib.util.find_spec("matplotlib") is None:
        console.print("--out draws a chart, and matplotlib is not there: make setup-bench, or leave --out out")
        return 2
    if not 1 <= args.repeats <= NUM_MARKS:
        console.print(f"--repeats: {args.repeats} is not in 1..{NUM_MARKS}: every one needs prompts of its own")
        return 2
    try:
        points = measure_all(args, console)
    except StartFailed as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    show(console, points, args)
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items()}
        head = {"machine": machine(), "settings": settings, "model": describe(args.model_shape)}
        write_json(args.out, {**head, "points": [asdict(point) for point in points]})
        draw(args.out.with_suffix(".png"), points, args)
        console.print(f"written: {args.out} and {args.out.with_suffix('.png')}")
    return 0


def measure_all(args: argparse.Namespace, console: Console) -> list[Point]:
    """The points of all curves, on servers of their own."""
    registered, resident, active = counts(args.registered), counts(args.resident), counts(args.active)
    model_dir = make_base(args.model_shape, args.cache)
    in_use = make_adapters(args.model_shape, max([args.in_use, *active]), args.cache)
    points: list[Point] = []

    def serve(num_small: int, num_slots: int, num_stored: int = 0) -> Server:
        """One whose store has so many small adapters, of which num_stored were there before."""
        small = make_small_adapter(args.model_shape, args.cache)
        fill_store(work_dir / "data" / "store", model_dir, small, num_stored, num_small)
        console.print(f"starting a server with {num_small} small adapters")
        return Server(args, model_dir, work_dir, num_slots, in_use)

    with ExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-bench-", dir=args.work_dir)))
        for before, count in zip([0, *registered], registered, strict=False):
            with serve(count, NUM_SLOTS, before) as server:
                points.append(server.measure(REGISTERED, count, args.in_use))
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-bench-", dir=args.work_dir)))
        if active:
            with serve(0, NUM_SLOTS) as server:
                points += [server.measure(ACTIVE, count, count) for count in active]
        if resident:
            with serve(max(resident), max(resident)) as server:
                points += [server.measure_resident(count) for count in resident]
    return points


class Server:
    """A running system and the adapters of the requests. A context manager."""

    def __init__(
        self, args: argparse.Namespace, model_dir: Path, work_dir: Path, num_slots: int, adapter_dirs: Sequence[Path]
    ) -> None:
        self._args = args
        self._adapter_dirs = adapter_dirs
        self._worker_flags = ["--threads", str(args.threads), "--num-slots", str(num_slots)]
        self._worker_flags += ["--arena-bytes", str(ARENA_BYTES)]
        flags = ["--max-streams-per-connection", "4096", "--log-level", "warning"]
        self._system = System(model_dir, work_dir, control_flags=flags, timeout_s=START_TIMEOUT_S)
        self._num_runs = 0

    def __enter__(self) -> Self:
        began_s = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(self._system)
            self._start_s = time.monotonic() - began_s
            self._system.start_worker(flags=self._worker_flags)
            self._names = register(self._system.address, self._adapter_dirs)
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._system.stop()

    def measure(self, curve: str, count: int, num_in_use: int) -> Point:
        """The requests over so many adapters."""
        args = self._args
        vocab_size = SHAPES[args.model_shape].vocab_size
        jobs = offline(args.requests, args.prompt_tokens, args.output_tokens, num_in_use, vocab_size, SEED)
        self._drive(warm_up(jobs))
        runs = []
        for _ in range(args.repeats):
            mark = divmod(self._num_runs, NUM_MARKS)
            self._num_runs += 1
            runs.append(summarise(self._drive(renewed(jobs, *mark)))["output_tokens_per_s"])
        return Point(curve, count, statistics.median(runs), runs, self._start_s)

    def measure_resident(self, count: int) -> Point:
        """The requests over the adapters in use, while so many are in the worker's memory."""
        names = [*self._names[: self._args.in_use], *map(small_name, range(count - self._args.in_use))]
        jobs = [Job((1,), 1, index) for index in range(len(names))]
        asyncio.run(drive(self._system.address, jobs, names, lambda _: None))
        point = self.measure(RESIDENT, count, self._args.in_use)
        with Client(self._system.address) as client:
            num_loaded = client.status().workers[0].num_adapters_loaded
        assert num_loaded == count, f"{num_loaded} adapters are resident, {count} are to be"
        return point

    def _drive(self, jobs: list[Job]) -> list[Record]:
        return asyncio.run(drive(self._system.address, jobs, self._names, lambda _: None))


def show(console: Console, points: Sequence[Point], args: argparse.Namespace) -> None:
    here = machine()
    title = f"{here['cpu']}, {args.threads} threads; {args.requests} requests, medians of {args.repeats}"
    table = Table(title=title)
    for heading in ("curve", "adapters", "tokens/s", "least", "most", "server's start, s"):
        table.add_column(heading, justify="left" if heading == "curve" else "right")
    for point in points:
        figures = (point.tokens_per_s, min(point.runs), max(point.runs))
        table.add_row(point.curve, str(point.count), *(f"{one:.0f}" for one in figures), f"{point.start_s:.1f}")
    console.print(table)


def draw(path: Path, points: Sequence[Point], args: argparse.Namespace) -> None:
    """The three curves over the number of adapters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    labels = {
        REGISTERED: f"registered, {args.in_use} in use",
        RESIDENT: f"resident, {args.in_use} in use",
        ACTIVE: "in use at once",
    }
    for curve, label in labels.items():
        of_curve = [point for point in points if point.curve == curve]
        axis.plot([one.count for one in of_curve], [one.tokens_per_s for one in of_curve], "o-", label=label)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("adapters")
    axis.set_ylabel("output tokens/s")
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())

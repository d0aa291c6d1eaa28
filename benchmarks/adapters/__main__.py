"""What adapters cost on their way into memory and out of it: `python -m benchmarks.adapters --help`.

    python -m benchmarks.adapters first-token    by size and tier, beside adapters that are in the arena
    python -m benchmarks.adapters zipf           200 adapters over room for 16, and the steps meanwhile
    python -m benchmarks.adapters pushes         versions per second from training runs
    python -m benchmarks.adapters memory         1,000 adapters for ten minutes

Each starts a system of its own with one worker, and prints a table with the CPU. `zipf` exits with 1 where a step was
stalled, `memory` where a process grows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.adapters import first_token, memory, pushes, zipf
from benchmarks.serving.checkpoints import SHAPES
from benchmarks.serving.report import machine, write_json
from benchmarks.system import ROOT


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.adapters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = out.add_subparsers(dest="command", required=True)
    _add_first_token(commands.add_parser("first-token", help="by size and tier"))
    _add_zipf(commands.add_parser("zipf", help="many adapters over room for few"))
    _add_pushes(commands.add_parser("pushes", help="versions per second"))
    _add_memory(commands.add_parser("memory", help="growth of every process"))
    for command in commands.choices.values():
        command.formatter_class = argparse.ArgumentDefaultsHelpFormatter
        command.add_argument("--cache", type=Path, default=ROOT / ".motet" / "bench", help="where models are kept")
        command.add_argument("--work-dir", type=Path, help="where the server's data goes (default: the system's)")
        command.add_argument("--out", type=Path, help="write the report here as JSON")
    return out


def _add_first_token(out: argparse.ArgumentParser) -> None:
    out.add_argument("--model-shape", choices=sorted(SHAPES), default="205m", help="random Llama to serve")
    out.add_argument("--ranks", default="2,8,32,128", help="of the adapters; 205m: 0.6 MB each rank")
    out.add_argument("--repeats", type=int, default=7, help="requests of each size and tier")


def _add_zipf(out: argparse.ArgumentParser) -> None:
    out.add_argument("--model-shape", choices=sorted(SHAPES), default="205m", help="random Llama to serve")
    out.add_argument("--adapters", type=int, default=200)
    out.add_argument("--room", type=int, default=16, help="slots of the arena")
    out.add_argument("--rank", type=int, default=8)
    out.add_argument("--requests", type=int, default=300)
    out.add_argument("--concurrency", type=int, default=8, help="requests at a time; at most as many as there is room")
    out.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    out.add_argument("--host-cache-bytes", default="320MiB", help="the default holds a third of the adapters")


def _add_pushes(out: argparse.ArgumentParser) -> None:
    out.add_argument("--layers", type=int, default=9, help="of the model; 69 kB for each rank in float32")
    out.add_argument("--ranks", default="2,32", help="of the adapters")
    out.add_argument("--trainers", default="1,4", help="that push at once, counts")
    out.add_argument("--seconds", type=float, default=6.0, help="of each")


def _add_memory(out: argparse.ArgumentParser) -> None:
    out.add_argument("--model-shape", choices=sorted(SHAPES), default="tiny", help="random Llama to serve")
    out.add_argument("--adapters", type=int, default=1000)
    out.add_argument("--room", type=int, default=16, help="slots of the arena")
    out.add_argument("--rank", type=int, default=8)
    out.add_argument("--seconds", type=float, default=600.0, help="in all")
    out.add_argument("--warm-up-s", type=float, default=120.0, help="of these without samples")
    out.add_argument("--concurrency", type=int, default=8, help="requests at a time")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory(dir=args.work_dir, prefix="motet-bench-") as directory:
        status, results = _COMMANDS[args.command](args, Path(directory), console)
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items()}
        write_json(args.out, {"machine": machine(), "settings": settings, "results": results})
    return status


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _first_token(args: argparse.Namespace, work_dir: Path, console: Console) -> tuple[int, list[object]]:
    found = first_token.measure(args.model_shape, args.cache, work_dir, ranks=_counts(args.ranks), repeats=args.repeats)
    console.print(first_token.table(found))
    return 0, [asdict(one) for one in found]


def _zipf(args: argparse.Namespace, work_dir: Path, console: Console) -> tuple[int, list[object]]:
    runs = zipf.measure(
        args.model_shape,
        args.cache,
        work_dir,
        num_adapters=args.adapters,
        room=args.room,
        rank=args.rank,
        num_requests=args.requests,
        concurrency=args.concurrency,
        exponent=args.exponent,
        host_cache_bytes=args.host_cache_bytes,
    )
    console.print(zipf.table(runs))
    return int(runs[-1].num_stalled(zipf.limit_ms(runs)) > 0), [asdict(run) for run in runs]


def _pushes(args: argparse.Namespace, work_dir: Path, console: Console) -> tuple[int, list[object]]:
    found = pushes.measure(
        work_dir,
        num_layers=args.layers,
        ranks=_counts(args.ranks),
        trainers=_counts(args.trainers),
        seconds=args.seconds,
    )
    console.print(pushes.table(found))
    return 0, [asdict(one) for one in found]


def _memory(args: argparse.Namespace, work_dir: Path, console: Console) -> tuple[int, list[object]]:
    found = memory.measure(
        args.model_shape,
        args.cache,
        work_dir,
        num_adapters=args.adapters,
        room=args.room,
        rank=args.rank,
        seconds=args.seconds,
        warm_up_s=args.warm_up_s,
        concurrency=args.concurrency,
    )
    console.print(memory.table(found))
    return int(not all(process.is_flat for process in found.processes)), [asdict(found)]


_COMMANDS = {"first-token": _first_token, "zipf": _zipf, "pushes": _pushes, "memory": _memory}


if __name__ == "__main__":
    sys.exit(main())

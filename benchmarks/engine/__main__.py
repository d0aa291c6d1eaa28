"""Splits a step of the engine into its parts, each beside its bound: `python -m benchmarks.engine --help`.

Builds the engine in this process, without a server, and drives it with step plans: decodes of some numbers of rows and
adapters, and prefills. Where nothing native runs (--native-code off), a step is one part.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.engine import report
from benchmarks.engine.bounds import Work, bounds_ms, measure_rates
from benchmarks.engine.driver import Driver, load_adapters, make_engine
from benchmarks.engine.report import Measured
from benchmarks.engine.split import measure
from benchmarks.serving.checkpoints import RANKS, SHAPES, describe, make_adapters, make_base
from benchmarks.serving.report import machine, write_json
from benchmarks.system import ROOT

ARENA_BYTES = 2 << 30


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = out.add_argument
    add("--model-shape", choices=sorted(SHAPES), default="205m", help="random Llama to run")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the checkpoint (default: the shape's)")
    add("--rows", default="1,8,32,64,128", help="rows that decode, counts separated by commas")
    add("--adapters", default="0,1,16,64", help="adapters that the rows take in turn, counts; more than rows: left out")
    add("--prefill-tokens", default="512,1024", help="prompts that a step computes, tokens; empty: none")
    add("--context", type=int, default=160, help="tokens of context of a row that decodes")
    add("--steps", type=int, default=10, help="steps of each kind whose median is printed, a count")
    add("--threads", type=int, default=os.cpu_count() or 1, help="compute threads, a count")
    add("--native-code", choices=("on", "off"), default="on", help="as the worker's flag")
    add("--cache", type=Path, default=ROOT / ".motet" / "bench", help="where checkpoints and adapters are kept")
    add("--out", type=Path, help="write the report here as JSON, and a chart beside it as PNG")
    return out


def counts(text: str) -> list[int]:
    """The numbers of a list with commas."""
    return [int(count) for count in text.split(",") if count]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 150)
    if args.out and importlib.util.find_spec("matplotlib") is None:
        console.print("--out draws a chart, and matplotlib is not there: make setup-bench, or leave --out out")
        return 2
    rows, adapters = counts(args.rows), counts(args.adapters)
    console.print(f"making the checkpoint ({args.model_shape}) and its adapters where they are missing")
    model_dir = make_base(args.model_shape, args.cache, args.dtype)
    adapter_dirs = make_adapters(args.model_shape, min(max(adapters), max(rows)), args.cache)
    engine = make_engine(
        model_dir,
        threads=args.threads,
        max_rows=max(rows),
        tokens_per_row=args.context + 2 * args.steps + 16,
        arena_bytes=ARENA_BYTES if adapter_dirs else 0,
        native_code=args.native_code,
    )
    load_adapters(engine, model_dir, adapter_dirs)
    dtype = getattr(torch, engine.capacities.dtype)
    rates = measure_rates(dtype)
    steps = measure_steps(Driver(engine), rows, adapters, args)
    # Again after the steps: another process may have had the cores the first time.
    rates = rates.best(measure_rates(dtype))
    bounds = [bounds_ms(SHAPES[args.model_shape], dtype.itemsize, step.work, rates) for step in steps]
    report.show(console, rates, steps, bounds)
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items()}
        head = {"machine": machine(), "settings": settings, "model": describe(args.model_shape)}
        write_json(args.out, {**head, **report.to_json(rates, steps, bounds)})
        report.draw(args.out.with_suffix(".png"), steps, bounds)
        console.print(f"written: {args.out} and {args.out.with_suffix('.png')}")
    return 0


def measure_steps(
    driver: Driver, rows: Sequence[int], adapters: Sequence[int], args: argparse.Namespace
) -> list[Measured]:
    """Decodes of every number of rows over every number of adapters, then the prefills."""
    decodes = [(r, a) for r in rows for a in adapters if a <= r]
    prefills = [(tokens, a) for tokens in counts(args.prefill_tokens) for a in adapters if a <= 1]
    kinds = [("decode", *pair) for pair in decodes] + [("prefill", *pair) for pair in prefills]
    measured = []
    for kind, size, num_adapters in track(kinds, description="steps", console=Console(stderr=True)):
        one = measure_decode if kind == "decode" else measure_prefill
        measured.append(one(driver, size, num_adapters, args))
    return measured


def measure_decode(driver: Driver, num_rows: int, num_adapters: int, args: argparse.Namespace) -> Measured:
    """Steps in which so many rows decode."""
    driver.begin_decodes(num_rows, num_adapters, num_context=args.context, num_steps=2 * args.steps + 2)
    split = measure(driver.decode, args.steps)
    driver.end()
    keys = num_rows * (args.context + 2 + args.steps)  # of the step in the middle
    lora_rows = [len(range(slot, num_rows, num_adapters)) for slot in range(num_adapters)]
    work = Work(num_rows, num_rows, keys, keys, ranks_of(num_adapters), lora_rows)
    name = f"{num_rows} rows, {num_adapters} adapters"
    return Measured(name, split, work)


def measure_prefill(driver: Driver, num_tokens: int, num_adapters: int, args: argparse.Namespace) -> Measured:
    """Steps that compute a prompt of so many tokens."""
    is_begun = False

    def end() -> None:
        nonlocal is_begun
        if is_begun:
            driver.end()
        is_begun = True

    split = measure(lambda: driver.prefill(num_tokens, num_adapters), max(args.steps // 2, 1), before=end)
    driver.end()
    scores = num_tokens * (num_tokens + 1) // 2
    work = Work(num_tokens, 1, num_tokens, scores, ranks_of(num_adapters), [num_tokens] * num_adapters)
    name = f"prefill {num_tokens}, {num_adapters} adapters"
    return Measured(name, split, work)


def ranks_of(num_adapters: int) -> list[int]:
    """Ranks of the adapters that make_adapters makes."""
    return [RANKS[index % len(RANKS)] for index in range(num_adapters)]


if __name__ == "__main__":
    sys.exit(main())

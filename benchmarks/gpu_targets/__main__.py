"""Measures targets for one GPU beside those of `benchmarks.engine.step_times`.

    python -m benchmarks.gpu_targets [--device cuda|cpu] [--shape 8b|tiny] [--only base,loads,eager,peers,served]

Weights are random and made on the device. Each line is printed as soon as it is known, and no part begins after
--limit-s: the exit status is 75 then. "base": rows without adapters beside an engine without them. "loads": steps while
adapters are loaded. "eager": steps without graphs, and mixed ones. "peers": transformers' continuous batching, and
PEFT's mixed batch. "served": the whole system over gRPC.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.engine.driver import Driver
from benchmarks.engine.step_times import BLOCK_SIZE, INCOMPLETE, RANK
from benchmarks.gpu_targets import base_only, host_part, loads, peers, served
from benchmarks.gpu_targets.engines import TOKEN_BUDGET, PackedVariants, Setup, blocks_of, free_memory
from benchmarks.serving.checkpoints import SHAPES
from data_plane.config import WorkerConfig
from data_plane.worker import host_tier, settle

PARTS = ("base", "loads", "eager", "peers", "served")
IN_ENGINE = ("base", "loads", "eager", "peers")  # parts that share an engine
NUM_EAGER_ADAPTERS = 8
NUM_PINNED = 16  # adapters that the pinned memory of part loads holds


class Parts:
    """Runs the parts that are wanted, while there is time. A part that fails leaves the others theirs."""

    def __init__(self, wanted: Sequence[str], limit_s: float | None) -> None:
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self._wanted = wanted
        self._limit_s = limit_s
        self._began_s = time.monotonic()

    def run(self, part: str, measure: Callable[[], None]) -> None:
        """Run it, unless it is not wanted or would begin too late."""
        seconds = time.monotonic() - self._began_s
        if part not in self._wanted:
            return
        if self._limit_s is not None and seconds > self._limit_s:
            self.left_out.append(part)
            return
        print(f"[{seconds:.1f} s] {part}", flush=True)
        try:
            measure()
        except Exception:
            print(f"  {part} failed:\n{traceback.format_exc()}", flush=True)
            self.failed.append(part)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    parts = Parts(options.only, options.limit_s)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, CPU"
    dtype = SHAPES[options.shape].dtype
    print(f"{where}, torch {torch.__version__}, {options.shape} {dtype}", flush=True)
    with tempfile.TemporaryDirectory(prefix="motet-targets-", dir=options.folder) as folder:
        setup = Setup(
            device=torch.device(options.device),
            shape=options.shape,
            dtype=dtype,
            folder=Path(folder),
            num_rows=options.rows,
            context=options.context,
            num_steps=options.steps,
        )
        setup.make_checkpoint()
        if any(part in options.only for part in IN_ENGINE):
            measure_engine(setup, options, parts)
            free_memory(setup.device)
        parts.run("served", lambda: served.measure(setup, options.served_tokens))
    if parts.left_out:
        print(f"incomplete: {', '.join(parts.left_out)} would have begun after {options.limit_s:g} s")
    if parts.failed:
        print(f"failed: {', '.join(parts.failed)}")
        return 1
    return INCOMPLETE if parts.left_out else 0


@contextmanager
def settled() -> Iterator[None]:
    """As a worker is when it serves."""
    interval_s = sys.getswitchinterval()
    settle()
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.unfreeze()


def measure_engine(setup: Setup, options: argparse.Namespace, parts: Parts) -> None:
    """The parts that need one engine with adapters in its arena."""
    num_steps = max(base_only.num_steps(setup), loads.NUM_STEPS, host_part.MOST_STEPS)
    tokens_per_row = setup.context + num_steps + 2 * BLOCK_SIZE
    num_blocks = blocks_of(setup.num_rows, tokens_per_row) + blocks_of(1, host_part.PROMPT_TOKENS + 2)
    base_rows = sorted({1, setup.num_rows, options.most_rows})
    num_adapters = max(min(options.adapters, setup.num_rows), peers.NUM_ADAPTERS)

    def make_driver(num_adapters: int) -> Driver:
        engine = setup.make_engine(
            num_adapters=num_adapters,
            num_blocks=num_blocks,
            max_rows=max(base_rows) + 1,
            max_model_len=max(tokens_per_row, host_part.PROMPT_TOKENS + 2 * BLOCK_SIZE),
            token_budget=TOKEN_BUDGET,
            graph_rows=base_rows if "base" in options.only else [1, setup.num_rows],
        )
        return Driver(engine)

    driver = make_driver(num_adapters + options.loads)
    for slot in range(num_adapters):
        driver.engine.arena.load_zeros(slot, 1, RANK, is_trained=True)

    def measure_base() -> None:
        base_only.measure(setup, driver, make_driver(0), base_rows, setup.num_rows * tokens_per_row)

    def measure_eager() -> None:
        with settled():
            host_part.measure(setup, driver, min(NUM_EAGER_ADAPTERS, num_adapters))

    def measure_loads() -> None:
        variants = PackedVariants(setup, options.loads)
        config = WorkerConfig(
            control_plane="127.0.0.1:1",
            model_dir=setup.model_dir,
            device=setup.device.type,
            pinned_bytes=variants.size_bytes * min(options.loads, NUM_PINNED) * 5 // 4,
        )
        tier = host_tier(config)
        assert tier is not None, "there are pinned bytes"
        print(f"loads of adapters of {variants.size_bytes / 1e6:.1f} MB beside {setup.num_rows} rows", flush=True)
        with settled():
            loads.Loads(setup, driver, num_adapters, options.loads).measure(variants, tier)

    parts.run("base", measure_base)
    free_memory(setup.device)
    parts.run("loads", measure_loads)
    parts.run("peers", lambda: peers.measure(setup, driver, options.peer_prompt, options.peer_tokens))
    parts.run("eager", measure_eager)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def parts(text: str) -> list[str]:
        if unknown := [part for part in text.split(",") if part not in PARTS]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such part; parts are {', '.join(PARTS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(prog="benchmarks.gpu_targets", description="Measure targets for one GPU.")
    is_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if is_gpu else "cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b" if is_gpu else "tiny")
    parser.add_argument("--only", type=parts, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rows", type=int, default=64, help="rows that decode")
    parser.add_argument("--most-rows", type=int, default=256, help="rows of the largest step of part base")
    parser.add_argument("--adapters", type=int, default=64, help="adapters that the rows of part loads take in turn")
    parser.add_argument("--loads", type=int, default=64, help="adapters that are loaded meanwhile")
    parser.add_argument("--context", type=int, default=1024, help="tokens of context of each row")
    parser.add_argument("--steps", type=int, default=20, help="steps of one run")
    parser.add_argument("--peer-prompt", type=int, default=128, help="tokens of each prompt of part peers")
    parser.add_argument("--peer-tokens", type=int, default=64, help="tokens that part peers generates of each")
    parser.add_argument("--served-tokens", type=int, default=128, help="tokens that part served generates of each")
    parser.add_argument("--limit-s", type=float, help="begin no part later than so many seconds after the start")
    parser.add_argument("--folder", type=Path, help="where files are written; default: the system's")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

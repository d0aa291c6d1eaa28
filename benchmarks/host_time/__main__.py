"""Measures what an eager step and each launch cost the host, on a machine without a GPU.

    python -m benchmarks.host_time [--layers 32] [--rows 1,64] [--adapters 0,8] [--prompt 256]

A Llama with the launches of an 8B one, but narrow, runs on a hollow GPU (hollow_gpu.py). Times are CPU time of the
thread that queues steps. "triton": launches are bound by Triton itself; "quick": by kernels.triton_launch, those of
layers are prepared. What is left out is the driver's part of a launch, and the host's part of matrix products, which
return memory that nobody filled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
import triton
from triton.runtime.jit import KernelInterface

from benchmarks.engine.driver import Driver
from benchmarks.engine.random_model import random_weights
from benchmarks.host_time.hollow_gpu import hollow_gpu
from benchmarks.serving.checkpoints import ModelShape, llama_config
from data_plane.config import WorkerConfig
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from kernels.linear.choice import Form
from kernels.triton_launch import QuickKernel, by_name, forget_prepared
from tests.data_plane.engine.device.launch_traces import TRITON_BRANCHES

NUM_STEPS = 20  # of each combination; the table has the least and the median
NUM_LAUNCHES = 100  # of each kernel, twenty times
CONTEXT = 1024  # tokens of each row
# How a launch is bound, and how it is prepared.
WAYS: dict[str, tuple[Any, Any]] = {
    "triton": (KernelInterface.__getitem__, by_name),
    "quick": (QuickKernel.__getitem__, QuickKernel.prepare),
}


def product(x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None = None) -> torch.Tensor:
    """In the place of a matrix product."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def looked_up(ids: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """In the place of an embedding: ids that no kernel computed are not token ids."""
    return weight.new_empty(*ids.shape, weight.shape[1])


@contextmanager
def launching(way: tuple[Any, Any]) -> Iterator[None]:
    """Kernels are launched in this way."""
    with patch.object(QuickKernel, "__getitem__", way[0]), patch.object(QuickKernel, "prepare", way[1]):
        forget_prepared()
        yield
    forget_prepared()


@contextmanager
def branches_of_a_gpu() -> Iterator[None]:
    """Layers launch Triton kernels; what torch would compute on the GPU does nothing."""
    with ExitStack() as stack:
        for branch in TRITON_BRANCHES:
            stack.enter_context(patch(branch, lambda _tensor: True))
        stack.enter_context(patch("torch.nn.functional.linear", product))
        stack.enter_context(patch("torch.nn.functional.embedding", looked_up))
        # Of positions that no kernel wrote, these take longer than all else.
        stack.enter_context(patch("torch.Tensor.cos", lambda tensor: tensor.new_empty(tensor.shape)))
        stack.enter_context(patch("torch.Tensor.sin", lambda tensor: tensor.new_empty(tensor.shape)))
        yield


def make_driver(folder: Path, options: argparse.Namespace) -> Driver:
    """Of an engine on the CPU whose layers, weights and steps are those of a GPU."""
    shape = ModelShape(512, options.layers, 4, 2, 1792, 2048, "bfloat16", 8192)
    llama_config(shape).save_pretrained(folder)
    tokens_per_row = CONTEXT + 4 * NUM_STEPS
    config = WorkerConfig(
        control_plane="127.0.0.1:1",
        model_dir=folder,
        worker_id="benchmark",
        device="cpu",
        dtype="bfloat16",
        num_blocks=max(options.rows) * (tokens_per_row // 16 + 2) + options.prompt,
        max_rows=max(options.rows),
        token_budget=max(1024, options.prompt),
        num_slots=256,
        arena_bytes=max(options.adapters) * options.layers * (1 << 19) + (1 << 20),
        max_model_len=max(tokens_per_row, options.prompt + 1),
        native_code="off",
    )
    with ExitStack() as stack:
        stack.enter_context(patch(TRITON_BRANCHES[-1], lambda _tensor: True))
        for choice in ("fastest_form", "fastest_unpacked_form"):
            stack.enter_context(patch(f"data_plane.layers.packed_weight.{choice}", lambda *_: Form.PLAIN))
        plain = build_engine(config, read_weights=random_weights(torch.device("cpu")))
        engine = TorchEngine(plain.model, plain.kv_cache, plain.arena, plain.capacities, decodes_on_device=True)
    for slot in range(max(options.adapters)):
        engine.arena.load_zeros(slot, 1, 16, is_trained=True)
    return Driver(engine, is_checked=False)


def step_times_us(step: Callable[[], None]) -> tuple[float, float]:
    """The least and the median CPU time of a step, once everything is compiled."""
    for _ in range(3):
        step()
    times = []
    for _ in range(NUM_STEPS):
        began_s = time.thread_time()
        step()
        times.append((time.thread_time() - began_s) * 1e6)
    return min(times), statistics.median(times)


def print_steps(name: str, step: Callable[[], None], count: Callable[[], int], options: argparse.Namespace) -> None:
    """A line for each way of launching."""
    for kind, way in WAYS.items():
        with launching(way):
            least, median = step_times_us(step)
            before = count()
            step()
        launches = count() - before
        print(
            f"{name:<28} {kind:<7} {launches:>8} {least / 1000:>9.2f} {median / 1000:>9.2f} {least / launches:>10.1f} "
            f"{least / options.layers:>9.1f}",
            flush=True,
        )


def print_launches(driver: Driver) -> None:
    """Times of a launch of each kernel of a step, by both ways and prepared."""
    noted: dict[str, tuple[Any, ...]] = {}

    def note(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            noted[kernel.__name__] = (kernel, grid, positional, named)
            WAYS["quick"][0](kernel, grid)(*positional, **named)

        return launch

    with launching((note, by_name)):
        driver.decode()
    print(f"{'us of a launch':<28} {'parameters':>10} {'triton':>8} {'quick':>8} {'prepared':>8}")
    for name, (kernel, grid, positional, named) in sorted(noted.items()):
        arguments = dict(zip(kernel.arg_names, positional, strict=False)) | named
        pointers = [arguments.pop(key) for key in kernel.arg_names if isinstance(arguments.get(key), torch.Tensor)]
        calls = [partial(way[0](kernel, grid), *positional, **named) for way in WAYS.values()]
        calls.append(partial(kernel.prepare(grid, arguments), *pointers))
        found = []
        for call in calls:
            best_s = float("inf")
            for _ in range(20):
                began_s = time.thread_time()
                for _ in range(NUM_LAUNCHES):
                    call()
                best_s = min(best_s, (time.thread_time() - began_s) / NUM_LAUNCHES)
            found.append(f"{best_s * 1e6:>8.1f}")
        print(f"{name:<28} {len(kernel.arg_names):>10} {' '.join(found)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(f"torch {torch.__version__}, triton {triton.__version__}, Python {sys.version.split()[0]}, no GPU")
    with tempfile.TemporaryDirectory(prefix="motet-host-time-") as name, hollow_gpu(Path(name)) as count:
        driver = make_driver(Path(name) / "model", options)
        torch.set_num_threads(1)  # building an engine sets it: what a second thread does is not host time of a GPU
        with branches_of_a_gpu():
            print(
                f"{'eager step':<28} {'bound':<7} {'launches':>8} {'least ms':>9} {'median ms':>9} {'us/launch':>10} "
                f"{'us/layer':>9}"
            )
            for num_adapters in options.adapters:
                for num_rows in options.rows:
                    driver.begin_decodes(num_rows, num_adapters, num_context=CONTEXT, num_steps=3 * NUM_STEPS)
                    what = f"{num_rows} rows, {num_adapters} adapters"
                    print_steps(what, driver.decode, count, options)
                    is_last = (num_adapters, num_rows) == (options.adapters[-1], options.rows[-1])
                    if is_last and not options.steps_only:
                        print_launches(driver)
                    driver.end()

                def prompt(num_adapters: int = num_adapters) -> None:
                    driver.prefill(options.prompt, num_adapters)
                    driver.end()

                if options.prompt:
                    print_steps(f"prompt, {num_adapters} adapters", prompt, count, options)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="benchmarks.host_time", description="Measure the host's part of a step.")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=counts, default=[1, 64], help="counts, with commas between them")
    parser.add_argument("--adapters", type=counts, default=[0, 8], help="counts that the rows take in turn")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a step that computes a prompt; 0: none")
    parser.add_argument("--steps-only", action="store_true", help="leave out the table of launches")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

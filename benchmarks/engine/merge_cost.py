"""What a merge into served weights would take, beside what one adapter adds to a step.

    python -m benchmarks.engine.merge_cost

Merges an adapter into the checkpoint's weights in memory, with the arithmetic of `motet convert merge`, and takes it
out again by subtraction: time, bytes, and values that do not come back. The layout of a CPU's kernels, which a merge
would have to write anew, is not counted. Decode steps without and with the adapter follow in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine.driver import Driver, load_adapters, make_engine
from benchmarks.serving.checkpoints import SHAPES, make_adapters, make_base
from benchmarks.system import ROOT
from control_plane.registry.model.served_modules import NOTHING_REPORTED
from control_plane.registry.packing.directory import pack_directory
from data_plane.merging.packed_files import PackedFiles
from data_plane.merging.weights import merge_matrix
from data_plane.models.checkpoint.shards import shards_of

ADAPTER = 1  # the second that make_adapters makes: rank 16
ROWS = (1, 32)
CONTEXT, STEPS, ROUNDS = 160, 10, 5
_SLICE = 1024  # outputs that are float32 at a time


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.engine.merge_cost", description=__doc__)
    parser.add_argument("--model-shape", choices=sorted(SHAPES), default="205m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=ROOT / ".motet" / "bench")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model_dir = make_base(args.model_shape, args.cache)
    adapter = make_adapters(args.model_shape, ADAPTER + 1, args.cache)[ADAPTER]
    measure_merges(model_dir, adapter)
    measure_steps(model_dir, adapter, args.threads)
    return 0


def measure_merges(model_dir: Path, adapter: Path) -> None:
    """Into the weights and out of them, in turns."""
    weights = {tensor.name: shard.read(tensor.name) for shard in shards_of(model_dir) for tensor in shard.tensors}
    with tempfile.TemporaryDirectory() as work:
        pack_directory(adapter, model_dir, Path(work), NOTHING_REPORTED)
        packed = PackedFiles(Path(work))
        parts = {name: packed.module(name) for name in packed.modules}
    before = {name: weights[f"{name}.weight"].clone() for name in parts}
    size = sum(weight.numel() * weight.element_size() for weight in before.values())
    times: list[float] = []
    for _ in range(ROUNDS):
        for sign in (1.0, -1.0):
            began_s = time.perf_counter()
            for name, part in parts.items():
                weight, a, b = weights[f"{name}.weight"], part.tensors["a"], part.tensors["b"]
                for begin in range(0, len(weight), _SLICE):
                    rows = slice(begin, begin + _SLICE)
                    values = weight[rows].float()
                    merge_matrix(values, {"a": a, "b": b[:, rows]}, sign * part.module.scaling)
                    weight[rows] = values.to(weight.dtype)
            times.append(time.perf_counter() - began_s)
        if len(times) == 2:
            differ = sum(int((weights[f"{name}.weight"] != own).sum()) for name, own in before.items())
    num_values = sum(own.numel() for own in before.values())
    print(f"{len(parts)} weights of {size / 1e6:.0f} MB; one merge reads and writes {2 * size / 1e6:.0f} MB")
    print(f"one merge, or its reverse: {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})")
    print(f"values that merging and subtracting leaves changed: {differ} of {num_values}, {differ / num_values:.1%}")


def measure_steps(model_dir: Path, adapter: Path, threads: int) -> None:
    """Decode steps without and with the adapter, in turns."""
    room = CONTEXT + (ROUNDS + 1) * STEPS * 2 + 16
    engine = make_engine(
        model_dir,
        threads=threads,
        max_rows=max(ROWS),
        tokens_per_row=room,
        arena_bytes=256 << 20,
        native_code="on",
    )
    load_adapters(engine, model_dir, [adapter])
    driver = Driver(engine)
    for num_rows in ROWS:
        times: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(ROUNDS):
            for num_adapters, found in times.items():
                driver.begin_decodes(num_rows, num_adapters, num_context=CONTEXT, num_steps=2 * STEPS)
                driver.decode_ahead(STEPS)
                began_s = time.perf_counter()
                driver.decode_ahead(STEPS)
                found.append((time.perf_counter() - began_s) / STEPS * 1000)
                driver.end()
        base, with_adapter = (statistics.median(times[count]) for count in (0, 1))
        print(
            f"{num_rows} rows: step {base:.2f} ms without, {with_adapter:.2f} ms with the adapter: "
            f"{with_adapter - base:+.2f} ms, {with_adapter / base:.3f}x"
        )


if __name__ == "__main__":
    raise SystemExit(main())

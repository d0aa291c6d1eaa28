"""Times decode steps against their byte floor, the main table of `make gpu-check`.

    python -m benchmarks.engine.step_times [--device cuda|cpu] [--shape 8b|tiny] [--rows 1,64,256] [--adapters 0,8,64]

Weights are random and made on the device, adapters are of rank 16 on every linear, in an arena of 256 slots: no file
is read. Steps are submitted ahead, as a worker does. The floor is the time in which the machine's copy rate, measured
in the same run, moves what a step reads: weights, the rows' keys and values, and the adapters. Steps are run eager, as
graphs, and as graphs over FP8 weights. Combinations that would begin after --limit-s are left out, and the exit status
is 75 then.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.bounds import linears, lora_width
from benchmarks.engine.driver import Driver
from benchmarks.engine.random_model import random_weights
from benchmarks.kernels.measure import measure_roofline
from benchmarks.serving.checkpoints import SHAPES, ModelShape, llama_config
from contract.fingerprint import FP8_WEIGHTS
from data_plane.config import WorkerConfig
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from kernels.fp8 import fp8_refusal

INCOMPLETE = 75  # exit status where combinations were left out
RANK = 16
NUM_SLOTS = 256
BLOCK_SIZE = 16
NUM_RUNS = 5  # of --steps steps each; the table has the median
# By mode, what a worker has set; all but the first need a GPU. "1 stream": shrinks are queued with everything else.
MODES: dict[str, dict[str, str]] = {
    "eager": {"cuda_graphs": "off"},
    "graphs": {"cuda_graphs": "auto"},
    "1 stream": {"cuda_graphs": "auto", "adapter_stream": "off"},
    "fp8": {"cuda_graphs": "auto", "quantization": FP8_WEIGHTS},
}


@dataclass(frozen=True)
class Row:
    """One combination."""

    mode: str
    rows: int
    adapters: int
    step_ms: float
    floor_ms: float

    def __str__(self) -> str:
        return (
            f"{self.mode:<8} {self.rows:>5} {self.adapters:>9} {self.step_ms:>10.3f} {self.floor_ms:>10.3f} "
            f"{self.step_ms / self.floor_ms:>8.2f}"
        )


HEADER = f"{'mode':<8} {'rows':>5} {'adapters':>9} {'step ms':>10} {'floor ms':>10} {'x floor':>8}"


def step_bytes(
    shape: ModelShape, itemsize: int, *, num_rows: int, num_adapters: int, num_context: int, is_fp8: bool = False
) -> int:
    """What a decode step reads at least, each byte once. is_fp8: the weights of the layers have a byte each."""
    *layers, head = (num_in * num_out for num_in, num_out in linears(shape))
    head_dim = shape.hidden_size // shape.num_heads
    keys_and_values = num_rows * num_context * 2 * shape.num_kv_heads * head_dim * shape.num_layers
    others = itemsize * (head + keys_and_values + adapter_values(shape, min(num_adapters, num_rows)))
    return sum(layers) * (1 if is_fp8 else itemsize) + others


def adapter_values(shape: ModelShape, num_adapters: int) -> int:
    """Elements of so many adapters of RANK on every linear of the layers."""
    return num_adapters * RANK * lora_width(shape) * shape.num_layers


def make_engine(options: argparse.Namespace, mode: str) -> TorchEngine:
    """An engine of random weights with all the adapters that the table needs, in slots from 0 on."""
    shape: ModelShape = SHAPES[options.shape]
    dtype, num_adapters = getattr(torch, options.dtype or shape.dtype), max(options.adapters)
    tokens_per_row = options.context + num_steps(options) + 2 * BLOCK_SIZE
    more: Any = MODES[mode]
    with tempfile.TemporaryDirectory(prefix="motet-steps-") as folder:
        llama_config(shape).save_pretrained(folder)
        config = WorkerConfig(
            control_plane="127.0.0.1:1",
            model_dir=Path(folder),
            worker_id="benchmark",
            device=options.device,
            dtype=str(dtype).removeprefix("torch."),
            num_blocks=max(options.rows) * -(-tokens_per_row // BLOCK_SIZE) + 1,
            block_size=BLOCK_SIZE,
            max_rows=max(options.rows),
            token_budget=max(1024, *options.rows),
            num_slots=NUM_SLOTS,
            # A quarter more than the values: pages are of whole tiles.
            arena_bytes=adapter_values(shape, num_adapters) * dtype.itemsize * 5 // 4 + (1 << 20),
            max_model_len=tokens_per_row,
            **more,
        )
        engine = build_engine(config, read_weights=random_weights(torch.device(options.device)))
    for slot in range(num_adapters):
        engine.arena.load_zeros(slot, 1, RANK, is_trained=True)
    return engine


def modes_of(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The modes that the device and the dtype allow."""
    if device.type != "cuda":
        return ["eager"]
    has_fp8 = dtype == torch.bfloat16 and fp8_refusal(device) is None
    return [mode for mode in MODES if mode != "fp8" or has_fp8]


def num_steps(options: argparse.Namespace) -> int:
    """Steps of one combination, those that warm up included."""
    return (NUM_RUNS + 1) * int(options.steps)


def measure_ms(driver: Driver, num_rows: int, num_adapters: int, options: argparse.Namespace) -> float:
    """Median time of a step."""
    driver.begin_decodes(num_rows, num_adapters, num_context=options.context, num_steps=num_steps(options))
    driver.decode_ahead(options.steps)
    times_ms = []
    for _ in range(NUM_RUNS):
        began_s = time.perf_counter()
        driver.decode_ahead(options.steps)
        times_ms.append((time.perf_counter() - began_s) * 1000 / int(options.steps))
    driver.end()
    return statistics.median(times_ms)


def main(argv: Sequence[str] | None = None) -> int:
    began_s = time.monotonic()
    options = parse(argv)
    device, shape = torch.device(options.device), SHAPES[options.shape]
    dtype = getattr(torch, options.dtype or shape.dtype)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, CPU"
    rate = measure_roofline(device, dtype, repeats=10).bytes_per_s
    print(f"{where}, torch {torch.__version__}, {options.shape} {dtype}, context {options.context}, rank {RANK}")
    print(f"copy rate of this run: {rate / 1e9:.1f} GB/s; {NUM_SLOTS} slots\n{HEADER}", flush=True)
    found, left_out = [], 0
    modes = modes_of(device, dtype)
    for mode in modes:
        driver = Driver(make_engine(options, mode))
        for num_rows in options.rows:
            for num_adapters in options.adapters:
                if options.limit_s is not None and time.monotonic() - began_s > options.limit_s:
                    left_out += 1
                    continue
                num_bytes = step_bytes(
                    shape,
                    dtype.itemsize,
                    num_rows=num_rows,
                    num_adapters=num_adapters,
                    num_context=options.context + num_steps(options) // 2,
                    is_fp8=mode == "fp8",
                )
                step_ms = measure_ms(driver, num_rows, num_adapters, options)
                found.append(Row(mode, num_rows, num_adapters, step_ms, num_bytes / rate * 1000))
                print(found[-1], flush=True)
        # An engine is part of cycles, and two do not fit.
        del driver
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if missing := [mode for mode in MODES if mode not in modes]:
        print(f"{' and '.join(missing)}: left out, not for this device and dtype")
    if left_out:
        print(f"incomplete: {left_out} combinations were left out after {options.limit_s:.0f} s")
    if options.json is not None:
        head = {"device": where, "torch": torch.__version__, "copy_bytes_per_s": rate}
        rows = [asdict(row) for row in found]
        options.json.write_text(json.dumps({**head, "rows": rows, "left_out": left_out}, indent=1) + "\n")
    return INCOMPLETE if left_out else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="benchmarks.engine.step_times", description="Time decode steps.")
    is_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if is_gpu else "cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b" if is_gpu else "tiny")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the shape's")
    parser.add_argument("--rows", type=counts, default=[1, 64, 256], help="counts, with commas between them")
    parser.add_argument("--adapters", type=counts, default=[0, 8, 64], help="counts that the rows take in turn")
    parser.add_argument("--context", type=int, default=1024, help="tokens of context of each row")
    parser.add_argument("--steps", type=int, default=20, help=f"steps of each of the {NUM_RUNS} runs")
    parser.add_argument("--limit-s", type=float, help="begin no combination later than so many seconds after the start")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

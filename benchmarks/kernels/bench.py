"""Times every kernel against the machine's roofline and against torch.

    python -m benchmarks.kernels.bench [--device cuda|cpu] [--op NAME] [--short] [--json FILE]

Prints one line per op and shape: median and spread, bytes that must be moved, flops, achieved rates, the fraction of
the roofline measured in the same run (the larger of bytes / copy rate and flops / product rate, over the time), and
how many times as long each peer takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.measure import Roofline, measure_roofline, time_calls
from benchmarks.kernels.works import Work, works

HEADER = (
    f"{'op':<18} {'shape':<34} {'us':>9} {'+-':>7} {'MB':>8} {'GFLOP':>8} {'GB/s':>7} {'TFLOP/s':>8} "
    f"{'roof':>5}  peers, times ours"
)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    device = torch.device(options.device)
    torch.manual_seed(0)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[options.dtype]
    repeats = options.repeats or (10 if options.short else 30)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, CPU"
    print(f"{where}, torch {torch.__version__}, {options.dtype}, median of {repeats} runs")
    with torch.inference_mode():
        roofline = measure_roofline(device, dtype, repeats=repeats)
        print(
            f"roofline of this run: copy {roofline.bytes_per_s / 1e9:.1f} GB/s, "
            f"product {roofline.flops_per_s / 1e12:.2f} TFLOP/s\n{HEADER}"
        )
        rows = []
        for work in works(device, dtype, is_short=options.short):
            if options.op in (None, work.op):
                rows.append(run(work, device, roofline, repeats))
                print(line(rows[-1]), flush=True)
    if not rows:
        print(f"no op is called {options.op}", file=sys.stderr)
        return 2
    if options.json is not None:
        head = {"device": where, "torch": torch.__version__, "dtype": options.dtype, "repeats": repeats}
        limits = {"bytes_per_s": roofline.bytes_per_s, "flops_per_s": roofline.flops_per_s}
        options.json.write_text(json.dumps({**head, "roofline": limits, "rows": rows}, indent=1) + "\n")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.bench", description="Time the kernels.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--op", help="only this one, such as paged_attention")
    parser.add_argument("--repeats", type=int, help="timed runs of each call (default: 30, short 10)")
    parser.add_argument("--short", action="store_true", help="fewer shapes and runs")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    return parser.parse_args(argv)


def run(work: Work, device: torch.device, roofline: Roofline, repeats: int) -> dict[str, Any]:
    """One row."""
    times = time_calls(work.prepare(), device, repeats=repeats)
    work.calls.clear()  # and with the calls their inputs
    seconds, spread = times.pop("ours")
    least = max(work.num_bytes / roofline.bytes_per_s, work.flops / roofline.flops_per_s)
    return {
        "op": work.op,
        "shape": work.name,
        "seconds": seconds,
        "spread_s": spread,
        "bytes": work.num_bytes,
        "flops": work.flops,
        "bytes_per_s": work.num_bytes / seconds,
        "flops_per_s": work.flops / seconds,
        "of_roofline": least / seconds,
        "peers": {name: peer / seconds for name, (peer, _) in times.items()},
    }


def line(row: dict[str, Any]) -> str:
    peers = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["peers"].items())
    return (
        f"{row['op']:<18} {row['shape']:<34} {row['seconds'] * 1e6:>9.1f} {row['spread_s'] * 1e6:>7.1f} "
        f"{row['bytes'] / 1e6:>8.2f} {row['flops'] / 1e9:>8.2f} {row['bytes_per_s'] / 1e9:>7.1f} "
        f"{row['flops_per_s'] / 1e12:>8.2f} {row['of_roofline']:>5.0%}  {peers}"
    )


if __name__ == "__main__":
    sys.exit(main())

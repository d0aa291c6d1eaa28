"""Times every kernel against the machine's roofline and against torch.

    python -m benchmarks.kernels.bench [--device cuda|cpu] [--op NAME] [--short] [--peer DIR] [--json FILE]

Prints one line per op and shape: median and spread, bytes that must be moved, flops, achieved rates, the fraction of
the roofline measured in the same run (the larger of bytes / copy rate and flops / product rate, over the time), on a
GPU the host's time to queue the call, and how many times as long each peer takes. Where the host takes longer than the
GPU, it sets the pace of a step without graphs. torch's own functions are always among the peers, as far as this
version and device have them; what did not run is below the table. --peer adds another project's kernels: DIR holds
a `motet_peer.py` that defines NAME and call(op, arguments), see peer_module.py. With --limit-s rows that would begin
later are left out, the last line says how many, and the exit status is 75.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.measure import Roofline, host_seconds, measure_roofline, time_calls
from benchmarks.kernels.peer_module import PeerModule, PeerRefused, load_peer
from benchmarks.kernels.work import Work
from benchmarks.kernels.works import works

INCOMPLETE = 75  # exit status where rows were left out

HEADER = (
    f"{'op':<18} {'shape':<34} {'us':>9} {'+-':>7} {'host':>7} {'MB':>8} {'GFLOP':>8} {'GB/s':>7} {'TFLOP/s':>8} "
    f"{'roof':>5}  peers, times ours"
)


def main(argv: list[str] | None = None) -> int:
    begin_s = time.monotonic()
    options = parse(argv)
    device = torch.device(options.device)
    try:
        peer = None if options.peer is None else load_peer(options.peer)
    except PeerRefused as error:
        print(error, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[options.dtype]
    repeats = options.repeats or (10 if options.short else 30)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, CPU"
    print(f"{where}, torch {torch.__version__}, {options.dtype}, median of {repeats} runs")
    rows, refused, left_out = [], [], 0
    with torch.inference_mode():
        roofline = measure_roofline(device, dtype, repeats=repeats)
        print(
            f"roofline of this run: copy {roofline.bytes_per_s / 1e9:.1f} GB/s, "
            f"product {roofline.flops_per_s / 1e12:.2f} TFLOP/s\n{HEADER}"
        )
        for work in works(device, dtype, is_short=options.short):
            if options.op not in (None, work.op):
                continue
            if options.limit_s is not None and time.monotonic() - begin_s > options.limit_s:
                left_out += 1
                continue
            rows.append(run(work, device, roofline, repeats, peer))
            print(line(rows[-1]), flush=True)
            refused += [f"{work.op}, {work.name}: {name}: {reason}" for name, reason in work.refused.items()]
    return finish(options, rows, refused, left_out, where, roofline, repeats)


def finish(
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
    refused: list[str],
    left_out: int,
    where: str,
    roofline: Roofline,
    repeats: int,
) -> int:
    """Say what was left out, write the file; the exit status."""
    if refused:
        print("\npeers that did not run:")
        for text in refused:
            print(f"  {text}")
    if left_out:
        print(f"incomplete: {left_out} rows were left out after {options.limit_s:.0f} s")
    if not rows and not left_out:
        print(f"no op is called {options.op}", file=sys.stderr)
        return 2
    if options.json is not None:
        head = {"device": where, "torch": torch.__version__, "dtype": options.dtype, "repeats": repeats}
        limits = {"bytes_per_s": roofline.bytes_per_s, "flops_per_s": roofline.flops_per_s}
        rest = {"roofline": limits, "rows": rows, "peers_refused": refused, "rows_left_out": left_out}
        options.json.write_text(json.dumps({**head, **rest}, indent=1) + "\n")
    return INCOMPLETE if left_out else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.bench", description="Time the kernels.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--op", help="only this one, such as paged_attention")
    parser.add_argument("--repeats", type=int, help="timed runs of each call (default: 30, short 10)")
    parser.add_argument("--short", action="store_true", help="fewer shapes and runs")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="another project's kernels, see peer_module.py")
    parser.add_argument("--limit-s", type=float, help="begin no row later than so many seconds after the start")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    return parser.parse_args(argv)


def run(
    work: Work, device: torch.device, roofline: Roofline, repeats: int, peer: PeerModule | None = None
) -> dict[str, Any]:
    """One row."""
    calls = work.prepare(device, peer)
    times = time_calls(calls, device, repeats=repeats)
    host_s = host_seconds(calls["ours"], device)
    work.clear()
    seconds, spread = times.pop("ours")
    least = max(work.num_bytes / roofline.bytes_per_s, work.flops / roofline.flops_per_s)
    return {
        "op": work.op,
        "shape": work.name,
        "seconds": seconds,
        "spread_s": spread,
        "host_s": host_s,
        "bytes": work.num_bytes,
        "flops": work.flops,
        "bytes_per_s": work.num_bytes / seconds,
        "flops_per_s": work.flops / seconds,
        "of_roofline": least / seconds,
        "peers": {name: peer / seconds for name, (peer, _) in times.items()},
    }


def line(row: dict[str, Any]) -> str:
    peers = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["peers"].items())
    host = "" if row["host_s"] is None else f"{row['host_s'] * 1e6:.1f}"
    return (
        f"{row['op']:<18} {row['shape']:<34} {row['seconds'] * 1e6:>9.1f} {row['spread_s'] * 1e6:>7.1f} {host:>7} "
        f"{row['bytes'] / 1e6:>8.2f} {row['flops'] / 1e9:>8.2f} {row['bytes_per_s'] / 1e9:>7.1f} "
        f"{row['flops_per_s'] / 1e12:>8.2f} {row['of_roofline']:>5.0%}  {peers}"
    )


if __name__ == "__main__":
    sys.exit(main())

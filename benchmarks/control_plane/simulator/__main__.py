"""Run a scenario on the virtual clock and print its figures.

    python -m benchmarks.control_plane.simulator SCENARIO [--charts DIR] [--json FILE]

scale       many workers, adapters and requests under the default policy
policies    one trace at several rates under each policy: goodput and queueing
fairness    two tenants, one of them flooding, with fair shares and first come first served
preemption  a KV cache that is too small, by recompute alone and with host memory to swap to
failures    workers that die and come back: every request still gets each of its tokens once

Every token of every run is compared with the one that is due. Times in the figures are those of the simulated fleet
(costs.py says what is assumed); wall_s alone is real.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.control_plane.simulator.scenarios import SCENARIOS


def main(argv: list[str] | None = None) -> int:
    """Run one scenario."""
    options = parse(argv)
    began = time.perf_counter()
    report = SCENARIOS[options.scenario](options)
    report["wall_s"] = round(time.perf_counter() - began, 1)
    text = json.dumps(report, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.control_plane.simulator", description="Simulate a fleet.")
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--workers", type=int, help="simulated workers, a count (default: the scenario's)")
    parser.add_argument("--adapters", type=int, help="adapters, a count (default: the scenario's)")
    parser.add_argument("--requests", type=int, help="requests, a count (default: the scenario's)")
    parser.add_argument("--rate", type=float, help="requests per second and worker (default: the scenario's)")
    parser.add_argument("--seed", type=int, default=1, help="of everything (default 1)")
    parser.add_argument("--link-ms", type=float, help="one way between control plane and worker (default 0.2)")
    parser.add_argument("--charts", type=Path, help="draw the charts into this folder (needs make setup-bench)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""What metrics cost: the CPU time of all code that counts and renders, added up in a control plane and a worker.

`python -m benchmarks.control_plane.metrics_cost` starts both with a port for metrics and gives them streams. Each call
into the metrics is timed by its thread's CPU clock, so that other work on the machine does not count: a comparison of
two processes, with metrics and without, has more noise than metrics cost. The clock itself is in the result, about
1 us for each call; what calls displace from the caches of others is not. The pages are read between rounds, and count
as if they were read every SCRAPE_S. Prints one JSON object, and exits with 1 where metrics take more than LIMIT of the
control plane's CPU time or of the worker's time for a step.

The worker computes `--model-shape` on this machine's CPU. `tiny` has the shortest steps, so its share is the largest.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import runpy
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any

import uvloop
from motet import Client

from benchmarks.control_plane.client_streams import measure
from benchmarks.serving.checkpoints import make_adapters, make_base
from benchmarks.system import ROOT, Child, System

CACHE = ROOT / ".motet" / "bench"
LIMIT = 0.01
SCRAPE_S = 5.0  # three times as often as Prometheus does by default
SCRAPE = "scrape"
PACKAGES = ("control_plane", "data_plane")
Totals = dict[str, dict[str, float]]  # what was called -> num_calls, cpu_us


class Meter:
    """CPU time of calls by name, in all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, list[int]] = {}

    def time(self, owner: Any, method: str, name: str) -> None:
        """Time this method of a class, or this function of a module, from now on."""
        call = getattr(owner, method)
        total = self._totals.setdefault(name, [0, 0])

        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            begun_ns = time.thread_time_ns()
            try:
                return call(*arguments, **options)
            finally:
                taken_ns = time.thread_time_ns() - begun_ns
                with self._lock:
                    total[0] += 1
                    total[1] += taken_ns

        setattr(owner, method, timed)

    def totals(self) -> Totals:
        """Of all that was timed."""
        return {name: {"num_calls": calls, "cpu_us": ns / 1000} for name, (calls, ns) in self._totals.items() if calls}


def meter_control_plane() -> None:
    """Time what a control plane does for its metrics."""
    import control_plane.setup.metrics as setup
    from control_plane.metrics.request_metrics import RequestMetrics
    from control_plane.metrics.tier_metrics import TierMetrics

    # What they count of a request is gathered for its line in the log anyway.
    METER.time(RequestMetrics, "ended", "request ended")
    METER.time(RequestMetrics, "refused", "request refused")
    for name in ("round_trip", "slot_loaded", "slot_load_failed", "slot_evicted", "cache_call", "store_call"):
        METER.time(TierMetrics, name, name)
    METER.time(setup, "snapshot", f"{SCRAPE}: state of the system")


def meter_worker() -> None:
    """Time what a worker does for its metrics."""
    from data_plane.metrics import WorkerMetrics

    METER.time(WorkerMetrics, "on_step", "step")
    METER.time(WorkerMetrics, "on_load", "load")


def run_metered(package: str, out: str, arguments: list[str]) -> int:
    """`python -m package arguments` with a meter, whose totals go to the file `out` in the end."""
    if package == "control_plane":
        meter_control_plane()
    else:
        meter_worker()
    METER.time(BaseHTTPRequestHandler, "handle", f"{SCRAPE}: request and page")
    METER.time(ThreadingMixIn, "process_request", f"{SCRAPE}: its thread")
    sys.argv = [package, *arguments]
    try:
        runpy.run_module(package, run_name="__main__", alter_sys=True)
    finally:
        Path(out).write_text(json.dumps(METER.totals()), encoding="utf-8")
    return 0


METER = Meter()


class Rig:
    """A metered control plane and worker under load."""

    def __init__(self, args: argparse.Namespace, work_dir: Path) -> None:
        self._args = args
        self._outs = {package: work_dir / f"{package}.json" for package in PACKAGES}
        self._addresses = {package: _free_address() for package in PACKAGES}
        self._names = [f"bench-{number}" for number in range(args.adapters)]
        flags = ["--max-streams-per-connection", "4096"]
        self._system = System(
            make_base(args.model_shape, CACHE),
            work_dir / "system",
            control_flags=[*flags, "--metrics-listen", self._addresses["control_plane"]],
            control_command=self._command("control_plane"),
            environment={"PYTHONHASHSEED": "0"},
            timeout_s=600.0,
        )
        self._num_scrapes = 0
        self._pages: dict[str, bytes] = {}
        self._num_tokens, self._cpu_us = 0, 0.0  # of the control plane, over all rounds

    def measure(self) -> dict[str, Any]:
        """Run all rounds; the report."""
        with self._system as system:
            flags = ["--worker-metrics-listen", self._addresses["data_plane"], "--max-rows", str(self._args.streams)]
            system.start_worker(flags=flags, command=self._command("data_plane"))
            adapters = make_adapters(self._args.model_shape, len(self._names), CACHE)
            with Client(system.address) as client:
                for name, directory in zip(self._names, adapters, strict=True):
                    client.adapters.register(name, directory)
            for seed in range(self._args.rounds):
                self._run_round(seed)
            step_us = self._step_us()
        return self._report(step_us)

    def _run_round(self, seed: int) -> None:
        begun_us = _cpu_us(self._system.control_plane)
        num_tokens, _ = uvloop.run(measure(self._system.address, self._names, self._args, seed))
        self._cpu_us += _cpu_us(self._system.control_plane) - begun_us
        self._num_tokens += num_tokens
        for package, address in self._addresses.items():
            with urllib.request.urlopen(f"http://{address}/metrics") as response:
                self._pages[package] = response.read()
        self._num_scrapes += 1

    def _step_us(self) -> float:
        """Mean time of the worker's steps, by its own metric."""
        found = re.findall(rb"motet_step_seconds_(sum|count)\{.*\} (\S+)", self._pages["data_plane"])
        sums = {part: sum(float(value) for name, value in found if name == part) for part in (b"sum", b"count")}
        return sums[b"sum"] / sums[b"count"] * 1e6

    def _report(self, step_us: float) -> dict[str, Any]:
        totals: dict[str, Totals] = {name: json.loads(out.read_text("utf-8")) for name, out in self._outs.items()}
        own = totals["control_plane"]
        counted_us = sum(each["cpu_us"] for name, each in own.items() if not name.startswith(SCRAPE))
        scrape_us = {
            package: sum(each["cpu_us"] for name, each in calls.items() if name.startswith(SCRAPE)) / self._num_scrapes
            for package, calls in totals.items()
        }
        step = totals["data_plane"]["step"]
        counting = {"control_plane": counted_us / self._cpu_us, "worker": step["cpu_us"] / step["num_calls"] / step_us}
        scraping = {
            "control_plane": scrape_us["control_plane"] / SCRAPE_S / 1e6,
            "worker": scrape_us["data_plane"] / SCRAPE_S / 1e6,
        }
        return {
            "streams": self._args.streams,
            "tokens": self._args.tokens,
            "adapters": self._args.adapters,
            "model_shape": self._args.model_shape,
            "cpu_us_per_token": round(self._cpu_us / self._num_tokens, 1),
            "step_us": round(step_us),
            "calls": {
                package: {name: _per_call(each) for name, each in calls.items()} for package, calls in totals.items()
            },
            "page_bytes": {package: len(page) for package, page in self._pages.items()},
            "scrape_us": {package: round(each) for package, each in scrape_us.items()},
            "share_of_counting": {part: round(share, 5) for part, share in counting.items()},
            "share_of_scrapes": {part: round(share, 5) for part, share in scraping.items()},
            "share": {part: round(share + scraping[part], 5) for part, share in counting.items()},
        }

    def _command(self, package: str) -> tuple[str, ...]:
        return ("-m", "benchmarks.control_plane.metrics_cost", "--metered", package, str(self._outs[package]))


def _per_call(total: dict[str, float]) -> dict[str, float]:
    return {"num_calls": total["num_calls"], "us_per_call": round(total["cpu_us"] / total["num_calls"], 2)}


def _cpu_us(child: Child) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{child.pid}/task")
    return sum(int((task / "schedstat").read_text("utf-8").split()[0]) for task in tasks.iterdir()) / 1000


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def main(argv: list[str]) -> int:
    """Measure as the flags say and print JSON; the exit status."""
    if argv[:1] == ["--metered"]:
        return run_metered(argv[1], argv[2], argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams, a count (default 64)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream (default 128)")
    parser.add_argument("--adapters", type=int, default=16, help="adapters beside the base model (default 16)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of streams (default 20)")
    parser.add_argument("--model-shape", default="tiny", help="what the worker computes (default tiny)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        report = Rig(args, Path(name)).measure()
    print(json.dumps(report, indent=1))
    return int(max(report["share"].values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

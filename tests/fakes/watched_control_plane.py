"""A control plane whose event loop is watched: `python -m tests.fakes.watched_control_plane REPORT FLAGS...`.

Everything is built as in production, on an event loop of the standard library instead of uvloop. At every SIGUSR1 it
writes what the monitor found since the last time into REPORT as JSON; `take_report` has it do so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.system import Child
from contract.process_log import configure_logging
from control_plane.config import ServerConfig, add_arguments, from_args
from control_plane.server import build
from tests.e2e.harness import wait_until
from tests.fakes.loop_monitor import LoopMonitor, LoopReport


def command(report: Path) -> tuple[str, ...]:
    """What follows the interpreter."""
    return ("-m", "tests.fakes.watched_control_plane", str(report))


def take_report(control_plane: Child, report: Path) -> LoopReport:
    """What was found since the ready line, or since the report before."""
    report.unlink(missing_ok=True)
    control_plane.send(signal.SIGUSR1)
    wait_until(report.exists, "the control plane writes its report")
    return LoopReport(**json.loads(report.read_text(encoding="utf-8")))


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM; the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    add_arguments(parser)
    args = parser.parse_args(argv)
    config, monitor = from_args(args), LoopMonitor()
    configure_logging(config.log_level, process="control plane")
    with asyncio.Runner(loop_factory=monitor.new_event_loop) as runner:
        runner.run(_serve(config, monitor, args.report))
    return 0


async def _serve(config: ServerConfig, monitor: LoopMonitor, report: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        plane = await build(config, stack)
        gc.collect()
        gc.freeze()
        print(f"motet control-plane ready clients={plane.client_address} workers={plane.worker_address}", flush=True)
        monitor.reset()

        def write_report() -> None:
            part = report.with_suffix(".part")
            part.write_text(json.dumps(dataclasses.asdict(monitor.report())), encoding="utf-8")
            part.replace(report)
            monitor.reset()

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write_report)
        await stop.wait()
        await plane.shut_down(config.drain_timeout_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

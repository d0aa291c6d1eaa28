"""A worker of random weights: `python -m benchmarks.gpu_targets.random_worker REPORT CASE FLAGS...`.

Before it attaches, it times the engine's own steps of CASE, which is ROWS,ADAPTERS,CONTEXT,STEPS, and writes the
milliseconds of one into REPORT. Everything else is a worker's own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine.driver import Driver
from benchmarks.engine.random_model import random_weights
from benchmarks.engine.step_times import RANK
from contract.process_log import configure_logging
from data_plane.config import add_arguments, from_args
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.worker import run_worker, settle


def main(argv: Sequence[str] | None = None) -> int:
    """Run until it is stopped; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("case", type=lambda text: [int(part) for part in text.split(",")])
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    config = from_args(arguments)
    configure_logging(config.log_level, process="worker")
    engine = build_engine(config, read_weights=random_weights(torch.device(config.device)))
    settle()
    arguments.report.write_text(f"{own_step_ms(engine, *arguments.case)}\n")
    return run_worker(engine, config)


def own_step_ms(engine: TorchEngine, num_rows: int, num_adapters: int, num_context: int, num_steps: int) -> float:
    """Milliseconds of a step, in the middle of so many. Leaves the engine empty."""
    for slot in range(num_adapters):
        engine.arena.load_zeros(slot, 1, RANK, is_trained=True)
    driver = Driver(engine)
    driver.begin_decodes(num_rows, num_adapters, num_context=num_context, num_steps=num_steps)
    driver.decode_ahead(num_steps // 4)
    began_s = time.perf_counter()
    driver.decode_ahead(num_steps // 2)
    step_ms = (time.perf_counter() - began_s) * 1000 / (num_steps // 2)
    driver.end()
    engine.reset()
    return step_ms


if __name__ == "__main__":
    sys.exit(main())

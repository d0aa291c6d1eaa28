"""Eager steps and mixed steps: their time, the CPU time of the thread that queues them, and where it waits."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.engine.driver import PLAN_DEPTH, Driver
from benchmarks.gpu_targets.engines import Setup
from data_plane.engine.device.step_graphs import StepGraphs
from data_plane.plan import PendingStep

PROMPT_TOKENS = 256
NUM_STEPS = 12
NUM_WARM = 3
PROFILED_STEPS = 4
MOST_STEPS = 4 * NUM_STEPS  # of a row


def measure(setup: Setup, driver: Driver, num_adapters: int) -> None:
    """Print a line for each kind of step, then where the host's time goes."""
    print(f"{'eager steps':<44} step ms, CPU ms of the thread that queues")
    with patch.object(StepGraphs, "find", lambda *_: None):
        for adapters in (0, num_adapters):
            for num_rows in (1, setup.num_rows):
                _begin(setup, driver, num_rows, adapters)
                _line(f"{num_rows} rows, {adapters} adapters", driver.submit)
                if (num_rows, adapters) == (setup.num_rows, num_adapters):
                    _print_profile(driver)
                driver.end()
    for adapters in (0, num_adapters):
        _begin(setup, driver, setup.num_rows, adapters)

        def submit(adapters: int = adapters) -> PendingStep:
            return driver.prompt_beside(PROMPT_TOKENS, adapters)

        _line(f"{setup.num_rows} rows and a prompt of {PROMPT_TOKENS}, {adapters} adapters", submit)
        driver.end_prompt()
        driver.end()


def _begin(setup: Setup, driver: Driver, num_rows: int, num_adapters: int) -> None:
    driver.begin_decodes(num_rows, num_adapters, num_context=setup.context, num_steps=MOST_STEPS)


def _line(name: str, submit: Callable[[], PendingStep]) -> None:
    _run(submit, NUM_WARM)
    began_s = time.perf_counter()
    host_ms = _run(submit, NUM_STEPS)
    step_ms = (time.perf_counter() - began_s) * 1000 / NUM_STEPS
    print(f"  {name:<42} {step_ms:>8.2f} {statistics.median(host_ms):>8.2f}", flush=True)
    if places := _waits(submit):
        print(f"    waits for the device at {', '.join(places)}", flush=True)


def _waits(submit: Callable[[], PendingStep]) -> list[str]:
    """Where the thread that queues a step waits for the GPU, as torch notices it."""
    if not torch.cuda.is_available():
        return []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = submit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.wait()
    places = [f"{Path(warning.filename).name}:{warning.lineno}" for warning in caught]
    return [f"{place} ({count})" for place, count in Counter(places).most_common()]


def _run(submit: Callable[[], PendingStep], num_steps: int) -> list[float]:
    """CPU time of each submission, in milliseconds. Steps are submitted ahead, as a worker does."""
    host_ms = []
    under_way: deque[PendingStep] = deque()
    for _ in range(num_steps):
        began_s = time.thread_time()
        under_way.append(submit())
        host_ms.append((time.thread_time() - began_s) * 1000)
        if len(under_way) == PLAN_DEPTH:
            under_way.popleft().wait()
    while under_way:
        under_way.popleft().wait()
    return host_ms


def _print_profile(driver: Driver) -> None:
    """The functions and the operations of torch that take the most time of their own."""
    profile = cProfile.Profile()
    profile.enable()
    _run(driver.submit, PROFILED_STEPS)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(22)
    print(f"  Python of {PROFILED_STEPS} such steps:\n" + "\n".join(text.getvalue().splitlines()[6:]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
        _run(driver.submit, PROFILED_STEPS)
    print(traced.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=40))

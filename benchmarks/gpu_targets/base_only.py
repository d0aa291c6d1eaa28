"""What an arena with adapters costs rows without one: the same decode step on an engine that serves no adapters.

Both engines have the same weights, and are measured in turn. Before that they complete a prompt with the same tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks.engine.driver import Driver
from benchmarks.engine.step_times import BLOCK_SIZE
from benchmarks.gpu_targets.engines import Setup

TARGET = 1.01
NUM_ROUNDS = 7
PROMPT_TOKENS, NUM_CHECKED = 40, 8  # tokens of the completion that is compared


def num_steps(setup: Setup) -> int:
    """Steps of a row."""
    return (NUM_ROUNDS + 1) * setup.num_steps


def measure(setup: Setup, with_adapters: Driver, without: Driver, row_counts: Sequence[int], num_tokens: int) -> None:
    """Print a line for each number of rows. num_tokens: of all rows together, which share the KV blocks."""
    drivers = (with_adapters, without)
    prompt = [8 + place for place in range(PROMPT_TOKENS)]
    tokens = [driver.generate([prompt], 0, NUM_CHECKED) for driver in drivers]
    if tokens[0] != tokens[1]:
        raise RuntimeError(f"the engines complete a prompt with different tokens: {tokens}")
    print("base only, step ms: engine with adapters in its arena, engine without room for any; ratio, target 1.01")
    for num_rows in row_counts:
        context = min(setup.context, num_tokens // num_rows - num_steps(setup) - 2 * BLOCK_SIZE)
        for driver in drivers:
            driver.begin_decodes(num_rows, 0, num_context=context, num_steps=num_steps(setup))
            driver.decode_ahead(setup.num_steps)
        times: tuple[list[float], list[float]] = ([], [])
        for index in range(NUM_ROUNDS):
            for which in (0, 1) if index % 2 else (1, 0):
                began_s = time.perf_counter()
                drivers[which].decode_ahead(setup.num_steps)
                times[which].append((time.perf_counter() - began_s) * 1000 / setup.num_steps)
        for driver in drivers:
            driver.end()
        ratios = sorted(ours / plain for ours, plain in zip(*times, strict=True))
        ratio = statistics.median(ratios)
        print(
            f"  {num_rows:>3} rows of {context} tokens: {statistics.median(times[0]):.3f}, "
            f"{statistics.median(times[1]):.3f}; {ratio:.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f}) "
            f"{'met' if ratio <= TARGET else 'MISSED'}",
            flush=True,
        )

"""Times calls, and measures the machine's roofline with the same clock.

On a GPU: events around each call, the L2 cache flushed before, the copies of the inputs taken in turn. On the CPU:
calls that are compared run in turn, so that a slow moment of the machine meets all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

FLUSH_BYTES = 1 << 30  # on a GPU; takes longer than the host needs to queue the call that follows
HOST_CALLS = 20  # few enough that the launches of all of them fit in a stream's queue
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the machine reached in this run."""

    bytes_per_s: float  # of a copy, read and written bytes together
    flops_per_s: float  # of a square product in the dtype of the run


def time_calls(
    calls: Mapping[str, Sequence[Call]], device: torch.device, *, repeats: int
) -> dict[str, tuple[float, float]]:
    """(median, half the distance of the quartiles) in seconds, by name. Each name's calls take turns."""
    for sequence in calls.values():
        for call in (*sequence, sequence[0]):
            call()  # compiles, fills caches
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    if device.type == "cuda":
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        for repeat in range(repeats):
            for name, sequence in calls.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                flush.zero_()
                begin.record()
                sequence[repeat % len(sequence)]()
                end.record()
                end.synchronize()
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    else:
        for repeat in range(repeats):
            for name, sequence in calls.items():
                begin_s = time.perf_counter()
                sequence[repeat % len(sequence)]()
                seconds[name].append(time.perf_counter() - begin_s)
    return {name: _summary(values) for name, values in seconds.items()}


def host_seconds(calls: Sequence[Call], device: torch.device) -> float | None:
    """What the host takes to queue a call; None on the CPU, where it does the work itself.

    A step without graphs lasts at least as long as the host takes for all of its calls. time_calls hides that.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for index in range(HOST_CALLS):
        calls[index % len(calls)]()
    end_s = time.perf_counter()
    torch.cuda.synchronize()
    return (end_s - begin_s) / HOST_CALLS


def measure_roofline(device: torch.device, dtype: torch.dtype, *, repeats: int) -> Roofline:
    """Copy and product that are large enough for their rates to be flat."""
    num_bytes, size = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 768)
    # Random bytes: memory may move zeros faster, and their products take less power.
    source, target = (torch.randint(0, 127, (num_bytes,), dtype=torch.int8, device=device) for _ in range(2))
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = time_calls(
        {"copy": [lambda: target.copy_(source)], "product": [lambda: torch.mm(a, b)]}, device, repeats=repeats
    )
    return Roofline(2 * num_bytes / times["copy"][0], 2 * size**3 / times["product"][0])


def _summary(values: list[float]) -> tuple[float, float]:
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return quartiles[1], (quartiles[2] - quartiles[0]) / 2

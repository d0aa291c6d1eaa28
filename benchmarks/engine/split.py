"""Splits a step of the engine into its parts, by the times of the native ops that it ran."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kernels.native import Run, clock_ns, recording

PRODUCTS, LORA, ATTENTION, OTHER, PYTHON, WAITING, WHOLE = (
    "products",
    "LoRA",
    "attention",
    "other passes",
    "Python",
    "waiting",
    "not split",  # nothing native ran: what torch does is not split
)
PARTS = (PRODUCTS, LORA, ATTENTION, OTHER, PYTHON, WAITING, WHOLE)


@dataclass(frozen=True)
class Split:
    """What a step took; the parts are those of steps that were recorded, ms."""

    step_ms: float  # of steps that were not recorded
    parts_ms: dict[str, float]
    runs: int = 0  # native calls of one step
    ops: dict[str, int] = field(default_factory=dict)  # of one step, by name


def part_of(op: str) -> str:
    """The part that a native op belongs to."""
    for beginning, part in (
        ("linear", PRODUCTS),
        ("plain_linear", PRODUCTS),
        ("lora", LORA),
        ("attention", ATTENTION),
        *((other, OTHER) for other in ("rms_norm", "rotate_store", "store_kv", "gate", "sample", "forbid")),
    ):
        if op.startswith(beginning):
            return part
    raise ValueError(f"the native op {op} is of no part: name its part here")


def split(runs: Sequence[Run], wall_ns: int) -> dict[str, float]:
    """The parts of one step that took wall_ns, ms.

    What an op takes is what the calling thread takes for its tasks, or all of it where the others had all tasks.
    Waiting is until the other threads have ended theirs. Python is everything outside of native calls.
    """
    if not runs:
        return {WHOLE: wall_ns / 1e6}
    spent = dict.fromkeys(PARTS[:-1], 0)
    for run in runs:
        at = run.began_ns
        for name, (own_end, end) in zip(run.names, run.times.tolist(), strict=True):
            own_end = own_end if own_end > at else end
            spent[part_of(name)] += own_end - at
            spent[WAITING] += end - own_end
            at = end
    spent[PYTHON] = wall_ns - sum(spent.values())
    return {part: ns / 1e6 for part, ns in spent.items()}


def measure(step: Callable[[], object], num_steps: int, *, before: Callable[[], None] = lambda: None) -> Split:
    """Medians over `num_steps` steps as they are, and as many that are recorded, in turn after one that warms up.

    `before` is called before each step and not measured.
    """
    before()
    step()
    plain_ms: list[float] = []
    parts: list[dict[str, float]] = []
    counts: dict[str, int] = {}
    num_runs = 0
    for _ in range(num_steps):
        before()
        began_ns = clock_ns()
        step()
        plain_ms.append((clock_ns() - began_ns) / 1e6)
        before()
        with recording() as runs:
            began_ns = clock_ns()
            step()
            wall_ns = clock_ns() - began_ns
        parts.append(split(runs, wall_ns))
        num_runs = len(runs)
        counts = dict(Counter(name for run in runs for name in run.names))
    median = {part: statistics.median(one[part] for one in parts) for part in parts[0]}
    return Split(statistics.median(plain_ms), median, num_runs, counts)

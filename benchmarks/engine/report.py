"""Shows what the steps took beside their bounds: a table, JSON, and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.engine.bounds import Rates, Work
from benchmarks.engine.split import PARTS, PYTHON, WAITING, Split

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#bab0ac", "#9d755d")


@dataclass(frozen=True)
class Measured:
    """One kind of step."""

    name: str
    split: Split
    work: Work


Bounds = Sequence[dict[str, float]]  # of each step by part, ms; a part without one is to take no time


def show(console: Console, rates: Rates, steps: Sequence[Measured], bounds: Bounds) -> None:
    """Each part as: what it took, and after the slash its bound, ms."""
    console.print(
        f"read bandwidth {rates.read_bytes_per_s / 1e9:.1f} GB/s; "
        f"products of 1024 rows {rates.flops_per_s / 1e9:.0f} GFLOP/s"
    )
    used = [part for part in PARTS if any(part in step.split.parts_ms for step in steps)]
    table = Table(title="ms of a step, and its bound; parts are of recorded steps, in which no op overlaps the next")
    for heading in ("step", "ms", "bound", *used, "calls"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for step, of_step in zip(steps, bounds, strict=True):
        table.add_row(
            step.name,
            f"{step.split.step_ms:.2f}",
            f"{sum(of_step.values()):.2f}",
            *(_cell(step.split.parts_ms.get(part), of_step.get(part)) for part in used),
            str(step.split.runs),
        )
    console.print(table)


def _cell(spent: float | None, bound: float | None) -> str:
    if spent is None:
        return "-"
    return f"{spent:.2f}" if bound is None else f"{spent:.2f} / {bound:.2f}"


def to_json(rates: Rates, steps: Sequence[Measured], bounds: Bounds) -> dict[str, object]:
    """What a report file holds."""
    return {
        "read_bytes_per_s": rates.read_bytes_per_s,
        "flops_per_s": rates.flops_per_s,
        "steps": [
            {
                "name": step.name,
                "step_ms": step.split.step_ms,
                "parts_ms": step.split.parts_ms,
                "bounds_ms": of_step,
                "native_calls": step.split.runs,
                "ops": step.split.ops,
            }
            for step, of_step in zip(steps, bounds, strict=True)
        ],
    }


def draw(path: Path, steps: Sequence[Measured], bounds: Bounds) -> None:
    """Stacked bars of the parts, the bounds of all parts beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(max(8, 0.7 * len(steps)), 5), layout="constrained")
    places = range(len(steps))
    split = [step.split.parts_ms for step in steps]
    for offset, is_bound in ((-0.2, False), (0.2, True)):
        base = [0.0] * len(steps)
        for part, color in zip(PARTS, COLORS, strict=True):
            heights = [one.get(part, 0.0) for one in (bounds if is_bound else split)]
            if any(heights):
                label = None if is_bound else part
                hatch = "//" if is_bound else None
                axis.bar([p + offset for p in places], heights, 0.38, base, color=color, label=label, hatch=hatch)
            base = [low + height for low, height in zip(base, heights, strict=True)]
    axis.set_xticks(list(places), [step.name for step in steps], rotation=45, ha="right")
    axis.set_ylabel(f"ms of a step; hatched: bounds ({PYTHON} and {WAITING} have none)")
    axis.set_yscale("symlog", linthresh=10)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

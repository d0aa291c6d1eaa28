"""Shows and writes results: a table in the terminal, JSON, and a chart."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.system import ROOT

_COLUMNS = (
    ("output_tokens_per_s", "tokens/s", "{:.0f}"),
    ("requests_per_s", "requests/s", "{:.2f}"),
    ("ttft_ms_p50", "TTFT p50 ms", "{:.0f}"),
    ("ttft_ms_p99", "TTFT p99 ms", "{:.0f}"),
    ("itl_ms_p50", "ITL p50 ms", "{:.1f}"),
    ("itl_ms_p99", "ITL p99 ms", "{:.1f}"),
)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def show(console: Console, results: Sequence[dict[str, Any]]) -> None:
    table = Table(title="medians over the repeats")
    table.add_column("workload")
    for _, heading, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(result["name"], *(pattern.format(result["median"][key]) for key, _, pattern in _COLUMNS))
    console.print(table)


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def draw(path: Path, results: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]]) -> None:
    """Bars of throughput, and of first-token and inter-token times, one group per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    names = [result["name"] for result in results]
    axes[0].bar(names, [result["median"]["output_tokens_per_s"] for result in results], label="motet")
    for peer in peers:
        axes[0].scatter([peer["workload"]], [peer["output_tokens_per_s"]], label=peer["name"], zorder=3)
    axes[0].set_ylabel("output tokens/s")
    axes[0].legend()
    for axis, key, label in (
        (axes[1], "ttft_ms", "time to first token, ms"),
        (axes[2], "itl_ms", "between tokens, ms"),
    ):
        for percent, style in ((50, "o-"), (99, "s--")):
            axis.plot(names, [result["median"][f"{key}_p{percent}"] for result in results], style, label=f"p{percent}")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend()
    for axis in axes:
        axis.tick_params(axis="x", labelrotation=30)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

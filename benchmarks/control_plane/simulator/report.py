"""Figures and charts of simulated runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.control_plane.simulator.simulation import WINDOW_S, Outcome

PREFILL_WEIGHT, DECODE_WEIGHT = 1.0, 2.0  # of one token in a tenant's service


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count as good."""

    ttft_s: float = 1.0  # arrival to first token
    itl_s: float = 0.05  # mean time between tokens


def summary(outcome: Outcome, num_workers: int, objective: Objective) -> dict[str, float]:
    """The figures of one run."""
    arrival, first, end = (np.array(v) for v in (outcome.arrival_s, outcome.first_token_s, outcome.end_s))
    queue = np.array(outcome.scheduled_s) - arrival
    ttft = first - arrival
    num_output = np.array(outcome.num_output)
    itl = (end - first) / np.maximum(num_output / np.array(outcome.num_completions) - 1, 1)
    is_good = (ttft <= objective.ttft_s) & (itl <= objective.itl_s)
    last_arrival_s = max(float(arrival.max()), 1e-9)
    lookups = outcome.host_cache_hits + outcome.host_cache_misses
    return {
        "requests": len(arrival),
        "steps": outcome.num_steps,
        "virtual_s": outcome.duration_s,
        "tokens_per_s": float(num_output.sum()) / outcome.duration_s,
        "goodput_per_s": float(is_good.sum()) / last_arrival_s,
        "good_share": float(is_good.mean()),
        "queue_p50_s": float(np.quantile(queue, 0.5)),
        "queue_p99_s": float(np.quantile(queue, 0.99)),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "itl_p50_s": float(np.quantile(itl, 0.5)),
        "itl_p99_s": float(np.quantile(itl, 0.99)),
        "busy_share": outcome.busy_s / (outcome.duration_s * num_workers),
        "loads_per_request": outcome.num_loads / max(len(arrival), 1),
        "host_cache_hit_rate": outcome.host_cache_hits / lookups if lookups else float("nan"),
        "prefix_hit_rate": outcome.prefix_hit_tokens / max(outcome.prefix_query_tokens, 1),
        "preemptions": outcome.num_preemptions,
        "swapped_out": outcome.num_swapped_out,
        "failures": outcome.num_failures,
        "migrations": outcome.num_migrations,
    }


def served(outcome: Outcome, tenant: str) -> npt.NDArray[np.float64]:
    """Weighted tokens that a tenant was served by the end of each window."""
    windows = outcome.service.get(tenant, {})
    per_window = np.zeros(int(outcome.duration_s / WINDOW_S) + 1)
    for window, (num_prompt, num_output) in windows.items():
        per_window[window] += PREFILL_WEIGHT * num_prompt + DECODE_WEIGHT * num_output
    cumulated: npt.NDArray[np.float64] = np.cumsum(per_window)
    return cumulated


def draw_service(outcomes: dict[str, Outcome], tenants: list[str], path: Path) -> None:
    """Service of each tenant over time, one panel per run."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(outcomes), figsize=(4.5 * len(outcomes), 3.5), sharey=True, squeeze=False)
    for axis, (name, outcome) in zip(axes[0], outcomes.items(), strict=True):
        for tenant in tenants:
            total = served(outcome, tenant)
            axis.plot(np.arange(len(total)) * WINDOW_S, total / 1e6, label=tenant)
        axis.set(title=name, xlabel="virtual time, s")
    axes[0][0].set_ylabel("service, million weighted tokens")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


def draw_curves(rows: dict[str, list[tuple[float, dict[str, float]]]], path: Path) -> None:
    """Goodput and p99 of the time in the queue over the offered load, one line per run."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for name, points in rows.items():
        offered = [rate for rate, _ in points]
        axes[0].plot(offered, [figures["goodput_per_s"] for _, figures in points], marker="o", label=name)
        axes[1].plot(offered, [figures["queue_p99_s"] for _, figures in points], marker="o", label=name)
    axes[0].set(xlabel="offered, requests/s", ylabel="goodput, requests/s")
    axes[1].set(xlabel="offered, requests/s", ylabel="p99 of queueing, s", yscale="log")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot

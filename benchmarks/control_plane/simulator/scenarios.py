"""The scenarios: what is requested from which fleet, and what is reported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.control_plane.simulator.costs import Costs
from benchmarks.control_plane.simulator.report import Objective, draw_curves, draw_service, served, summary
from benchmarks.control_plane.simulator.simulation import WINDOW_S, FleetShape, Outcome, Simulation
from benchmarks.control_plane.simulator.workload import TenantLoad, Workload
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import WorkerLimits

LIMITS = WorkerLimits(
    num_blocks=32_768,  # 64 GiB of KV of an 8B model
    num_host_blocks=16_384,
    block_size=16,
    max_rows=256,
    max_step_tokens=8192,
    num_slots=512,
    arena_bytes=32 << 30,
    max_model_len=8192,
)
OBJECTIVE = Objective(ttft_s=1.0, itl_s=0.05)


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """Many workers, adapters and requests under the default settings."""
    num_workers = options.workers or 1000
    workload = workload_of(
        options,
        num_workers,
        requests=1_000_000,
        adapters=100_000,
        rate=400.0,
        output_tokens=(1, 64),
        output_median=12,
    )
    outcome = simulate(workload, FleetShape(num_workers=num_workers), SchedulerSettings(), options)
    return {"scale": summary(outcome, num_workers, OBJECTIVE)}


def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Workers that die and come back; the simulation asserts that each request gets each of its tokens once."""
    num_workers = options.workers or 20
    workload = workload_of(
        options,
        num_workers,
        requests=20_000,
        adapters=1000,
        rate=60.0,
    )
    rows = {}
    for per_hour in (0.0, 30.0, 120.0):
        shape = FleetShape(num_workers=num_workers, failures_per_hour=per_hour, restart_s=10.0)
        outcome = simulate(workload, shape, SchedulerSettings(), options)
        rows[f"{per_hour:g} failures an hour and worker"] = summary(outcome, num_workers, OBJECTIVE)
    return rows


def preemption(options: argparse.Namespace) -> dict[str, Any]:
    """A KV cache too small for what is requested, half of it four completions at once, without and with host blocks."""
    num_workers = options.workers or 1
    workload = workload_of(
        options,
        num_workers,
        requests=3000,
        adapters=50,
        rate=20.0,
        output_median=128,  # requests grow long after they were admitted
        group_share=0.5,
    )
    rows = {}
    for name, num_host_blocks in (("recompute", 0), ("swap", 8192)):
        limits = replace(LIMITS, num_blocks=768, num_host_blocks=num_host_blocks)
        outcome = simulate(workload, FleetShape(num_workers=num_workers), SchedulerSettings(), options, limits=limits)
        rows[name] = summary(outcome, num_workers, OBJECTIVE)
    return rows


def policies(options: argparse.Namespace) -> dict[str, Any]:
    """The same trace at rising rates under each policy. A tenth of the prompts is long."""
    num_workers = options.workers or 1
    base = workload_of(options, num_workers, requests=3000, adapters=2000, rate=1.0, long_share=0.1)
    shape = FleetShape(num_workers=num_workers)
    rows: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for policy in Policy:
        for rate in (options.rate,) if options.rate else (10.0, 20.0, 30.0, 40.0, 50.0, 60.0):
            workload = replace(base, requests_per_s=rate * num_workers)
            outcome = simulate(workload, shape, SchedulerSettings(policy=policy), options)
            figures = summary(outcome, num_workers, OBJECTIVE)
            rows.setdefault(policy.value, []).append((rate * num_workers, figures))
    if options.charts is not None:
        draw_curves(rows, options.charts / "policies.png")
    return {name: dict(points) for name, points in rows.items()}


def fairness(options: argparse.Namespace) -> dict[str, Any]:
    """Two tenants of equal weight who both ask for more than their half, one of them ten times as much."""
    num_workers = options.workers or 1
    tenants = (TenantLoad("flooding", 10.0), TenantLoad("steady", 1.0))
    workload = workload_of(
        options,
        num_workers,
        requests=40_000,
        adapters=50,
        rate=1600.0,
        tenants=tenants,
    )
    names = [tenant.name for tenant in tenants]
    until_s = workload.num_requests / workload.requests_per_s  # both ask all the time
    outcomes, rows = {}, {}
    for policy in (Policy.CHUNKED_PREFILL, Policy.FCFS):
        settings = SchedulerSettings(policy=policy)
        outcome = simulate(workload, FleetShape(num_workers=num_workers), settings, options, until_s=until_s)
        totals = {name: served(outcome, name) for name in names}
        # The first windows fill the rows of an idle worker: whoever comes first is served, there is nothing to share.
        begin = int(5 / WINDOW_S)
        service = {name: float(total[-1] - total[begin]) for name, total in totals.items()}
        rows[policy.value] = {**service, "steady_over_flooding": service["steady"] / service["flooding"]}
        outcomes[policy.value] = outcome
    if options.charts is not None:
        draw_service(outcomes, names, options.charts / "fairness.png")
    return rows


def workload_of(
    options: argparse.Namespace, num_workers: int, *, requests: int, adapters: int, rate: float, **more: Any
) -> Workload:
    """So many requests, adapters, and requests per second and worker, where the options do not say how many."""
    return Workload(
        num_requests=options.requests or requests,
        num_adapters=options.adapters or adapters,
        requests_per_s=(options.rate or rate) * num_workers,
        seed=options.seed,
        **more,
    )


def simulate(
    workload: Workload,
    shape: FleetShape,
    settings: SchedulerSettings,
    options: argparse.Namespace,
    *,
    limits: WorkerLimits = LIMITS,
    until_s: float | None = None,
) -> Outcome:
    """One run over the production scheduler and placement."""
    counters = VirtualCounters()
    costs = Costs() if options.link_ms is None else Costs(link_s=options.link_ms / 1000)
    simulation = Simulation(shape, costs, lambda: Scheduler(limits, settings, counters), workload.seed)
    return simulation.run(workload.requests(), until_s=until_s)


SCENARIOS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "scale": scale,
    "policies": policies,
    "fairness": fairness,
    "preemption": preemption,
    "failures": failures,
}

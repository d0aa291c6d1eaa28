"""What one scheduler reports of itself at one moment: frozen values, and how the counts are taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from control_plane.scheduler.step.plan_draft import InFlightStep
from control_plane.scheduler.step.planner import Planner
from control_plane.scheduler.step.step_results import StepResults
from control_plane.scheduler.step.worker_state import WorkerState
from control_plane.scheduler.types import AdapterTier


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of one worker's scheduler; totals count from its beginning."""

    num_waiting: int  # requests that hold no row, preempted and paused ones included
    num_running: int  # requests that hold a row
    num_rows_requested: int  # rows that are held, and one for each request that waits for one
    num_paused: int  # requests whose reader is slow, waiting or running
    num_blocks: int  # KV blocks of the worker
    num_blocks_held: int  # blocks in some request's table
    num_blocks_cached: int  # blocks in the prefix cache that no request holds
    num_plans_in_flight: int  # plans sent whose results have not come
    arena_used_bytes: int  # slots that load, hold or give up an adapter
    num_adapters_loaded: int  # slots ready for use
    prefix_query_tokens: int  # total of tokens looked up at first admissions
    prefix_hit_tokens: int  # total of those found in the prefix cache
    num_preemptions: int  # total, by recompute and by swap
    num_swapped: int  # requests whose blocks lie in host memory, counted as waiting too
    num_swapped_out: int  # total of preemptions by swap
    num_host_blocks: int  # KV blocks of the worker in host memory
    num_host_blocks_held: int  # of those, blocks with KV of a sequence
    num_tokens_sampled: int  # total of accepted tokens
    # Whether requests could run and nothing is under way that they could wait for. True right after `plan` is a bug.
    is_stuck: bool

    def reported(self) -> dict[str, Any]:
        """What a worker's status reports, by name: every field but those that only checks need."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _UNREPORTED}


# For checks and for the workload of the fleet; every other field is one of status.proto's WorkerStatus.
_UNREPORTED = ("num_rows_requested", "num_paused", "is_stuck")


def scheduler_stats(
    worker: WorkerState,
    planner: Planner,
    results: StepResults,
    in_flight: Iterable[InFlightStep],
    *,
    num_waiting: int,
    is_stuck: bool,
) -> SchedulerStats:
    """Counts of this moment, from the scheduler's parts."""
    host = worker.swap.host
    return SchedulerStats(
        num_waiting=num_waiting,
        num_running=worker.rows.num_groups,
        num_rows_requested=len(worker.rows.held) + num_waiting,
        num_paused=worker.lifecycle.num_paused,
        num_blocks=worker.pool.num_blocks,
        num_blocks_held=worker.pool.num_held,
        num_blocks_cached=len(worker.pool.evictable),
        num_plans_in_flight=sum(step.ends_plan for step in in_flight),
        arena_used_bytes=worker.slots.used_bytes,
        num_adapters_loaded=len(worker.slots.ready_digests()),
        prefix_query_tokens=planner.prefix_query_tokens,
        prefix_hit_tokens=planner.prefix_hit_tokens,
        num_preemptions=worker.lifecycle.num_preemptions,
        num_swapped=len(worker.queues.swapped),
        num_swapped_out=worker.swap.num_swapped_out,
        num_host_blocks=host.num_blocks,
        num_host_blocks_held=host.num_blocks - host.num_free,
        num_tokens_sampled=results.num_tokens_sampled,
        is_stuck=is_stuck,
    )


class WorkerUtilization(NamedTuple):  # one is made for each worker that is priced: faster than a frozen dataclass
    """How busy one worker is, and what it already has of one request: what placement prices."""

    step_us: float  # one decode step, microseconds
    prefill_us_per_token: float
    num_rows: int  # in all
    num_rows_requested: int  # by unfinished requests, running or waiting
    num_waiting: int  # requests without a row
    num_blocks: int  # in all
    num_free_blocks: int
    block_size: int  # tokens
    tier: AdapterTier  # where the request's adapter is, of several the farthest; READY for the base model
    num_hit_tokens: int  # of the request, in the prefix cache
    load_us: float = 0.0  # of the worker's usual load from the host cache, microseconds; 0: not known yet
    load_bytes: float = 0.0  # of that adapter
    num_load_bytes: int = 0  # of the request's adapters that are not ready


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """What one worker has of one adapter."""

    is_ready: bool  # in a slot: plans may use it at once
    is_held: bool  # by a live or leaving request, a slot or a cached block

"""What an operator sets about the workers, and what the fleet tells about them: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.fleet.tenants import TenantTable
from control_plane.scheduler.settings import DEFAULT_SETTINGS, SchedulerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Bounds and times of the fleet. Server settings of the same names end here."""

    max_waiting_requests: int = 1024  # accepted and not yet running, over all workers; beyond: QueueFull
    plan_depth: int = 2  # plans sent to a worker and not answered
    heartbeat_interval_ms: int = 500  # either side, milliseconds
    dead_after_ms: int = 2000  # a peer that was silent for so long is dead, milliseconds
    worker_grace_s: float = 30.0  # how long requests wait for a worker when none is attached, seconds
    slow_reader_timeout_s: float = 30.0  # how long a full stream may stay unread, seconds
    quarantine_s: float = 5.0  # how long a worker that sent garbage stays out, seconds
    scheduler: SchedulerSettings = DEFAULT_SETTINGS  # of every worker
    tenants: TenantTable = field(default_factory=TenantTable)  # weights and quotas

    def __post_init__(self) -> None:
        for name in ("max_waiting_requests", "plan_depth", "heartbeat_interval_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.dead_after_ms < 2 * self.heartbeat_interval_ms:
            raise ValueError(
                f"dead_after_ms: {self.dead_after_ms} is below two heartbeat intervals of {self.heartbeat_interval_ms}"
            )
        for name in ("worker_grace_s", "slow_reader_timeout_s", "quarantine_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One attached worker at one moment; the fields of status.proto's WorkerStatus."""

    worker_id: str
    device: str
    epoch: int
    num_steps: int
    num_plans_in_flight: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_held: int
    num_blocks_cached: int
    block_size: int  # tokens
    arena_bytes: int
    arena_used_bytes: int
    num_adapters_loaded: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    num_tokens_sampled: int
    num_plans: int  # sent; fewer than steps where plans stand for several
    max_plan_steps: int  # steps that a plan may stand for at this moment
    round_trip_ms: float  # median of the last pings; 0 before the first
    step_time_ms: float  # mean of the last steps
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """Requests over all workers at one moment; the fields of status.proto's QueueStatus."""

    num_requests: int
    num_waiting: int
    num_running: int
    num_accepted: int
    num_finished: int
    num_rejected: int
    num_migrated: int

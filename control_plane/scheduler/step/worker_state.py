"""The parts that hold the state of one worker. The planner and the step results work on them."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.adapter_demands import AdapterDemands
from control_plane.scheduler.memory.adapter_purge import AdapterPurge
from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.memory.block_pool import BlockPool
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.memory.slot_placement import SlotPlacement
from control_plane.scheduler.queues.request_queues import RequestQueues
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.step.lifecycle import Lifecycle
from control_plane.scheduler.step.running_rows import RunningRows
from control_plane.scheduler.step.swap_space import SwapSpace
from control_plane.scheduler.step_costs import StepCosts
from control_plane.scheduler.types import WorkerLimits


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Each part owns its state; nothing here is replaced."""

    limits: WorkerLimits
    pool: BlockPool
    cache: PrefixCache
    demands: AdapterDemands
    slots: AdapterSlots
    placement: SlotPlacement
    purge: AdapterPurge
    queues: RequestQueues
    rows: RunningRows
    swap: SwapSpace
    lifecycle: Lifecycle
    counters: VirtualCounters
    costs: StepCosts


def make_worker_state(limits: WorkerLimits, settings: SchedulerSettings, counters: VirtualCounters) -> WorkerState:
    """The parts of a worker without requests."""
    costs = StepCosts(settings)
    pool = BlockPool(limits.num_blocks)
    cache = PrefixCache(pool, limits.block_size)
    demands = AdapterDemands(counters)
    slots = AdapterSlots(limits.num_slots, limits.arena_bytes, demands)
    placement = SlotPlacement(slots, demands, is_strict=settings.policy is Policy.FCFS)
    purge = AdapterPurge(cache, slots, placement)
    queues = RequestQueues(limits, settings, slots, demands, counters)
    rows = RunningRows(limits, pool, cache, slots, purge, queues, counters)
    swap = SwapSpace(limits, settings.policy, costs, pool, cache)
    lifecycle = Lifecycle(queues, rows, swap, purge, counters)
    return WorkerState(
        limits, pool, cache, demands, slots, placement, purge, queues, rows, swap, lifecycle, counters, costs
    )

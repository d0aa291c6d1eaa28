"""Builds the parts of a fleet and joins them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.audit.audit_log import AuditLog
from control_plane.awake import AwakeClock
from control_plane.fleet.adapters.cache_warmer import WeightsLike
from control_plane.fleet.adapters.preloads import AdapterPreloads
from control_plane.fleet.adapters.residency import ArenaResidency
from control_plane.fleet.adapters.unloads import AdapterUnloads
from control_plane.fleet.attach import AttachedWorkers
from control_plane.fleet.delivery import Delivery
from control_plane.fleet.drains import WorkerDrains
from control_plane.fleet.gate.fencing import WorkerGate
from control_plane.fleet.gate.hello import BaseModelLike
from control_plane.fleet.intake import Intake
from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.placement.isolation import PoisonIsolation
from control_plane.fleet.placement.migration import Migration
from control_plane.fleet.placement.rebalance import Rebalancer
from control_plane.fleet.placement.shortlist import Shortlist
from control_plane.fleet.requests.active_adapters import ActiveAdapters
from control_plane.fleet.requests.quotas import TenantQuotas
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.slow_readers import SlowReaders
from control_plane.fleet.worker_waits import WorkerWaits
from control_plane.fleet.workers.sessions import SessionTable
from control_plane.fleet.workload import FleetWorkload
from control_plane.observers.timings import NO_TIMINGS, Timings
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.types import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetParts:
    """What a fleet consists of. Each part owns its state; the others call its methods."""

    settings: FleetSettings
    clock: Callable[[], float]
    quotas: TenantQuotas  # what each account uses
    counters: VirtualCounters  # service of each account, over all sessions
    jobs: UnfinishedJobs  # every unfinished request, and how one ends
    sessions: SessionTable  # which workers are attached
    isolation: PoisonIsolation  # suspects of killing workers, and the workers that are closed for them
    dispatcher: Dispatcher  # requests to workers
    rebalancer: Rebalancer  # from busy workers to idle ones
    migration: Migration  # from workers that are lost or fail
    slow_readers: SlowReaders
    delivery: Delivery  # tokens to streams
    gate: WorkerGate  # which workers may attach
    workers: AttachedWorkers  # sessions from Hello to end
    unloads: AdapterUnloads  # adapters on their way out
    preloads: AdapterPreloads  # adapters on their way into slots before requests need them
    residency: ArenaResidency  # loads and unloads by operators, and loads by pins
    active_adapters: ActiveAdapters  # which ones unfinished requests use
    drains: WorkerDrains  # workers that an operator is about to stop
    intake: Intake  # which requests are taken on
    workload: FleetWorkload  # how many workers the requests need


def assemble(
    settings: FleetSettings,
    base_model: BaseModelLike,
    weights: WeightsLike,
    incarnation: int,
    clock: Callable[[], float] = time.monotonic,
    audit: AuditLog | None = None,
    vocabulary: Vocabulary | None = None,
    timings: Timings = NO_TIMINGS,
) -> FleetParts:
    """The parts of a new fleet. Call it inside a running event loop.

    `incarnation` is the control plane's and counts up at every start. `audit` has a line for each worker that comes,
    goes or is refused. `vocabulary` is what constraints of the base model are over: each session begins with it.
    """
    awake = AwakeClock(clock)  # for everything that is judged by silence
    quotas = TenantQuotas(settings.tenants, clock)
    counters = VirtualCounters(
        {tenant: limits.weight for tenant, limits in settings.tenants.named.items()},
        default_weight=settings.tenants.default.weight,
    )
    jobs = UnfinishedJobs(quotas)
    sessions = SessionTable()
    isolation = PoisonIsolation(sessions, jobs, settings, awake)
    shortlist = Shortlist()
    costs, is_cached = settings.placement, weights.is_cached
    dispatcher = Dispatcher(costs, is_cached, jobs, sessions, isolation, shortlist)
    rebalancer = Rebalancer(costs, is_cached, jobs, sessions, isolation, shortlist, dispatcher)
    migration = Migration(jobs, sessions, isolation, dispatcher)
    slow_readers = SlowReaders(settings.slow_reader_timeout_s, awake, jobs, dispatcher)
    delivery = Delivery(jobs, dispatcher, migration, slow_readers, quotas, weights.damage)
    gate = WorkerGate(settings, base_model, incarnation, clock)
    unloads, preloads = AdapterUnloads(sessions, jobs), AdapterPreloads(sessions)
    workers = AttachedWorkers(
        settings=settings,
        gate=gate,
        weights=weights,
        counters=counters,
        jobs=jobs,
        sessions=sessions,
        dispatcher=dispatcher,
        migration=migration,
        delivery=delivery,
        unloads=unloads,
        preloads=preloads,
        clock=clock,
        awake=awake,
        audit=audit or AuditLog(),
        vocabulary=vocabulary,
        timings=timings,
    )
    waits = WorkerWaits(settings, workers, awake)
    intake = Intake(settings, quotas, counters, jobs, sessions, dispatcher, delivery, waits)
    return FleetParts(
        settings=settings,
        clock=clock,
        quotas=quotas,
        counters=counters,
        jobs=jobs,
        sessions=sessions,
        isolation=isolation,
        dispatcher=dispatcher,
        rebalancer=rebalancer,
        migration=migration,
        slow_readers=slow_readers,
        delivery=delivery,
        gate=gate,
        workers=workers,
        unloads=unloads,
        preloads=preloads,
        residency=ArenaResidency(sessions, preloads, clock),
        active_adapters=ActiveAdapters(sessions, jobs),
        drains=WorkerDrains(sessions, jobs, dispatcher, workers),
        intake=intake,
        workload=FleetWorkload(sessions, jobs, dispatcher, waits),
    )

"""Which worker a request goes to. Policy only, no state.

Every worker is priced in milliseconds: how long the request is expected to take there. T is the worker's decode step,
n the number of tokens that the request is expected to generate, and n * T the time that such a request keeps its row
and its blocks:

    cost    = max(wait, adapter) + prefill + decode
    wait    = max(rows short / rows, blocks short / blocks) * n * T     until others have ended
    adapter = 0 in a slot, half a load while it is loading, else a load; n * T / 2 more if every slot is leased
    load    = measured load of the worker * estimate(this size) / estimate(measured size), plus MiB * store_ms_per_mib
              unless the host cache has the adapter; estimate(MiB) = load_ms + MiB * slot_ms_per_mib
    prefill = (known tokens that are not in the worker's prefix cache
               + all known tokens for each request that waits there) * time of a prefill token
    decode  = n * T * full_batch_slowdown * utilization     utilization: rows held, and requests that wait, over rows

A request that waits there is taken to be as long as this one. The cheapest worker is taken; among equal ones, the lower
worker id. Of many workers, the cheapest on a shortlist is taken (shortlist.py). Speed counts only if something waits or
shares a batch: the price of an idle worker does not depend on the steps that it did while it was full.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.settings import PlacementCosts
from control_plane.fleet.workers.session import WorkerSession
from control_plane.scheduler.scheduler import PrefixKeys, Scheduler, WorkerUtilization
from control_plane.scheduler.types import AdapterTier, Request

MAX_LOAD_TRIES = 4  # workers that may fail to load a request's adapter before it is given up


@dataclass(slots=True)
class Need:
    """What one request needs from a worker."""

    num_store_bytes: int  # of its adapters that the host cache lacks
    num_known_tokens: int  # prompt and what was generated elsewhere
    num_new_tokens: int  # expected to be generated, per completion
    num_rows: int  # completions
    prefix: PrefixKeys


def cost_ms(worker: WorkerUtilization, need: Need, costs: PlacementCosts) -> float:
    """Milliseconds that the request is expected to take on the worker; the formula is above."""
    service_ms = need.num_new_tokens * worker.step_us / 1000
    num_prefill_tokens = need.num_known_tokens - worker.num_hit_tokens
    row_tokens = need.num_known_tokens + need.num_rows * need.num_new_tokens
    num_blocks = -(-row_tokens // worker.block_size) * (1 + worker.num_waiting)
    rows_short = max(0, worker.num_rows_requested + need.num_rows - worker.num_rows) / worker.num_rows
    blocks_short = max(0, num_blocks - worker.num_free_blocks) / worker.num_blocks
    wait_ms = max(rows_short, blocks_short) * service_ms
    adapter_ms = 0.0
    if worker.tier is not AdapterTier.READY:
        adapter_ms = _load_ms(worker, worker.num_load_bytes, costs)
        adapter_ms += min(need.num_store_bytes, worker.num_load_bytes) / 2**20 * costs.store_ms_per_mib
        if worker.tier is AdapterTier.LOADING:
            adapter_ms /= 2
        elif worker.tier is AdapterTier.NO_ROOM:
            adapter_ms += service_ms / 2
    prefill_ms = (num_prefill_tokens + worker.num_waiting * need.num_known_tokens) * worker.prefill_us_per_token / 1000
    utilization = worker.num_rows_requested / worker.num_rows
    return max(wait_ms, adapter_ms) + prefill_ms + service_ms * costs.full_batch_slowdown * utilization


def _load_ms(worker: WorkerUtilization, num_bytes: float, costs: PlacementCosts) -> float:
    """Time to load an adapter of this size from the host cache."""
    estimate_ms, measured_size_ms = (
        costs.load_ms + size / 2**20 * costs.slot_ms_per_mib for size in (num_bytes, worker.load_bytes)
    )
    if worker.load_us == 0:  # not measured yet
        return estimate_ms
    return worker.load_us / 1000 * (estimate_ms / measured_size_ms if measured_size_ms > 0 else 1.0)


def need_of(request: Request, costs: PlacementCosts, is_cached: Callable[[str], bool]) -> Need:
    """What the request needs. `is_cached`: whether the host cache has an adapter, by digest."""
    num_generated = max(
        (len(completion.token_ids) for completion in request.completions), default=len(request.generated_token_ids)
    )
    return Need(
        num_store_bytes=sum(ref.arena_bytes for ref in request.adapters if not is_cached(ref.digest)),
        num_known_tokens=len(request.prompt_token_ids) + num_generated,
        num_new_tokens=min(costs.expected_tokens, max(1, request.max_tokens - num_generated)),
        num_rows=request.num_indices,
        prefix=PrefixKeys(request),
    )


class Candidate(Protocol):
    """A worker as far as it is priced."""

    worker_id: str
    scheduler: Scheduler


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def suited(job: Job, sessions: Iterable[WorkerSession]) -> list[WorkerSession]:
    """Sessions that the job fits; without those where it failed, unless it failed on all of them.

    If the job's logits were not finite, only sessions that gave tokens lately, if one did: a sick worker is idle, and
    would otherwise be the first choice.
    """
    fitting = [session for session in sessions if session.refusal(job.request) is None]
    untried = [session for session in fitting if not _has_failed_at(session, job)] or fitting
    return [session for session in untried if job.not_finite_at and session.steps.gives_tokens] or untried


def has_failed_anywhere(job: Job) -> bool:
    """Whether it matters which worker the job goes to."""
    return bool(job.failed_load_epochs) or bool(job.not_finite_at)


def _has_failed_at(session: WorkerSession, job: Job) -> bool:
    """Whether the worker could not load the job's adapter, or its logits were not finite there."""
    was_not_finite = any(seen.worker_id == session.worker_id for seen in job.not_finite_at)
    return was_not_finite or session.epoch in job.failed_load_epochs


def price(session: Candidate, need: Need, costs: PlacementCosts) -> float:
    """Milliseconds that the request is expected to take on this worker."""
    return cost_ms(session.scheduler.utilization(need.prefix), need, costs)


def by_preference(sessions: Iterable[AnyCandidate], need: Need, costs: PlacementCosts) -> Iterator[AnyCandidate]:
    """The sessions, best first."""
    heap = [(price(session, need, costs), session.worker_id, session) for session in sessions]
    heapq.heapify(heap)  # mostly only the first is needed
    while heap:
        yield heapq.heappop(heap)[2]

"""What worker deaths say about the requests that were being computed. Rules over one request's record, no state.

A request is a suspect after two deaths: a poison request kills whatever computes it, at the re-prefill or at the token
after it. So a request that gained more tokens at a worker than can be in flight has come past all deaths before, and
a process that outlived its session was killed by none of the session's requests.
"""

from __future__ import annotations

from collections.abc import Set

from control_plane.fleet.requests.jobs import Death, Job
from control_plane.scheduler.types import MAX_PLAN_STEPS

DEATHS_TO_SUSPECT = 2
# A request that is no suspect is given up after so many deaths, or after so many losses in a row without a token. Far
# above what befalls a request beside a poison one, whose deaths are forgiven once it is found.
MAX_DEATHS = 8
MAX_FRUITLESS_LOSSES = 3


def is_suspect(job: Job) -> bool:
    """Whether the request may be what kills workers."""
    return len(job.deaths) >= DEATHS_TO_SUSPECT and len(open_deaths(job)) >= DEATHS_TO_SUSPECT


def open_deaths(job: Job) -> list[str]:
    """Worker ids of the deaths that still speak against the request."""
    return [death.worker_id for death in job.deaths if not death.is_cleared]


def has_come_past(job: Job, plan_depth: int) -> bool:
    """Whether the request has come past the point where it would have killed the worker that has it."""
    return _num_gained(job) > most_in_flight(job, plan_depth)


def most_in_flight(job: Job, plan_depth: int) -> int:
    """Tokens of the request that can be in flight, and the one after them."""
    return (plan_depth * MAX_PLAN_STEPS + 1) * job.request.num_indices


def book(job: Job, death: Death, plan_depth: int) -> None:
    """The worker that computed the request has died, and the request may be the reason."""
    if has_come_past(job, plan_depth):
        clear(job)
    job.num_losses += 1
    job.num_fruitless_losses = 0 if _num_gained(job) else job.num_fruitless_losses + 1
    job.deaths.append(death)


def clear(job: Job) -> None:
    """Nothing that happened so far speaks against the request any more."""
    job.num_fruitless_losses = 0
    for death in job.deaths:
        death.is_cleared = True


def forgive(job: Job, epochs: Set[int]) -> None:
    """The request was not the reason of these deaths."""
    if job.deaths:
        job.deaths = [death for death in job.deaths if death.epoch not in epochs]


def is_given_up(job: Job) -> bool:
    """Whether a request that lost its worker once more may not go on. Suspects may: they are isolated."""
    has_too_many = len(job.deaths) > MAX_DEATHS or job.num_fruitless_losses > MAX_FRUITLESS_LOSSES
    return has_too_many and not is_suspect(job)


def _num_gained(job: Job) -> int:
    """Tokens at the worker that has the request, those that a beam search tried included."""
    assert job.session is not None, "a request without a worker"
    return max(job.num_tokens_here, job.session.scheduler.num_searched(job.request.request_id))

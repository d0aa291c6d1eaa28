"""What worker deaths say about the requests that were being computed: rules over one request's record.

No other module writes what a job records of deaths and losses.

A poison request kills every worker that computes it, at the re-prefill or at the token after it. So a request is a
suspect after two deaths. It has survived if it gained more tokens at a worker than can be in flight. And if a process
outlived its session, none of the session's requests killed it.
"""

from __future__ import annotations

from collections.abc import Set

from contract.plan_stream.plan_bounds import MAX_PLAN_STEPS
from control_plane.fleet.requests.jobs import Death, Job

DEATHS_TO_SUSPECT = 2
# A request that is not a suspect is given up after more deaths, or more losses in a row without a token. This is
# far above what happens to a request beside a poison request: its deaths are discounted once that is found.
MAX_DEATHS = 8
MAX_FRUITLESS_LOSSES = 3


def is_suspect(job: Job) -> bool:
    """Whether the request may be the one that kills workers."""
    return len(job.deaths) >= DEATHS_TO_SUSPECT and len(open_deaths(job)) >= DEATHS_TO_SUSPECT


def open_deaths(job: Job) -> list[str]:
    """Worker ids of the deaths that still count against the request."""
    return [death.worker_id for death in job.deaths if not death.is_cleared]


def has_survived(job: Job, plan_depth: int) -> bool:
    """Whether the request got past the point where it would have killed its present worker."""
    return _num_gained(job) > most_in_flight(job, plan_depth)


def most_in_flight(job: Job, plan_depth: int) -> int:
    """Tokens of the request that can be in flight, plus the token after them."""
    return (plan_depth * MAX_PLAN_STEPS + 1) * job.request.num_indices


def record_death(job: Job, death: Death, plan_depth: int) -> None:
    """Record that the worker that computed the request died, and that the request may be the reason."""
    if has_survived(job, plan_depth):
        clear(job)
    job.num_losses += 1
    job.num_fruitless_losses = 0 if _num_gained(job) else job.num_fruitless_losses + 1
    job.deaths.append(death)


def clear(job: Job) -> None:
    """Let no death so far count against the request."""
    job.num_fruitless_losses = 0
    for death in job.deaths:
        death.is_cleared = True


def discount(job: Job, epochs: Set[int]) -> None:
    """Drop the deaths of these sessions: the request did not cause them."""
    if job.deaths:
        job.deaths = [death for death in job.deaths if death.epoch not in epochs]


def excuse_fleet_loss(job: Job) -> None:
    """Record that the loss of a whole fleet was discounted for the request, which happens once."""
    job.had_fleet_loss = True


def forget_fruitless_losses(job: Job) -> None:
    """Let no loss so far count as one without a token: something else explains them."""
    job.num_fruitless_losses = 0


def is_given_up(job: Job) -> bool:
    """Whether a request that lost its worker again may not go on. Suspects may: they run in isolation."""
    has_too_many = len(job.deaths) > MAX_DEATHS or job.num_fruitless_losses > MAX_FRUITLESS_LOSSES
    return has_too_many and not is_suspect(job)


def _num_gained(job: Job) -> int:
    """Tokens gained at the present worker, those that a beam search tried included."""
    assert job.session is not None, "a request without a worker"
    progress = job.session.scheduler.progress(job.request.request_id)
    return max(job.num_tokens_here, 0 if progress is None else progress.num_searched)

"""What happens in a second: the differences of two statuses."""

from __future__ import annotations

from dataclasses import dataclass

from motet.types import ServerStatus


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Rates of one worker, each per second."""

    num_tokens: float
    num_steps: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the system, each per second. What began or restarted between the two statuses has no rate."""

    workers: dict[str, WorkerRates]  # by worker id
    generated_by_tenant: dict[str, float]  # tokens
    num_accepted: float
    num_finished: float
    num_rejected: float

    @property
    def num_tokens(self) -> float:
        """Tokens of all workers."""
        return sum(worker.num_tokens for worker in self.workers.values())


def rates_of(before: ServerStatus, after: ServerStatus, seconds: float) -> Rates:
    """The rates over the time between two statuses, `seconds` above 0."""
    workers = {worker.worker_id: worker for worker in before.workers}
    former_tokens = {tenant.tenant: tenant.num_generated_tokens for tenant in before.tenants}
    return Rates(
        workers={
            worker.worker_id: WorkerRates(
                num_tokens=(worker.num_tokens_sampled - former.num_tokens_sampled) / seconds,
                num_steps=(worker.num_steps - former.num_steps) / seconds,
            )
            for worker in after.workers
            if (former := workers.get(worker.worker_id)) is not None and former.epoch == worker.epoch
        },
        generated_by_tenant={
            tenant.tenant: max(tenant.num_generated_tokens - former_tokens[tenant.tenant], 0) / seconds
            for tenant in after.tenants
            if tenant.tenant in former_tokens
        },
        num_accepted=max(after.queues.num_accepted - before.queues.num_accepted, 0) / seconds,
        num_finished=max(after.queues.num_finished - before.queues.num_finished, 0) / seconds,
        num_rejected=max(after.queues.num_rejected - before.queues.num_rejected, 0) / seconds,
    )

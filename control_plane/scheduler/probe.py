"""What tests and tools may see of a scheduler beside its public methods. No part of a server imports this module."""

from __future__ import annotations

from control_plane.scheduler.scheduler import Scheduler, scheduler_parts
from control_plane.scheduler.step.preemption import choose_paused
from control_plane.scheduler.types import RequestId


class SchedulerProbe:
    """Looks into one scheduler. Every value is a copy."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._parts = scheduler_parts(scheduler)
        self._worker = self._parts.worker

    # ---- requests ----

    def running_ids(self) -> list[RequestId]:
        """For every row that is held, the request that holds it, in order of arrival."""
        return [row.sequence.request_id for row in self._worker.rows.held]

    def num_queued(self) -> int:
        """Requests in the waiting queue."""
        return len(self._worker.queues.waiting)

    def set_aside_ids(self) -> list[RequestId]:
        """Requests that wait for room and that others may pass."""
        return list(self._worker.queues.waiting.aside)

    def ids_preempted_for_room(self) -> set[RequestId]:
        """Live requests that were preempted once for a request that lacked room."""
        return {
            request_id for request_id, group in self._worker.lifecycle.groups.items() if group.was_preempted_for_room
        }

    def latest_paused_id(self) -> RequestId | None:
        """The paused request that is preempted first when anything is short, or None."""
        group = choose_paused(self._worker.rows.held)
        return None if group is None else group.request.request_id

    def preempt(self, request_id: RequestId) -> None:
        """Preempt a running request now, as a lack of rows, blocks or slots would."""
        self._worker.lifecycle.preempt(self._worker.lifecycle.groups[request_id])

    def sampled_rows(self) -> list[int]:
        """Rows that the result of the latest planned step must name, in its order."""
        return list(self._parts.in_flight[-1].sampled_rows)

    def service_of(self, tenant: str) -> float:
        """The tenant's virtual counter."""
        return self._parts.counters.counter(tenant)

    # ---- blocks ----

    def block_tables(self) -> list[list[int]]:
        """The block table of every row that is held, in order of arrival of the requests."""
        return [list(row.block_ids) for row in self._worker.rows.held]

    def free_blocks(self) -> set[int]:
        """Blocks that no request holds and that are not in the prefix cache."""
        return set(self._worker.pool.free)

    def num_cache_blocks(self) -> int:
        """Blocks in the prefix cache, held or not."""
        return len(self._worker.cache)

    def num_hashed_blocks(self, request_id: RequestId) -> int:
        """Blocks of the request's first sequence whose keys in the prefix cache were computed."""
        return len(self._worker.lifecycle.groups[request_id].members[0].block_hashes)

    def moves_to_come(self) -> list[tuple[int, int]]:
        """(block, host block) of moves to host memory that the next plan carries."""
        return list(self._worker.swap.outs)

    def ids_moving_out(self) -> dict[RequestId, bool]:
        """Live requests whose blocks the next plan moves to host memory, and whether a step in flight names them."""
        host_blocks = {host_block for _, host_block in self._worker.swap.outs}
        return {
            request_id: any(member.row is not None and member.row.num_in_flight > 0 for member in group.members)
            for request_id, group in self._worker.lifecycle.groups.items()
            if any(host_blocks.intersection(member.host_block_ids) for member in group.members)
        }

    # ---- adapters ----

    def ready_digests(self) -> set[str]:
        """Adapters that plans may use at once."""
        return self._worker.slots.ready_digests()

    def has_cached_blocks(self, digest: str) -> bool:
        """Whether a block of the adapter is in the prefix cache."""
        return self._worker.cache.has_digest(digest)

"""The queues of one worker: requests that wait for admission, and requests that wait to return from host memory.

Joining a queue also records the demand for the request's adapter, and that the account waits; leaving takes both back.
"""

from __future__ import annotations

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.adapter_demands import AdapterDemands
from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.queues.arrival_queue import ArrivalQueue
from control_plane.scheduler.queues.swapped_queue import SwappedQueue
from control_plane.scheduler.queues.waiting_queue import WaitingQueue
from control_plane.scheduler.requests.sequence import SequenceGroup
from control_plane.scheduler.requests.states import GroupState
from control_plane.scheduler.requests.transitions import move_group
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import RequestId, WorkerLimits


class RequestQueues:
    """The requests that wait on one worker."""

    def __init__(
        self,
        limits: WorkerLimits,
        settings: SchedulerSettings,
        slots: AdapterSlots,
        demands: AdapterDemands,
        counters: VirtualCounters,
    ) -> None:
        self._slots = slots
        self._demands = demands
        self._counters = counters
        self.waiting: ArrivalQueue | WaitingQueue
        if settings.policy is Policy.FCFS:
            self.waiting = ArrivalQueue(counters, is_admissible=slots.is_admissible)
        else:
            self.waiting = WaitingQueue(
                counters,
                is_admissible=slots.is_admissible,
                is_active=slots.is_active,
                long_tokens=settings.long_tokens(limits),
            )
        self.swapped = SwappedQueue(slots, counters)
        # Of the waiting requests those that never ran here, in the order in which they came.
        self.unstarted: dict[RequestId, SequenceGroup] = {}

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits that could take rows if there were enough room."""
        return self.waiting.is_awaited or self.swapped.peek() is not None

    def join_waiting(self, group: SequenceGroup) -> None:
        """Let a request wait for admission, in its place by arrival."""
        move_group(group, GroupState.WAITING)
        self._demand_adapter(group)
        self.waiting.add(group)
        if group.first_scheduled_s is None:
            self.unstarted[group.request.request_id] = group

    def leave_waiting(self, group: SequenceGroup) -> None:
        """Take a request out of the waiting queue; the caller moves it to its next state."""
        self.waiting.remove(group)
        self._release_adapter(group)
        self.unstarted.pop(group.request.request_id, None)

    def join_swapped(self, group: SequenceGroup) -> None:
        """Let a request wait for its return from host memory."""
        move_group(group, GroupState.SWAPPED)
        if not group.is_paused:
            self._demand_adapter(group)
        self.swapped.add(group)
        self._counters.run(group.request.account)  # its account must be kept: the request returns by its counter

    def leave_swapped(self, group: SequenceGroup) -> None:
        """Take a request out of the swapped queue; the caller moves it to its next state."""
        self.swapped.remove(group)
        self._counters.stop_running(group.request.account)
        if not group.is_paused:
            self._release_adapter(group)

    def pause(self, group: SequenceGroup) -> None:
        """A request is paused: take it out of the waiting queue; in the swapped queue it is passed over."""
        if group.state is GroupState.WAITING:
            self.leave_waiting(group)
            move_group(group, GroupState.PAUSED)
        elif group.state is GroupState.SWAPPED:
            self._release_adapter(group)

    def resume(self, group: SequenceGroup) -> None:
        """A request is not paused any more: undo `pause`."""
        if group.state is GroupState.PAUSED:
            self.join_waiting(group)
        elif group.state is GroupState.SWAPPED:
            self._demand_adapter(group)

    def mark_ready_adapters(self) -> None:
        """Let requests take part whose adapters became admissible."""
        for digest in self._slots.take_admissible_again():
            self.waiting.mark_ready(digest)

    def _demand_adapter(self, group: SequenceGroup) -> None:
        if group.request.adapter is not None:
            self._demands.add_request(group.request)

    def _release_adapter(self, group: SequenceGroup) -> None:
        if group.request.adapter is not None:
            self._demands.remove_request(group.request)

"""The life of a request on one worker: it comes, is paused, resumed and preempted, ends, gives back what it held.

The planner decides which request takes rows; everything else that moves a request is here.
"""

from __future__ import annotations

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.adapter_purge import AdapterPurge
from control_plane.scheduler.queues.request_queues import RequestQueues
from control_plane.scheduler.requests.sequence import Row, Sequence, SequenceGroup
from control_plane.scheduler.requests.states import GroupState, SequenceState
from control_plane.scheduler.requests.transitions import move_group
from control_plane.scheduler.step.running_rows import RunningRows
from control_plane.scheduler.step.swap_space import SwapSpace
from control_plane.scheduler.types import RequestId


class Lifecycle:
    """Every live request of one worker."""

    def __init__(
        self,
        queues: RequestQueues,
        rows: RunningRows,
        swap: SwapSpace,
        purge: AdapterPurge,
        counters: VirtualCounters,
    ) -> None:
        self._queues = queues
        self._rows = rows
        self._swap = swap
        self._purge = purge
        self._counters = counters
        self.groups: dict[RequestId, SequenceGroup] = {}  # live requests; ended ones leave it at once
        self.num_paused = 0  # of these
        self.num_preemptions = 0  # of requests, in all

    def add(self, group: SequenceGroup) -> None:
        """Queue a request that is not known yet."""
        self.groups[group.request.request_id] = group
        self._purge.add_request(group.request)
        self._queues.join_waiting(group)

    def pause(self, group: SequenceGroup) -> None:
        """Keep a request whose reader is slow from being scheduled."""
        if group.is_paused:
            return
        group.pause()
        self.num_paused += 1
        self._rows.regroup()
        self._queues.pause(group)

    def resume(self, group: SequenceGroup) -> None:
        """Schedule a paused request again."""
        if not group.is_paused:
            return
        group.resume()
        self.num_paused -= 1
        self._rows.regroup()
        self._queues.resume(group)

    def preempt(self, group: SequenceGroup) -> None:
        """Take all rows away; the group waits again once no step in flight names it.

        Its tokens are computed once more then, or its blocks come back from host memory.
        """
        if self._swap.is_better(group):
            self._swap.move_out(group)
        group.note_preemption()
        self.num_preemptions += 1
        self._leave_rows(group)

    def end(self, group: SequenceGroup) -> None:
        """The request is over: forget it, and give back what it holds as soon as no step in flight names it."""
        del self.groups[group.request.request_id]
        self.num_paused -= group.is_paused
        group.end()
        for sequence in group.members:
            sequence.end()
            self._swap.forget(sequence)
        if group.state is GroupState.WAITING:
            self._queues.leave_waiting(group)
        elif group.state is GroupState.SWAPPED:
            self._queues.leave_swapped(group)
        if group.num_rows > 0:
            self._rows.num_ending_groups += 1
            self._leave_rows(group)
        else:
            self._vanish(group)

    def end_sequence(self, sequence: Sequence) -> None:
        """One completion is complete; the request is over with the last of them."""
        sequence.end()
        self._swap.forget(sequence)
        if all(member.is_ended or member.is_cancelled for member in sequence.group.members):
            self.end(sequence.group)
        else:
            self._leave_row(sequence)

    def cancel_sequence(self, sequence: Sequence) -> None:
        """Cancel one completion. If other sequences still have to fork from it, its prefill is finished first.

        A beam search goes on unchanged: its completions are only known at its end.
        """
        if sequence.is_ended or sequence.group.searcher is not None:
            return
        sequence.cancel()
        row = sequence.row
        is_source = any(m.row is not None and m.row.forks_from is sequence for m in sequence.group.members)
        if is_source and row is not None and not row.is_decoding:
            sequence.end_at_next_token()
        else:
            self.end_sequence(sequence)

    def finish_leaving(self, row: Row) -> None:
        """Take the row away if it is leaving and no step in flight names it; any other row stays.

        A request that has not ended waits again once all its rows left.
        """
        if row.state is not SequenceState.LEAVING or row.num_in_flight > 0:
            return
        group = row.sequence.group
        self._rows.leave(row)
        if group.num_rows > 0:
            return
        for member in group.members:
            self._swap.trim(member)
        if group.is_ended:
            self._vanish(group)
        elif any(member.host_block_ids for member in group.members):
            self._queues.join_swapped(group)
        elif group.is_paused:
            move_group(group, GroupState.PAUSED)
        else:
            self._queues.join_waiting(group)
        for member in group.members:
            if member.is_cancelled:
                member.end()  # no sequence forks from it any more

    def abandon(self) -> None:
        """The worker is lost: no request of the accounts waits or runs here any more. Nothing else may follow."""
        for group in self._queues.waiting:
            self._counters.stop_waiting(group.request.account)
        with_rows = {id(row.sequence.group): row.sequence.group for row in self._rows.held}.values()
        for group in (*with_rows, *self._queues.swapped):
            self._counters.stop_running(group.request.account)

    def _leave_rows(self, group: SequenceGroup) -> None:
        move_group(group, GroupState.LEAVING)
        for sequence in list(group.members):
            self._leave_row(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self._rows.start_leaving(sequence.row)
            self.finish_leaving(sequence.row)

    def _vanish(self, group: SequenceGroup) -> None:
        move_group(group, GroupState.GONE)
        group.dissolve()
        self._purge.remove_request(group.request)

"""The counts of a scheduler, computed again from what its sequences hold and compared with what its parts say.

For tests and the random walk: it looks at everything, so it is not part of a step.
"""

from __future__ import annotations

from collections import Counter, deque

from contract.plan_stream.plan_bounds import MAX_PLAN_STEPS
from control_plane.scheduler.requests.sequence import Row, Sequence, SequenceGroup
from control_plane.scheduler.requests.states import GroupState, SequenceState
from control_plane.scheduler.scheduler import Scheduler, scheduler_parts
from control_plane.scheduler.step.decode_batch import by_progress
from control_plane.scheduler.step.plan_draft import InFlightStep
from control_plane.scheduler.step.worker_state import WorkerState


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError with a sentence if any count is wrong."""
    parts = scheduler_parts(scheduler)
    worker, in_flight = parts.worker, parts.in_flight
    _check_places(worker)
    _check_blocks(worker)
    _check_host_blocks(worker, in_flight)
    _check_in_flight(worker, in_flight)
    worker.queues.waiting.check_invariants()
    worker.cache.check_invariants()
    worker.rows.free.check_invariants([row.row_idx for row in worker.rows.held])
    leases = Counter(slot_idx for row in worker.rows.held for slot_idx in _slots_of(row))
    queued = [*worker.queues.waiting, *(group for group in worker.queues.swapped if not group.is_paused)]
    waiting: dict[str, dict[str, int]] = {}
    sets: dict[str, dict[str, int]] = {}
    for group in queued:
        refs, name = group.request.adapters, group.digest
        _count(waiting, [ref.digest for ref in refs], group)
        _count(sets, [name] if name is not None and len(refs) > 1 else [], group)
    worker.slots.check_invariants(dict(leases), waiting, sets)
    _check_batch(worker)
    for row in worker.rows.held:
        _check_row(worker, row)
    for group in worker.lifecycle.groups.values():
        _check_beams(group)


def _check_places(worker: WorkerState) -> None:
    """Each live request is in exactly one place, and an ended request only holds what a step in flight names."""
    waiting, held, live = list(worker.queues.waiting), worker.rows.held, worker.lifecycle.groups
    num_leaving = sum(row.state is SequenceState.LEAVING for row in held)
    assert worker.rows.num_leaving == num_leaving, "leaving rows are miscounted"
    orders = [row.sequence.group.order for row in held]
    assert orders == sorted(orders), "held rows are out of order"
    assert len({id(row) for row in held}) == len(held), "a row is held twice"
    assert all(row.sequence.row is row for row in held), "a sequence has another row than the one that it holds"
    assert all(row.state is not SequenceState.IDLE for row in held), "a sequence that holds a row is idle"
    assert all(g.state is GroupState.WAITING for g in waiting), "a request in the waiting queue is not waiting"
    unstarted = {g.request.request_id: g for g in waiting if g.first_scheduled_s is None}
    assert worker.queues.unstarted == unstarted, "requests that wait for their first row are miscounted"
    paused = [g for g in live.values() if g.state is GroupState.PAUSED]
    num_paused = sum(g.is_paused for g in live.values())
    assert worker.lifecycle.num_paused == num_paused, "paused requests are miscounted"
    swapped = list(worker.queues.swapped)
    assert all(g.state is GroupState.SWAPPED for g in swapped), "a request in the swapped queue is not swapped"
    assert [g.order for g in swapped] == sorted(g.order for g in swapped), "swapped requests are out of order"
    with_rows = {id(row.sequence.group): row.sequence.group for row in held}
    assert worker.rows.num_groups == len(with_rows), "requests that hold rows are miscounted"
    by_tenant = Counter(g.request.account for g in (*with_rows.values(), *swapped))
    assert all(worker.counters.num_running(tenant) >= n for tenant, n in by_tenant.items()), "a tenant is forgotten"
    num_ending = sum(group.is_ended for group in with_rows.values())
    assert worker.rows.num_ending_groups == num_ending, "requests that are over and hold rows are miscounted"
    places = Counter(id(g) for g in (*waiting, *with_rows.values(), *paused, *swapped) if not g.is_ended)
    assert places == Counter(id(g) for g in live.values()), "a live request is in no queue, or in two"
    known = {id(g): g for g in (*live.values(), *with_rows.values())}
    by_digest = Counter(ref.digest for g in known.values() for ref in g.request.adapters)
    assert by_digest == worker.purge.num_requests_by_digest, "requests with an adapter are miscounted"
    assert all(g.is_paused for g in paused), "a request is in state PAUSED although its reader reads"
    assert not any(g.is_paused for g in waiting), "a paused request may be admitted"
    num_wanting = sum(row.sequence.wants_logprobs for row in held)
    assert worker.rows.num_wanting_logprobs == num_wanting, "rows that want log-probabilities are miscounted"
    for group in with_rows.values():
        _check_group_with_rows(worker, group)
    for group in (*waiting, *paused, *swapped):
        assert group.num_rows == 0 and not group.has_progressed, "a waiting request holds rows"
        assert all(sequence.row is None for sequence in group.members), "a sequence of a waiting request holds a row"


def _check_group_with_rows(worker: WorkerState, group: SequenceGroup) -> None:
    rows = [member.row for member in group.members if member.row is not None]
    num_held = sum(row.sequence.group is group for row in worker.rows.held)
    assert group.num_rows == len(rows) == num_held, "a request miscounts its rows"
    is_leaving = group.state is GroupState.LEAVING
    assert is_leaving or group.state is GroupState.RUNNING, "a request that holds rows is in no state to hold them"
    assert is_leaving or not group.is_ended, "a request ended but may still be planned"
    assert group.is_ended == all(s.is_ended for s in group.members), "a request and its completions end apart"
    for row in rows:
        if is_leaving or row.sequence.is_ended:
            assert row.state is SequenceState.LEAVING, "a sequence of a leaving request may be planned"
        if row.state is SequenceState.LEAVING:
            assert row.num_in_flight > 0, "a leaving sequence holds a row that no step in flight names"


def _check_blocks(worker: WorkerState) -> None:
    """Blocks are conserved, reference counts equal table membership, and no writable block is shared."""
    pool, size = worker.pool, worker.limits.block_size
    holders = Counter(block_id for row in worker.rows.held for block_id in _held_blocks(row))
    ever_held = range(len(pool.ref_counts))
    assert list(pool.ref_counts) == [holders[b] for b in ever_held], "reference counts are not the holders"
    places = Counter(pool.free) + Counter(pool.evictable) + Counter(holders.keys())
    assert places == Counter(range(pool.num_blocks)), "a block is lost, or free and held at once"
    assert all(pool.is_cached[b] for b in pool.evictable), "a block that the cache forgot is kept for it"
    pool.evictable.check_invariants()
    assert not any(pool.is_cached[b] for b in pool.free if b in ever_held), "a free block is in the prefix cache"
    for row in worker.rows.held:
        members = row.sequence.group.members
        others = [member.row for member in members if member.row is not None and member.row is not row]
        num_shares = Counter(block_id for other in others for block_id in _held_blocks(other))
        num_waiting = Counter(block_id for other in others for block_id in _awaited_blocks(other, row.sequence))
        for idx in range(row.num_computed // size, len(row.block_ids)):
            block_id = row.block_ids[idx]
            assert not pool.is_cached[block_id], f"block {block_id} is in the prefix cache and not computed"
            assert pool.ref_counts[block_id] == 1 + num_shares[block_id], f"block {block_id} is shared and written"
            if idx >= row.num_planned // size:
                is_safe = num_shares[block_id] == num_waiting[block_id]
                assert is_safe, f"block {block_id} is shared and will be written"


def _awaited_blocks(row: Row, source: Sequence) -> list[int]:
    """Blocks that the source may still write although the row holds them: it begins later, or takes a copy."""
    if row.forks_from is source:
        return _held_blocks(row)
    return [] if row.copied_block is None else [row.copied_block]


def _held_blocks(row: Row) -> list[int]:
    """Blocks that a row has a reference to."""
    return row.block_ids if row.copied_block is None else [*row.block_ids, row.copied_block]


def _check_host_blocks(worker: WorkerState, in_flight: deque[InFlightStep]) -> None:
    """Host blocks are conserved, and a swapped sequence has there all but its last token.

    On the device it has nothing, but for what no plan moved yet and what a step in flight writes.
    """
    swap, size = worker.swap, worker.limits.block_size
    holders: Counter[int] = Counter()
    to_come = {host_block for _, host_block in swap.outs}
    for group in worker.lifecycle.groups.values():
        for sequence in group.members:
            holders.update(sequence.host_block_ids)
            if sequence.host_block_ids:
                row = sequence.row
                is_out = group.state in (GroupState.SWAPPED, GroupState.LEAVING)
                is_here = row is not None and row.block_ids and not row.moved_block_ids
                assert is_out and (not is_here or to_come.issuperset(sequence.host_block_ids)), (
                    "a request that is swapped out is on the device"
                )
                assert not sequence.is_ended, "a completion that ended has blocks in host memory"
            if group.state is GroupState.SWAPPED and not sequence.is_ended:
                num_blocks = -(-(sequence.num_known - 1) // size)
                assert len(sequence.host_block_ids) == num_blocks, "a swapped request has other blocks than it needs"
    for step in in_flight:
        holders.update(step.spent_host_blocks)
    swap.host.check_invariants(dict(holders))


def _check_in_flight(worker: WorkerState, in_flight: deque[InFlightStep]) -> None:
    """Plans are within budgets, name a row once, and name only rows that their sequences still hold."""
    limits, held = worker.limits, worker.rows.held
    most = limits.plan_depth * MAX_PLAN_STEPS
    assert len(in_flight) <= most, "more steps are in flight than may ever be"
    assert not in_flight or in_flight[-1].ends_plan, "a plan is cut off"
    for idx, step in enumerate(in_flight):
        assert step.step_id == in_flight[0].step_id + idx, "a step is left out"
    named: Counter[int] = Counter()
    planned: Counter[int] = Counter()
    holding = {id(row) for row in held}
    for step in in_flight:
        tokens = [(row, 1) for row in step.decodes] + [(row, n) for row, n, _ in step.prefills]
        assert sum(n for _, n in tokens) <= limits.max_step_tokens, "a plan breaks the token budget"
        assert tokens or step.swap_outs, "a plan neither computes nor moves"
        row_idxs = [row.row_idx for row, _ in tokens]
        assert len(set(row_idxs)) == len(row_idxs), "a plan names a row twice"
        decodes = [row.row_idx for row in step.decodes]
        assert decodes == sorted(decodes), "decodes are not by row"
        for row, num_tokens in tokens:
            assert id(row) in holding, "a step in flight names a request that gave its row back"
            named[id(row)] += 1
            planned[id(row)] += num_tokens
    for row in held:
        assert row.num_in_flight == named[id(row)], "the steps in flight that name a row are miscounted"
        ahead = row.num_planned - row.num_computed
        assert row.sequence.is_ended or ahead == planned[id(row)], "planned tokens are not those of steps in flight"
        if row.num_in_flight > 0:
            _check_written_blocks(in_flight, row, planned[id(row)], limits.block_size)


def _check_written_blocks(in_flight: deque[InFlightStep], row: Row, num_tokens: int, size: int) -> None:
    """Blocks that steps in flight write, for the last `num_tokens` planned, are the row's, or were moved out.

    A move that frees such a block is in a plan that follows these steps, so it is in flight too.
    """
    moved = row.moved_block_ids
    first, end = (row.num_planned - num_tokens) // size, -(-row.num_planned // size)
    assert len(moved) + len(row.block_ids) >= end, "a row gave back blocks that a step in flight writes"
    sent = {block_id for step in in_flight for block_id, _ in step.swap_outs}
    assert sent.issuperset(moved[first:end]), "a row gave back blocks that a step in flight writes and no plan moves"


def _check_batch(worker: WorkerState) -> None:
    """The rows kept as decoding and as prefilling are those, and no row is looked at too late."""
    batch, prefilling = worker.rows.grouped()
    decoding, not_decoding = by_progress(worker.rows.held)
    assert batch.rows == decoding, "the next plan would decode other rows than it may"
    assert batch.by_idx == sorted(decoding, key=lambda row: row.row_idx), "the batch is not by row"
    assert batch.row_idxs == [row.row_idx for row in batch.by_idx], "the batch has other row numbers than its rows"
    assert prefilling == not_decoding, "a prefill would not be planned on"
    for row in decoding:
        num_tokens = len(row.block_ids) * worker.limits.block_size
        assert row.plan_closely_at <= min(num_tokens, row.sequence.max_planned - 1), "a row would outgrow its table"


def _check_row(worker: WorkerState, row: Row) -> None:
    """Progress of one sequence that holds a row."""
    limits, sequence = worker.limits, row.sequence
    assert row.num_computed <= row.num_planned <= sequence.max_planned, "a request is planned beyond its end"
    if row.apply_closely_at > 0:
        is_plain = row.state is SequenceState.RUNNING and not sequence.is_ended and not sequence.has_extras
        assert is_plain and sequence.group.has_progressed, "a result with extras is applied as a plain token"
        assert row.apply_closely_at <= min(row.register_at, sequence.max_planned), "an end would be missed"
    is_reserved = row.state is SequenceState.RESERVED or (not row.is_begun and not row.prefill_end)
    if not row.moved_block_ids and not (sequence.is_ended and not row.block_ids):
        assert row.num_planned <= len(row.block_ids) * limits.block_size, "tokens are planned without a block"
        most = 1 if is_reserved else max(row.prefill_end, row.num_planned, row.most_planned)
        assert len(row.block_ids) == -(-most // limits.block_size), "a request holds blocks that it does not need"
    assert sequence.num_known <= limits.context_of(sequence.request.adapter), "a request outgrew the context"
    assert len(sequence.generated) <= sequence.max_generated, "a request has more tokens than requested"
    is_planned = max(row.num_planned, row.most_planned) >= row.prefill_end and not is_reserved
    assert row.is_decoding == is_planned, "a row decodes before its prefill's end"
    assert (sequence.digest is None) == (row.slot_idx is None), "a request runs without its adapter's slot"
    in_slots = [worker.slots.slots[slot_idx].adapter.digest for slot_idx in _slots_of(row)]
    named = [ref.digest for ref in sequence.request.adapters]
    assert in_slots == named, "a request runs with another adapter's slot"


def _slots_of(row: Row) -> list[int]:
    """The slots that the row leases, in the order of its request's adapters."""
    return [] if row.slot_idx is None else [row.slot_idx, *row.further_slots]


def _count(counts: dict[str, dict[str, int]], names: list[str], group: SequenceGroup) -> None:
    for name in names:
        by_account = counts.setdefault(name, {})
        by_account[group.request.account] = by_account.get(group.request.account, 0) + 1


def _check_beams(group: SequenceGroup) -> None:
    """Every beam of a search is in one member's row, with its tokens; the others hold a row and a block, or nothing."""
    if group.searcher is None:
        return
    beams = group.beam_sequences
    assert [tuple(s.generated) for s in beams] == [b.token_ids for b in group.searcher.beams], "a row has lost its beam"
    assert len({id(s) for s in beams}) == len(beams), "two beams are in one row"
    for member in group.members:
        is_in_flight = member.row is not None and member.row.num_in_flight > 0
        if member in beams:
            assert member.max_planned == member.num_known, "a beam is planned beyond its last token"
            has_result = member.index in group.beam_candidates
            assert not (has_result and is_in_flight), "a beam is planned before the search advanced"
        else:
            assert not member.generated and not is_in_flight, "a row without a beam is planned"

"""The books of a scheduler, recomputed from what its sequences hold and compared with what its parts say.

For tests and the random walk: it looks at everything, so it is no part of a step.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from control_plane.scheduler.requests.sequence import Sequence, SequenceState
from control_plane.scheduler.requests.sequence_group import GroupState, SequenceGroup
from control_plane.scheduler.step.decode_batch import by_progress
from control_plane.scheduler.types import MAX_PLAN_STEPS

if TYPE_CHECKING:
    from control_plane.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError with a sentence if any book does not balance."""
    _check_places(scheduler)
    _check_blocks(scheduler)
    _check_host_blocks(scheduler)
    _check_flights(scheduler)
    scheduler._waiting.check_invariants()
    scheduler._cache.check_invariants()
    scheduler._rows.check_invariants([sequence.row for sequence in scheduler._running])
    leases = Counter(sequence.slot_idx for sequence in scheduler._running if sequence.slot_idx is not None)
    queued = [*scheduler._waiting, *(group for group in scheduler._roster.swap if not group.is_paused)]
    waiting: dict[str, dict[str, int]] = {}
    for group in queued:
        if group.digest is not None:
            by_account = waiting.setdefault(group.digest, {})
            by_account[group.request.account] = by_account.get(group.request.account, 0) + 1
    scheduler._slots.check_invariants(dict(leases), waiting)
    _check_batch(scheduler)
    for sequence in scheduler._running:
        _check_running(scheduler, sequence)
    for group in scheduler._groups.values():
        _check_beams(group)


def _check_places(scheduler: Scheduler) -> None:
    """Each live request is in exactly one place, and who ended only holds what an unanswered plan names."""
    waiting, running = list(scheduler._waiting), scheduler._running
    num_draining = sum(s.state is SequenceState.DRAINING for s in running)
    assert scheduler._roster.num_draining == num_draining, "leaving sequences are miscounted"
    assert [s.order for s in running] == sorted(s.order for s in running), "running sequences are out of order"
    assert len({id(s) for s in running}) == len(running), "a sequence runs twice"
    assert all(g.state is GroupState.WAITING for g in waiting), "a request in the waiting queue is not waiting"
    assert all(s.state is not SequenceState.IDLE for s in running), "a sequence that holds a row has the wrong state"
    unstarted = {g.request.request_id: g for g in waiting if g.first_scheduled_s is None}
    assert scheduler._roster.unstarted == unstarted, "requests that wait for their first row are miscounted"
    held = [g for g in scheduler._groups.values() if g.state is GroupState.HELD]
    num_paused = sum(g.is_paused for g in scheduler._groups.values())
    assert scheduler._roster.num_paused == num_paused, "paused requests are miscounted"
    swapped = list(scheduler._roster.swap)
    assert all(g.state is GroupState.SWAPPED for g in swapped), "a request in the swapped queue is not swapped"
    assert [g.order for g in swapped] == sorted(g.order for g in swapped), "swapped requests are out of order"
    with_rows = {id(s.group): s.group for s in running}
    assert scheduler._roster.num_running_groups == len(with_rows), "requests that hold rows are miscounted"
    by_tenant = Counter(g.request.account for g in (*with_rows.values(), *swapped))
    assert all(scheduler._counters.num_running(tenant) >= n for tenant, n in by_tenant.items()), "a tenant is forgotten"
    num_ending = sum(group.is_ended for group in with_rows.values())
    assert scheduler._roster.num_ending_groups == num_ending, "requests that are over and hold rows are miscounted"
    places = Counter(id(g) for g in (*waiting, *with_rows.values(), *held, *swapped) if not g.is_ended)
    assert places == Counter(id(g) for g in scheduler._groups.values()), "a live request is in no queue, or in two"
    of_adapters = {id(g): g.digest for g in (*scheduler._groups.values(), *with_rows.values()) if g.digest is not None}
    by_digest = Counter(of_adapters.values())
    assert by_digest == scheduler._roster.num_groups_by_digest, "requests with an adapter are miscounted"
    assert all(g.is_paused for g in held), "a request is held back although its reader reads"
    assert not any(g.is_paused for g in waiting), "a paused request may be admitted"
    for group in with_rows.values():
        rows = [s for s in group.members if s.state is not SequenceState.IDLE]
        assert group.num_rows == len(rows) == sum(s.group is group for s in running), "a request miscounts its rows"
        is_leaving = group.state is GroupState.DRAINING
        assert is_leaving or group.state is GroupState.RUNNING, "a request that holds rows is in no state to hold them"
        assert is_leaving or not group.is_ended, "a request ended but may still be planned"
        assert group.is_ended == all(s.is_ended for s in group.members), "a request and its answers end apart"
        for sequence in rows:
            if is_leaving or sequence.is_ended:
                assert sequence.state is SequenceState.DRAINING, "a sequence of a leaving request may be planned"
            if sequence.state is SequenceState.DRAINING:
                assert sequence.num_in_flight > 0, "a leaving sequence holds a row that no unanswered plan names"
    for group in (*waiting, *held, *swapped):
        assert group.num_rows == 0 and not group.has_progressed, "a waiting request holds rows"
        for sequence in group.members:
            assert not sequence.block_ids and sequence.num_in_flight == 0, "a waiting request holds blocks or plans"


def _check_blocks(scheduler: Scheduler) -> None:
    """Blocks are conserved, reference counts equal table membership, and no writable block is shared."""
    pool, size = scheduler._pool, scheduler.limits.block_size
    holders = Counter(block_id for sequence in scheduler._running for block_id in _held_blocks(sequence))
    ever_held = range(len(pool.ref_counts))
    assert list(pool.ref_counts) == [holders[b] for b in ever_held], "reference counts are not the holders"
    places = Counter(pool.free) + Counter(pool.evictable) + Counter(holders.keys())
    assert places == Counter(range(pool.num_blocks)), "a block is lost, or free and held at once"
    assert all(pool.is_cached[b] for b in pool.evictable), "a block that the cache forgot is kept for it"
    pool.evictable.check_invariants()
    assert not any(pool.is_cached[b] for b in pool.free if b in ever_held), "a free block is in the prefix cache"
    for sequence in scheduler._running:
        others = [member for member in sequence.group.members if member is not sequence]
        num_shares = Counter(block_id for member in others for block_id in _held_blocks(member))
        num_waiting = Counter(block_id for member in others for block_id in _awaited_blocks(member, sequence))
        for idx in range(sequence.num_computed // size, len(sequence.block_ids)):
            block_id = sequence.block_ids[idx]
            assert not pool.is_cached[block_id], f"block {block_id} is in the prefix cache and not computed"
            assert pool.ref_counts[block_id] == 1 + num_shares[block_id], f"block {block_id} is shared and written"
            if idx >= sequence.num_planned // size:
                is_safe = num_shares[block_id] == num_waiting[block_id]
                assert is_safe, f"block {block_id} is shared and will be written"


def _awaited_blocks(member: Sequence, source: Sequence) -> list[int]:
    """Blocks that the source may still write although the member holds them: it begins later, or takes a copy."""
    if member.forks_from is source:
        return _held_blocks(member)
    return [] if member.copied_block is None else [member.copied_block]


def _held_blocks(sequence: Sequence) -> list[int]:
    """Blocks that a sequence has a reference to."""
    return sequence.block_ids if sequence.copied_block is None else [*sequence.block_ids, sequence.copied_block]


def _check_host_blocks(scheduler: Scheduler) -> None:
    """Host blocks are conserved, and whoever is swapped out has there all but its last token.

    Here it has nothing, but for what no plan moved yet and what an unanswered step writes.
    """
    swap, size = scheduler._roster.swap, scheduler.limits.block_size
    holders: Counter[int] = Counter()
    untold = {host_block for _, host_block in swap.outs}
    for group in scheduler._groups.values():
        for sequence in group.members:
            holders.update(sequence.host_block_ids)
            if sequence.host_block_ids:
                is_out = group.state in (GroupState.SWAPPED, GroupState.DRAINING)
                is_here = sequence.block_ids and not sequence.moved_block_ids
                assert is_out and (not is_here or untold.issuperset(sequence.host_block_ids)), (
                    "a request that is swapped out is here"
                )
                assert not sequence.is_ended, "an answer that ended has blocks in host memory"
            if group.state is GroupState.SWAPPED and not sequence.is_ended:
                num_blocks = -(-(sequence.num_known - 1) // size)
                assert len(sequence.host_block_ids) == num_blocks, "a swapped request has other blocks than it needs"
    for flight in scheduler._flights:
        holders.update(flight.spent_host_blocks)
    swap.host.check_invariants(dict(holders))


def _check_flights(scheduler: Scheduler) -> None:
    """Plans are within budgets, name a row once, and only rows that are still held by whom they named."""
    flights = scheduler._flights
    most = scheduler.limits.plan_depth * MAX_PLAN_STEPS
    assert len(flights) <= most, "more steps are unanswered than may ever be"
    assert not flights or flights[-1].ends_plan, "a plan is cut off"
    for idx, flight in enumerate(flights):
        assert flight.step_id == flights[0].step_id + idx, "a step is left out"
    named: Counter[int] = Counter()
    planned: Counter[int] = Counter()
    running = {id(sequence) for sequence in scheduler._running}
    for flight in flights:
        tokens = [(s, 1) for s in flight.decodes] + [(s, n) for s, n, _ in flight.prefills]
        assert sum(n for _, n in tokens) <= scheduler.limits.max_step_tokens, "a plan breaks the token budget"
        assert tokens or flight.swap_outs, "a plan neither computes nor moves"
        rows = [s.row for s, _ in tokens]
        assert len(set(rows)) == len(rows), "a plan names a row twice"
        assert [s.row for s in flight.decodes] == sorted(s.row for s in flight.decodes), "decodes are not by row"
        for sequence, num_tokens in tokens:
            assert id(sequence) in running, "an unanswered plan names a request that gave its row back"
            named[id(sequence)] += 1
            planned[id(sequence)] += num_tokens
    for sequence in scheduler._running:
        assert sequence.num_in_flight == named[id(sequence)], "unanswered plans of a request are miscounted"
        ahead = sequence.num_planned - sequence.num_computed
        assert sequence.is_ended or ahead == planned[id(sequence)], "planned tokens are not those of unanswered plans"
        if sequence.num_in_flight > 0:
            _check_written_blocks(scheduler, sequence, planned[id(sequence)])


def _check_written_blocks(scheduler: Scheduler, sequence: Sequence, num_tokens: int) -> None:
    """Blocks that unanswered steps write, for the last `num_tokens` planned, are the sequence's, or were moved out.

    A move that frees such a block is in a plan that follows these steps, so it is not answered either.
    """
    size, moved = scheduler.limits.block_size, sequence.moved_block_ids
    first, end = (sequence.num_planned - num_tokens) // size, -(-sequence.num_planned // size)
    assert len(moved) + len(sequence.block_ids) >= end, "a row gave back blocks that an unanswered step writes"
    told = {block_id for flight in scheduler._flights for block_id, _ in flight.swap_outs}
    assert told.issuperset(moved[first:end]), "a row gave back blocks that an unanswered step writes and no plan moves"


def _check_batch(scheduler: Scheduler) -> None:
    """What is kept of who decodes and who prefills is so, and nobody is looked at too late."""
    batch, prefilling = scheduler._roster.group_rows()
    decoding, not_decoding = by_progress(scheduler._running)
    assert batch.sequences == decoding, "the next plan would decode other rows than it may"
    assert batch.by_row == sorted(decoding, key=lambda sequence: sequence.row), "the batch is not by row"
    assert batch.rows == [sequence.row for sequence in batch.by_row], "the batch has other rows than its sequences"
    assert prefilling == not_decoding, "a prefill would not be planned on"
    for sequence in decoding:
        num_tokens = len(sequence.block_ids) * scheduler.limits.block_size
        assert sequence.plan_closely_at <= min(num_tokens, sequence.max_planned - 1), "a row would outgrow its table"


def _check_running(scheduler: Scheduler, sequence: Sequence) -> None:
    """Progress of one request that holds a row."""
    size, limits = scheduler.limits.block_size, scheduler.limits
    assert sequence.num_computed <= sequence.num_planned <= sequence.max_planned, "a request is planned beyond its end"
    if sequence.book_closely_at > 0:
        is_plain = sequence.state is SequenceState.RUNNING and not sequence.is_ended and not sequence.tells_more
        assert is_plain and sequence.group.has_progressed, "an answer that tells more than a token is booked as one"
        assert sequence.book_closely_at <= min(sequence.register_at, sequence.max_planned), "an end would be missed"
    is_reserved = sequence.state is SequenceState.RESERVED or (not sequence.is_begun and not sequence.prefill_end)
    if not sequence.moved_block_ids and not (sequence.is_ended and not sequence.block_ids):
        assert sequence.num_planned <= len(sequence.block_ids) * size, "tokens are planned without a block"
        most = 1 if is_reserved else max(sequence.prefill_end, sequence.num_planned)
        assert len(sequence.block_ids) == -(-most // size), "a request holds blocks that it does not need"
    assert sequence.num_known <= limits.max_model_len, "a request outgrew the context"
    assert len(sequence.generated) <= sequence.max_generated, "a request has more tokens than asked for"
    is_planned = sequence.num_planned >= sequence.prefill_end and not is_reserved
    assert sequence.is_decoding == is_planned, "decoding before the prefill's end"
    assert (sequence.digest is None) == (sequence.slot_idx is None), "a request runs without its adapter's slot"
    if sequence.slot_idx is not None:
        in_slot = scheduler._slots.slots[sequence.slot_idx].adapter.digest
        assert in_slot == sequence.digest, "a request runs with another adapter's slot"


def _check_beams(group: SequenceGroup) -> None:
    """Every beam of a search is one member's, with its tokens; the others hold a row and a block, or nothing."""
    if group.searcher is None:
        return
    beams = group.beam_sequences
    assert [tuple(s.generated) for s in beams] == [b.token_ids for b in group.searcher.beams], "a row has lost its beam"
    assert len({id(s) for s in beams}) == len(beams), "two beams are in one row"
    for member in group.members:
        if member in beams:
            assert member.max_planned == member.num_known, "a beam is planned beyond its last token"
            is_answered = member.index in group.beam_candidates
            assert not is_answered or member.num_in_flight == 0, "a beam is planned before the search moved"
        else:
            assert not member.generated and member.num_in_flight == 0, "a row without a beam is planned"

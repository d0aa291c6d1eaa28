"""Forks: how the members of one group share the KV blocks of the tokens that they have in common.

One member, the source, computes those tokens. Another member forks from it. Full blocks of common tokens are shared
read-only. A partly filled block is copied for the fork, on the worker, by the plan that begins the fork's row. From
there on the fork computes its own tokens, first its last known token, whose logits it samples from.

Rows and blocks of all members are taken at once when the group is admitted, so a fork waits for nothing but budget.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from control_plane.scheduler.requests.sequence import Row, Sequence
from control_plane.scheduler.requests.states import SequenceState
from control_plane.scheduler.requests.transitions import move_row
from control_plane.scheduler.step.plan_draft import PlanDraft
from control_plane.scheduler.step.worker_state import WorkerState


def num_fork_blocks(members: Items[Sequence], block_size: int) -> int:
    """Blocks that the other members take beside those of the first, from which they fork."""
    source, num_blocks = members[0], 0
    for member in members[1:]:
        if _is_future_beam(member):
            num_blocks += 1
        else:
            num_blocks += -(-member.num_known // block_size) - _num_common(source, member) // block_size
    return num_blocks


def reserve_forks(members: Items[Sequence], worker: WorkerState) -> None:
    """Give the other members rows, leases, and blocks of their own beside those they share with the first.

    They hold them in state FORKING until `may_begin`; future beams hold a row and a block in state RESERVED.
    The caller made sure that enough rows and blocks are free. The first member has its row and its blocks.
    """
    source = members[0].held_row
    size = worker.limits.block_size
    for member in members[1:]:
        if _is_future_beam(member):
            worker.rows.take(member, SequenceState.RESERVED).add_blocks(worker.pool.take(1))
            continue
        fork = worker.rows.take(member, SequenceState.FORKING)
        share_blocks(source, fork, _num_common(members[0], member), worker)
        fork.add_blocks(worker.pool.take(-(-member.num_known // size) - len(fork.block_ids)))
        fork.fork_from(members[0])


def share_blocks(source: Row, fork: Row, num_common: int, worker: WorkerState) -> None:
    """Let a fork start after the first `num_common` tokens of the source's table. Its own blocks come after them.

    num_common = 10 with blocks of 4: both hold the blocks of tokens 0-3 and 4-7; the block of tokens 8-11 is the
    source's, and the next block in the fork's table begins as its copy.
    """
    size = worker.limits.block_size
    num_full = num_common // size
    shared = source.block_ids[:num_full]
    worker.pool.share_all(shared)
    fork.share_blocks(shared)
    if num_common % size:
        partial = source.block_ids[num_full]
        worker.pool.share(partial)
        fork.copy_from(partial)
    worker.cache.extend_hashes(source.sequence, num_full)  # here, or each of its forks would do it
    fork.sequence.share_hashes(source.sequence, num_full)
    fork.start_at(num_common)
    fork.note_registered(num_full, size)


def may_begin(fork: Row) -> bool:
    """Whether the row is FORKING, and an earlier plan computes, or computed, all tokens that it shares."""
    if fork.state is not SequenceState.FORKING:
        return False
    source = fork.forks_from
    return source is None or source.row is None or source.row.is_decoding


def begin_fork(fork: Row, worker: WorkerState, draft: PlanDraft) -> None:
    """Begin a FORKING row that has all its blocks: copy the partly filled block, plan the tokens that it lacks."""
    move_row(fork, SequenceState.RUNNING)
    if fork.copied_block is not None:
        own_block = fork.block_ids[fork.num_planned // worker.limits.block_size]
        draft.block_copies.append((fork.copied_block, own_block))
    draft.begin(fork, worker.rows.slot_generation(fork), worker.rows.slot_uses(fork))
    draft.prefill(fork)


def _is_future_beam(member: Sequence) -> bool:
    """Whether the member is a beam without tokens of its own: its tokens are not known yet."""
    return member.is_host_fed and not member.generated


def _num_common(source: Sequence, fork: Sequence) -> int:
    """Leading tokens that both have, less the fork's last: it must compute one to sample from."""
    num_prompt = len(fork.request.prompt_token_ids)
    num_common = 0
    for ours, theirs in zip(source.generated, fork.generated, strict=False):
        if ours != theirs:
            break
        num_common += 1
    return min(num_prompt + num_common, fork.num_known - 1)

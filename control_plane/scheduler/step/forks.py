"""Forks: how the members of one group share the KV blocks of the tokens that they have in common.

One member, the source, computes those tokens. Another one forks from it: full blocks of common tokens are in both
tables and are written no more; of a block that holds common tokens and room beside them the fork gets a copy, made on
the worker by the plan that begins the fork's row. From there on it goes its own way, first of all over its last known
token, whose logits it samples from.

Rows and blocks of all members are taken at once when the group is admitted, so a fork waits for nothing but budget.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from control_plane.scheduler.requests.sequence import Sequence, SequenceState
from control_plane.scheduler.step.plan_draft import PlanDraft
from control_plane.scheduler.step.roster import Roster


def num_fork_blocks(members: Items[Sequence], block_size: int) -> int:
    """Blocks that the others take beside those of the first, from which they fork."""
    source, num_blocks = members[0], 0
    for member in members[1:]:
        if _is_to_come(member):
            num_blocks += 1
        else:
            num_blocks += -(-member.num_known // block_size) - _num_common(source, member) // block_size
    return num_blocks


def reserve_forks(members: Items[Sequence], roster: Roster) -> None:
    """Give the others rows, leases, and blocks of their own beside those they share with the first, which has its.

    They hold them in state FORKING until `may_begin`; beams that are to come hold a row and a block in state RESERVED.
    The caller made sure that rows and blocks are there.
    """
    source = members[0]
    for fork in members[1:]:
        if _is_to_come(fork):
            roster.take_row(fork, SequenceState.RESERVED)
            fork.block_ids = roster.pool.take(1)
            continue
        roster.take_row(fork, SequenceState.FORKING)
        share_blocks(source, fork, _num_common(source, fork), roster)
        num_own = -(-fork.num_known // roster.block_size) - len(fork.block_ids)
        fork.block_ids += roster.pool.take(num_own)
        fork.forks_from = source


def share_blocks(source: Sequence, fork: Sequence, num_common: int, roster: Roster) -> None:
    """Let a fork that has no blocks start behind the first `num_common` tokens of the source's table.

    num_common = 10 with blocks of 4: both hold the blocks of tokens 0-3 and 4-7; the block of tokens 8-11 is the
    source's, and the one that follows in the fork's table begins as its copy.
    """
    size = roster.block_size
    num_full = num_common // size
    fork.block_ids = source.block_ids[:num_full]
    roster.pool.share_all(fork.block_ids)
    if num_common % size:
        fork.copied_block = source.block_ids[num_full]
        roster.pool.share(fork.copied_block)
    roster.cache.extend_hashes(source, num_full)  # here, or each of its forks would do it
    fork.block_hashes = source.block_hashes[:num_full]
    fork.prefill_end = fork.num_known
    fork.num_planned = fork.num_computed = num_common
    fork.num_registered = num_full
    fork.register_at = (num_full + 1) * size


def may_begin(fork: Sequence) -> bool:
    """Whether it is a FORKING sequence, and an earlier plan computes, or computed, all that it shares."""
    source = fork.forks_from
    return fork.state is SequenceState.FORKING and (
        source is None or source.is_decoding or source.state is SequenceState.IDLE
    )


def begin_fork(fork: Sequence, roster: Roster, draft: PlanDraft) -> None:
    """Begin the row of a FORKING sequence that has all its blocks: copy what is to be copied, plan what it lacks."""
    fork.state = SequenceState.RUNNING
    fork.forks_from = None
    if fork.copied_block is not None:
        own_block = fork.block_ids[fork.num_planned // roster.block_size]
        draft.block_copies.append((fork.copied_block, own_block))
    draft.begin(fork, roster.slot_generation(fork))
    draft.prefill(fork)


def _is_to_come(member: Sequence) -> bool:
    """Whether it is a beam without tokens of its own: what it will be is not known yet."""
    return member.is_stepwise and not member.generated


def _num_common(source: Sequence, fork: Sequence) -> int:
    """Leading tokens that both have, less the fork's last: it must compute one to sample from."""
    num_prompt = len(fork.request.prompt_token_ids)
    num_common = 0
    for ours, theirs in zip(source.generated, fork.generated, strict=False):
        if ours != theirs:
            break
        num_common += 1
    return min(num_prompt + num_common, fork.num_known - 1)

"""How a sequence becomes a row of the worker: its tokens, its table, how its tokens are chosen; its size on the wire.

New rows are nearly all of a plan's bytes. Rows of one request share their prompt, which a plan carries once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from control_plane.scheduler.requests.sequence import Row, Sequence
from control_plane.scheduler.types import TOKEN_BYTES, Combination, NewRow, Sampling, SlotUse

# Bytes of new rows in one plan: 524 288 token ids, which take about 20 ms to encode. One row may take more.
PLAN_BYTES = 2 << 20
# Bytes of one row at most, and of the rows of one request that return from host memory together: with moves of blocks
# beside it a plan stays below the 64 MiB that a message may have.
MAX_ROW_BYTES = 16 << 20
BLOCK_BYTES = 4  # of a block id, as int32
_OTHER_BYTES = 480  # of a row beside its lists: at most 25 fields with their tags, four adapters, a digest, two ids


def begin_row(row: Row, slot_generation: int, slot_uses: tuple[SlotUse, ...] = ()) -> NewRow:
    """The plan's entry for a row that has blocks and a lease, and that the worker does not know.

    Its KV is in its blocks up to num_planned by the time the plan is executed; `slot_generation` is 0 without adapter,
    and `slot_uses` are for a row that combines adapters or scales one.
    """
    sequence = row.sequence
    row.begin()
    sampling = sequence.sampling
    if sequence.awaits_prompt_logprobs:
        sequence.group.take_prompt_logprobs()  # an earlier row returned those of a part of the prompt: all come again
    elif sampling.num_prompt_logprobs is not None:
        sampling = replace(sampling, num_prompt_logprobs=None)
    return NewRow(
        row=row.row_idx,
        request_id=sequence.request_id,
        prompt_token_ids=sequence.request.prompt_token_ids,
        generated_token_ids=list(sequence.generated),
        num_computed_tokens=row.num_planned,
        block_ids=list(row.block_ids),
        slot_idx=row.slot_idx,
        slot_generation=slot_generation,
        sampling=sampling,
        banned_token_ids=tuple(sorted(sequence.stop_token_ids)) if _may_ban(sampling, sequence) else (),
        is_host_fed=sequence.is_host_fed,
        adapters=slot_uses,
        is_linear=_is_linear(sequence),
        active_from=sequence.request.active_from,
        vocab_size=None if (adapter := sequence.request.adapter) is None else adapter.vocab_size,
        pooling=sequence.request.pooling,
        constraint=sequence.request.constraint,
        log_ids=sequence.request.log_ids,
    )


def row_bytes(sequence: Sequence, block_size: int) -> int:
    """Bytes on the wire of a row that begins with the sequence, at most, without its prompt, which others may share."""
    num_blocks = -(-sequence.num_known // block_size)
    num_lists = len(sequence.generated) + len(sequence.stop_token_ids) + 2 * len(sequence.sampling.logit_bias)
    return TOKEN_BYTES * num_lists + BLOCK_BYTES * num_blocks + _OTHER_BYTES


def group_bytes(members: Iterable[Sequence], block_size: int) -> int:
    """Bytes on the wire of rows that begin with sequences of one request in one plan, at most."""
    size = 0
    for member in members:
        size = size or TOKEN_BYTES * len(member.request.prompt_token_ids)
        size += row_bytes(member, block_size)
    return size


def _is_linear(sequence: Sequence) -> bool:
    composition = sequence.request.composition
    return composition is not None and composition.combination is Combination.LINEAR


def _may_ban(sampling: Sampling, sequence: Sequence) -> bool:
    return len(sequence.generated) < sampling.min_tokens

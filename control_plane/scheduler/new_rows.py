"""How a sequence becomes a row of the worker: its tokens, its table and how its tokens are chosen."""

from __future__ import annotations

from dataclasses import replace

from control_plane.scheduler.sequence import Sequence
from control_plane.scheduler.types import NewRow, Sampling


def begin_row(sequence: Sequence, slot_generation: int) -> NewRow:
    """What the worker is told of a sequence that holds a row, blocks and a lease but that the worker does not know.

    Its KV is in its blocks up to num_planned by the time the plan is executed; `slot_generation` is 0 without adapter.
    """
    assert not sequence.is_begun, f"request {sequence.request.request_id} begins a row twice"
    sequence.is_begun = True
    sampling = sequence.sampling
    if sequence.tells_prompt:
        sequence.group.prompt_logprobs = None  # what an earlier row told of a part of the prompt is told again
    elif sampling.num_prompt_logprobs is not None:
        sampling = replace(sampling, num_prompt_logprobs=None)
    return NewRow(
        row=sequence.row,
        request_id=sequence.request.request_id,
        token_ids=sequence.known_tokens(),
        num_prompt_tokens=len(sequence.request.prompt_token_ids),
        num_computed_tokens=sequence.num_planned,
        block_ids=list(sequence.block_ids),
        slot=sequence.slot_idx,
        slot_generation=slot_generation,
        sampling=sampling,
        banned_token_ids=tuple(sorted(sequence.stop_token_ids)) if _may_ban(sampling, sequence) else (),
        is_stepwise=sequence.is_stepwise,
    )


def _may_ban(sampling: Sampling, sequence: Sequence) -> bool:
    return len(sequence.generated) < sampling.min_tokens

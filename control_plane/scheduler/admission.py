"""Whether a request can run on a worker at all, and the group of sequences it becomes. No state."""

from __future__ import annotations

from control_plane.scheduler.errors import AdapterNeverFits, ContextNeverFits, RequestNeverFits, RowsNeverFit
from control_plane.scheduler.prefix_cache import chain_root
from control_plane.scheduler.sequence import Sequence
from control_plane.scheduler.sequence_group import SequenceGroup
from control_plane.scheduler.types import Request, WorkerLimits
from control_plane.scheduler.verdict import Verdict, judge_blocks


def make_group(request: Request, limits: WorkerLimits, serial: int) -> SequenceGroup:
    """A group for the request; `serial` orders those that arrived at one time.

    Raises RequestNeverFits (or its subclasses for context and adapter) if it could not run there even alone.
    """
    num_prompt = len(request.prompt_token_ids)
    num_known = num_prompt + len(request.generated_token_ids)
    assert num_prompt > 0, f"request {request.request_id} has no prompt"
    assert len(request.generated_token_ids) < request.max_tokens, f"request {request.request_id} is finished"
    max_generated = min(request.max_tokens, limits.max_model_len - num_prompt)
    num_blocks = -(-max(num_known, num_prompt + max_generated - 1) // limits.block_size)
    if num_known >= limits.max_model_len:
        raise ContextNeverFits(
            num_blocks,
            limits.num_blocks,
            f"{num_known} tokens leave no room to generate in a context of {limits.max_model_len}; shorten the prompt",
        )
    fit = judge_blocks(num_blocks, num_available=limits.num_blocks, num_blocks=limits.num_blocks)
    if fit is Verdict.NEVER:
        raise RequestNeverFits(num_blocks, limits.num_blocks)
    num_sequences = request.num_samples if request.beam is None else request.beam.width
    if num_sequences > limits.max_rows:
        raise RowsNeverFit(
            num_blocks,
            limits.num_blocks,
            f"{num_sequences} sequences at once, the worker has {limits.max_rows} rows; ask for fewer answers or raise "
            "--max-rows",
        )
    adapter = request.adapter
    if adapter is not None and (adapter.arena_bytes > limits.arena_bytes or limits.num_slots == 0):
        raise AdapterNeverFits(
            num_blocks,
            limits.num_blocks,
            f"the adapter takes {adapter.arena_bytes} bytes, the worker's arena has {limits.arena_bytes} in "
            f"{limits.num_slots} slots; raise arena_bytes or lower the adapter's rank",
        )
    group = SequenceGroup(
        request=request,
        order=(request.arrival_s, serial),
        cache_root=chain_root(None if adapter is None else adapter.digest, request.cache_salt),
    )
    group.members.append(
        Sequence(
            group=group,
            index=0,
            request=request,
            order=group.order,
            max_generated=max_generated,
            max_planned=num_prompt + max_generated - 1,
            stop_token_ids=request.stop_token_ids,
            generated=list(request.generated_token_ids),
        )
    )
    return group

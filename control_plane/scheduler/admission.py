"""Whether a request can run on a worker at all, and the group of sequences it becomes. No state."""

from __future__ import annotations

from dataclasses import replace

from control_plane.scheduler.errors import (
    AdapterNeverFits,
    ContextNeverFits,
    PlanNeverFits,
    PoolingNeverFits,
    RequestNeverFits,
    RowsNeverFit,
)
from control_plane.scheduler.memory.block_fit import BlockFit, fit_blocks
from control_plane.scheduler.memory.prefix_cache import activation_root, chain_root
from control_plane.scheduler.requests.beam_search import BeamSearcher
from control_plane.scheduler.requests.sequence import Sequence, SequenceGroup
from control_plane.scheduler.step.new_rows import BLOCK_BYTES, MAX_ROW_BYTES
from control_plane.scheduler.types import (
    TOKEN_BYTES,
    BeamSearch,
    Completion,
    Request,
    Sampling,
    WorkerLimits,
    sample_seed,
)


def check_fits(request: Request, limits: WorkerLimits) -> None:
    """Raise RequestNeverFits (or a subclass) if the request could not run on the worker even alone."""
    num_prompt = len(request.prompt_token_ids)
    completions = _completions_of(request)
    live = [completion for completion in completions if not completion.is_ended]
    assert num_prompt > 0, f"request {request.request_id} has no prompt"
    assert len(completions) == request.num_samples, f"request {request.request_id} has completions for other indices"
    assert live and all(len(c.token_ids) < request.max_tokens for c in live), f"request {request.request_id} is over"
    num_sequences = len(live) if request.beam is None else request.beam.width
    num_blocks = _most_blocks(num_prompt, num_prompt + request.max_tokens - 1, num_sequences, limits.block_size)
    context = limits.context_of(request.adapter)
    if num_prompt + request.max_tokens > context:
        raise ContextNeverFits(
            num_blocks,
            limits.num_blocks,
            f"together they exceed the worker's context of {context} tokens; shorten the prompt or lower max_tokens",
        )
    num_computed = num_prompt + request.max_tokens
    num_bytes = TOKEN_BYTES * num_computed + BLOCK_BYTES * -(-num_computed // limits.block_size)
    if num_bytes > MAX_ROW_BYTES:
        raise PlanNeverFits(
            num_blocks,
            limits.num_blocks,
            f"{num_computed} tokens with their block table take {num_bytes} bytes of a plan, at most {MAX_ROW_BYTES} "
            "fit; shorten the prompt or lower max_tokens",
        )
    if num_sequences > limits.max_rows:
        raise RowsNeverFit(
            num_blocks,
            limits.num_blocks,
            f"{num_sequences} sequences at once, the worker has {limits.max_rows} rows; request fewer completions or "
            "raise --max-rows",
        )
    fit = fit_blocks(num_blocks, num_available=limits.num_blocks, num_blocks=limits.num_blocks)
    if fit is BlockFit.NEVER:
        raise RequestNeverFits(num_blocks, limits.num_blocks)
    if request.pooling is not None and limits.hidden_width == 0:
        raise PoolingNeverFits(
            num_blocks, limits.num_blocks, "the worker cannot read the model's last hidden state; generate instead"
        )
    adapters = request.adapters
    num_adapter_bytes = sum(ref.arena_bytes for ref in adapters)
    if num_adapter_bytes > limits.arena_bytes or len(adapters) > limits.num_slots:
        what = "the adapter takes" if len(adapters) == 1 else f"the {len(adapters)} adapters take"
        raise AdapterNeverFits(
            num_blocks,
            limits.num_blocks,
            f"{what} {num_adapter_bytes} bytes, the worker's arena has {limits.arena_bytes} in "
            f"{limits.num_slots} slots; raise arena_bytes or lower the adapter's rank",
        )


def make_group(request: Request, limits: WorkerLimits, serial: int) -> SequenceGroup:
    """A group for the request; `serial` orders those that arrived at one time. Raises what `check_fits` does."""
    check_fits(request, limits)
    group = SequenceGroup(
        request=request,
        order=(request.arrival_s, serial),
        cache_root=chain_root(request),
        activation_root=activation_root(request),
    )
    if request.beam is not None:
        _add_beams(group, request.beam)
        return group
    for index, completion in enumerate(_completions_of(request)):
        sampling = _sampling_of(request.sampling, index)
        wants_logprobs = sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None
        sequence = _make_sequence(group, index, sampling, wants_logprobs=wants_logprobs)
        sequence.generated = list(completion.token_ids)
        sequence.is_ended = completion.is_ended
        group.members.append(sequence)
    return group


def _completions_of(request: Request) -> tuple[Completion, ...]:
    return request.completions or (Completion(request.generated_token_ids),) * request.num_samples


def _add_beams(group: SequenceGroup, beam: BeamSearch) -> None:
    """Members of a beam search: the first computes the prompt, the others wait for its first tokens."""
    request = group.request
    assert request.num_samples == 1 and not request.generated_token_ids, "a beam search begins with one prompt"
    group.searcher = BeamSearcher(
        beam,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.sampling.min_tokens,
        max_generated=request.max_tokens,
    )
    sampling = Sampling(num_logprobs=group.searcher.num_candidates)
    for index in range(beam.width):
        sequence = _make_sequence(group, index, sampling, wants_logprobs=True)
        sequence.is_host_fed = True
        sequence.max_planned = sequence.num_known
        group.members.append(sequence)
    group.beam_sequences = group.members[:1]


def _make_sequence(group: SequenceGroup, index: int, sampling: Sampling, *, wants_logprobs: bool) -> Sequence:
    request = group.request
    return Sequence(
        group=group,
        index=index,
        request=request,
        request_id=request.request_id,
        account=request.account,
        stop_token_ids=request.stop_token_ids,
        sampling=sampling,
        max_generated=request.max_tokens,
        max_planned=len(request.prompt_token_ids) + request.max_tokens - 1,
        wants_logprobs=wants_logprobs,
        has_extras=wants_logprobs or index > 0 or request.pooling is not None,
        generated=[],
    )


def _most_blocks(num_prompt: int, num_computed: int, num_sequences: int, block_size: int) -> int:
    """The most KV blocks that sequences of one prompt hold; they share its full blocks but the last token's."""
    num_shared = (num_prompt - 1) // block_size if num_sequences > 1 else 0
    return num_shared + num_sequences * (-(-num_computed // block_size) - num_shared)


def _sampling_of(sampling: Sampling, index: int) -> Sampling:
    """Sampling settings of one completion; the prompt's log-probabilities are returned once, with the first one."""
    if index == 0:
        return sampling
    return replace(sampling, seed=sample_seed(sampling.seed, index), num_prompt_logprobs=None)

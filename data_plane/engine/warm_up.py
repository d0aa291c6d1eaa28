"""Runs every kind of step once, so that the kernels are compiled before the worker serves.

Called by build.py on devices that compile kernels; memory/largest_step.py runs the largest steps, to measure them.
Drives the engine as a control plane would, with adapters that add nothing, and leaves the engine empty.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from contract.hello_bounds import MAX_ROWS, MAX_STEP_TOKENS
from contract.process_log import Progress, shown
from data_plane.engine.engine import PROMPT_LOGITS_BYTES, TorchEngine
from data_plane.errors import ArenaFull
from data_plane.plan import GREEDY, Capacities, Int32Array, NewRow, RowSampling, StepPlan

logger = logging.getLogger(__name__)

# Kernels are compiled for ranges of ranks. If a rank between these needs another kernel, that is compiled when it
# comes. DoRA scales and biases do not depend on the rank, so one case covers them.
ADAPTERS = ((8, False), (16, False), (16, True), (32, False), (64, False))  # rank, whether it has such vectors
# Tokens of a prefill: from 512 on blocks have 32 tokens of an adapter; and an odd number.
LONG_CHUNK, SHORT_CHUNK = 512, 17
# Rows that decode: libraries choose other kernels for more rows, and load each at its first use.
MANY_ROWS = (16, 64)
# Long enough for attention to a sequence to be cut in parts.
LONG_CONTEXT = 4096

_DRAWN = replace(GREEDY, temperature=1.0)
# Most requests with a limit have no adjustment, and their positions are on the device.
_LIMITED = replace(_DRAWN, top_k=20, top_p=0.9)
_FILTERED = replace(_LIMITED, min_p=0.01)
_EVERYTHING = RowSampling(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    seed=1,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    biased_token_ids=np.zeros(1, dtype=np.int32),
    biases=np.ones(1, dtype=np.float32),
    num_logprobs=1,
)
# A prompt's log-probabilities need the logits of its tokens, up to PROMPT_LOGITS_BYTES of them.
_SCORED = replace(GREEDY, num_prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are prefilled together, and then decode one token together."""

    num_rows: int
    num_tokens: int  # of each row's prefill
    num_context: int = 0  # tokens before them
    rank: int = 0  # of the rows' adapter; 0: none
    has_vectors: bool = False  # LoRA bias and DoRA scales
    sampling: RowSampling = GREEDY
    num_scored: int = 0  # tokens of the last row's prefill, whose log-probabilities are wanted; 0: it is as the others


def cases(captured_sizes: Sequence[int] = ()) -> list[Case]:
    """All cases, those of one adapter next to each other. The first is the largest step that a plan may contain.

    captured_sizes: numbers of rows whose decodes are captured, each of which has to run before.
    """
    return [
        # The largest step goes first: if memory is short, the worker says so at once.
        Case(MAX_ROWS, MAX_STEP_TOKENS, sampling=_EVERYTHING),
        *(Case(num_rows, 1) for num_rows in sorted({*MANY_ROWS, *captured_sizes})),
        *(
            Case(num_rows, SHORT_CHUNK, sampling=sampling)
            for num_rows in (1, 3, MANY_ROWS[0])
            for sampling in (_DRAWN, _LIMITED, _FILTERED, _EVERYTHING)
        ),
        *(Case(num_rows, LONG_CHUNK, num_context) for num_rows in (1, 3) for num_context in (0, LONG_CONTEXT)),
        *(
            Case(num_rows, num_tokens, rank=rank, has_vectors=has_vectors)
            for rank, has_vectors in ADAPTERS
            for num_rows, num_tokens in ((1, LONG_CHUNK), (3, 1))
        ),
    ]


def run_largest_steps(engine: TorchEngine) -> int:
    """Run the steps that take the most memory, and return the tokens of the largest. The engine must be empty.

    The most tokens over the most rows, with an adapter of the largest usual rank that fits, every option of sampling,
    and as many log-probabilities of a prompt as a pass keeps; and the decodes of all rows after it.
    """
    rank = _load_largest(engine)
    capacities, num_steps, num_tokens = engine.capacities, 0, 0
    num_scored = max(PROMPT_LOGITS_BYTES // (4 * capacities.vocab_size), 1)
    largest = [Case(MAX_ROWS, MAX_STEP_TOKENS, rank=rank, sampling=_EVERYTHING, num_scored=num_scored)]
    if capacities.max_rows == 1:  # a pass of its prompt has the most tokens, or their log-probabilities
        largest.append(Case(1, min(num_scored, MAX_STEP_TOKENS), sampling=_SCORED))
    for case in largest:
        for plan in _plans(case, capacities, num_steps + 1, 1):
            engine.execute(plan)
            num_steps += 1
            num_tokens = max(num_tokens, int(plan.prefills[:, 1].sum()))
    return num_tokens


def _load_largest(engine: TorchEngine) -> int:
    """Fill slot 0 with generation 1: of the ranks of ADAPTERS the highest that fits, which is returned; 0 if none."""
    for rank, has_vectors in reversed(ADAPTERS):
        try:
            engine.arena.load_zeros(0, 1, rank, has_vectors=has_vectors)
        except ArenaFull:
            continue
        return rank
    return 0


def warm_up(engine: TorchEngine, captured_sizes: Sequence[int] = ()) -> int:
    """Run every case, reduced to what the engine holds. Returns the number of steps. The engine must be empty.

    captured_sizes: see `cases`.
    """
    started = time.perf_counter()
    num_steps = 0
    ready, generation = (0, False), 0
    to_run = cases(captured_sizes)
    logger.info("warm-up cases=%d", len(to_run), extra=shown("warming up: runs each kind of step once"))
    progress = Progress(logger, "warm-up", len(to_run))
    for case in to_run:
        if case.rank and ready != (case.rank, case.has_vectors):
            if generation:
                engine.arena.evict(0, generation)
            ready, generation = (case.rank, case.has_vectors), generation + 1
            try:
                engine.arena.load_zeros(0, generation, case.rank, has_vectors=case.has_vectors)
            except ArenaFull as error:
                logger.info("no warm-up with adapters of rank %d or more: %s", case.rank, error)
                break
        for plan in _plans(case, engine.capacities, num_steps + 1, generation):
            engine.execute(plan)
            num_steps += 1
        progress.advance()
    engine.reset()
    time_s = time.perf_counter() - started
    logger.info("warmed up steps=%d time_s=%.1f", num_steps, time_s, extra=shown(f"warmed up in {time_s:.1f} s"))
    return num_steps


def _plans(case: Case, capacities: Capacities, step_id: int, generation: int) -> list[StepPlan]:
    """Prefill, decode, then the rows' end and a block copy; empty if the engine has no room for a row that decodes."""
    size = capacities.block_size
    # The context is the last block repeated: only the number of blocks matters.
    num_context = min(case.num_context, capacities.max_model_len - 2) // size * size if capacities.num_blocks > 1 else 0
    shared = [capacities.num_blocks - 1] * (num_context // size)
    num_blocks = capacities.num_blocks - bool(shared)
    blocks_for_two = -(-2 // size)
    num_rows = min(case.num_rows, capacities.max_rows, capacities.max_step_tokens, num_blocks // blocks_for_two)
    if num_rows == 0:
        return []
    counts = _prefilled(case, capacities, num_rows, num_blocks, capacities.max_model_len - num_context - 1)
    rows = np.arange(num_rows, dtype=np.int32)
    own_blocks = -(-(counts + 1) // size)
    first_blocks = np.cumsum(own_blocks) - own_blocks
    samplings = [case.sampling] * num_rows
    if case.num_scored and num_rows > 1:
        samplings[-1] = replace(case.sampling, num_prompt_logprobs=1)
    new_rows = [
        NewRow(
            row=row,
            token_ids=np.arange(num_context + counts[row], dtype=np.int32) % capacities.vocab_size,
            num_prompt_tokens=num_context + int(counts[row]),
            num_computed_tokens=num_context,
            block_ids=np.concatenate([shared, first_blocks[row] + np.arange(own_blocks[row])]).astype(np.int32),
            slot=0 if case.rank else None,
            slot_generation=generation,
            sampling=samplings[row],
        )
        for row in range(num_rows)
    ]
    copies = np.array([(0, capacities.num_blocks - 1)] if capacities.num_blocks > 1 else [], dtype=np.int32).reshape(
        -1, 2
    )
    prefills = np.stack([rows, counts], axis=1)
    return [
        StepPlan(step_id, new_rows=new_rows, prefills=prefills),
        StepPlan(step_id + 1),
        StepPlan(step_id + 2, freed_rows=rows, block_copies=copies),
    ]


def _prefilled(case: Case, capacities: Capacities, num_rows: int, num_blocks: int, longest: int) -> Int32Array:
    """Tokens of each row's prefill, int32 [num_rows]: at most `longest` each. A row's blocks hold one token more."""
    size, num_tokens = capacities.block_size, capacities.max_step_tokens
    scored = []
    if case.num_scored and num_rows > 1:
        num_rows -= 1
        scored = [min(case.num_scored, longest, num_tokens - num_rows)]
        num_tokens -= scored[0]
        num_blocks -= -(-(scored[0] + 1) // size)
    of_each = min(case.num_tokens, num_tokens // num_rows, num_blocks // num_rows * size - 1, longest)
    # The last of these rows takes the step's remaining tokens, as far as there is room.
    num_tokens -= (num_rows - 1) * of_each
    num_blocks -= (num_rows - 1) * -(-(of_each + 1) // size)
    last = min(case.num_tokens, num_tokens, num_blocks * size - 1, longest)
    return np.array([*[of_each] * (num_rows - 1), last, *scored], dtype=np.int32)

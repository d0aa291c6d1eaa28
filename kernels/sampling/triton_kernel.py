"""Sampling on the GPU: the reference's tokens. One pass over the logits where no row has a limit.

Rows that have a limit take their highest value from that pass. Then come, for them alone, a search for what is kept and
a pass for the draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div, round_up
from kernels.devices import device_name
from kernels.sampling.launch import SampleLaunch, Sizes, sample_launch
from kernels.sampling.rows import Adjustments, SamplingRows
from kernels.sampling.triton_adjust import adjust
from kernels.sampling.triton_search import raise_lowest
from kernels.sampling.triton_values import (
    LOWEST,
    Launch,
    has_limit,
    highest_of,
    load_values,
    not_finite,
    ordered,
    scaled_scores,
)
from kernels.triton_launch import kernel


@triton.jit
def _mix(state):
    """SplitMix64's finaliser on uint64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _gumbel(seed, position, token_ids):
    """See the reference; seed and position are int64 scalars. float64."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64) + golden) + (position + 1).to(tl.uint64) * golden)
    bits = _mix(key + (token_ids + 1).to(tl.uint64) * golden)
    uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return -tl.log(-tl.log(uniform))


@kernel(do_not_specialize=["num_parts"])
def draw_kernel(
    # pointers
    best_ptr,  # float64 [n, num_parts]
    best_id_ptr,  # int32 [n, num_parts]
    limited_ptr,  # int64 [m]
    highest_ptr,  # float32 [n, num_parts]
    lowest_ptr,  # uint32 as int32 [n]
    logits_ptr,  # [n, V]
    adjusted_ptr,  # float32 [m, V]
    source_ptr,  # int32 [n]
    temperature_ptr,  # float32 [n]
    top_k_ptr,  # int64 [n]
    top_p_ptr,  # float32 [n]
    min_p_ptr,  # float32 [n]
    seed_ptr,  # int64 [n]
    position_ptr,  # int64 [n]
    # sizes
    vocab_size,
    num_parts,
    # strides
    stride_ln,
    stride_lv,
    # options
    HAS_MIN_P: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Best score and its token in each part of the rows with a limit. Grid: (m, num_parts)."""
    row, part = tl.load(limited_ptr + tl.program_id(0)), tl.program_id(1)
    if not has_limit(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row):
        return
    source = tl.load(source_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    lowest = tl.load(lowest_ptr + row).to(tl.uint32, bitcast=True)
    highest = highest_of(highest_ptr, row, num_parts, PARTS)
    best = tl.full((TILE,), float("-inf"), tl.float64)
    best_id = part * PART + tl.arange(0, TILE)
    for begin in range(0, PART, TILE):
        offs = part * PART + begin + tl.arange(0, TILE)
        values = load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv)
        is_kept = (offs < vocab_size) & (ordered(values) >= lowest)
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            score = scaled_scores(values, highest, temperature)
            if HAS_MIN_P:
                is_kept = is_kept & (tl.exp(score) >= tl.load(min_p_ptr + row).to(tl.float64))
            score += _gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), offs)
            is_better = is_kept & (score > best)
            best = tl.where(is_better, score, best)
            best_id = tl.where(is_better, offs, best_id)
    most = tl.max(best, 0)
    tl.store(best_ptr + row * num_parts + part, most)
    tl.store(best_id_ptr + row * num_parts + part, tl.min(tl.where(best == most, best_id, 0x7FFFFFFF), 0))


@kernel(do_not_specialize=["num_parts"])
def best_kernel(
    # pointers
    value_ptr,  # float32 [n, num_parts]
    best_ptr,  # float64 [n, num_parts]
    best_id_ptr,  # int32 [n, num_parts]
    num_bad_ptr,  # int32 [n, num_parts]: logits that are not finite
    logits_ptr,  # [n, V]
    adjusted_ptr,  # float32 [m, V]
    source_ptr,  # int32 [n]
    temperature_ptr,  # float32 [n]
    top_k_ptr,  # int64 [n]
    top_p_ptr,  # float32 [n]
    min_p_ptr,  # float32 [n]
    seed_ptr,  # int64 [n]
    position_ptr,  # int64 [n]
    # sizes
    vocab_size,
    num_parts,
    # strides
    stride_ln,
    stride_lv,
    # options
    HAS_ROWS: tl.constexpr,  # False: all are greedy
    HAS_LIMITS: tl.constexpr,  # False: no row has one
    HAS_ADJUSTED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Value, noise and token of the winner of each part; of a greedy row, and of one with a limit, the largest value.

    Grid: (n, num_parts).
    Two tokens are compared by the difference of their values, so that the row's highest value need not be known.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = -1
    if HAS_ADJUSTED:
        source = tl.load(source_ptr + row)
    temperature = 0.0
    if HAS_ROWS:
        temperature = tl.load(temperature_ptr + row)
        if HAS_LIMITS:
            is_limited = has_limit(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row)
            temperature = tl.where(is_limited, 0.0, temperature)
    divisor = tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    value = tl.full((TILE,), LOWEST, tl.float32)
    noise = tl.zeros((TILE,), tl.float64)
    best_id = part * PART + tl.arange(0, TILE)
    num_bad = tl.zeros((TILE,), tl.int32)
    for begin in range(0, PART, TILE):
        offs = part * PART + begin + tl.arange(0, TILE)
        values = load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv)
        num_bad += not_finite(logits_ptr, row, offs, vocab_size, stride_ln, stride_lv)
        values = tl.maximum(values, LOWEST)
        is_better = values > value
        if HAS_ROWS:  # noqa: SIM102 - known when this is compiled, unlike the temperature
            if temperature > 0:
                noises = _gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), offs)
                lead = (values.to(tl.float64) - value.to(tl.float64)) / divisor
                is_better = (values > LOWEST) & ((value == LOWEST) | (lead + noises > noise))
                noise = tl.where(is_better, noises, noise)
        value = tl.where(is_better, values, value)
        best_id = tl.where(is_better, offs, best_id)
    scores = (value.to(tl.float64) - tl.max(value, 0).to(tl.float64)) / divisor + noise
    token = tl.min(tl.where(scores == tl.max(scores, 0), best_id, 0x7FFFFFFF), 0)
    is_winner = best_id == token
    place = row * num_parts + part
    tl.store(value_ptr + place, tl.max(tl.where(is_winner, value, LOWEST), 0))
    tl.store(best_ptr + place, tl.sum(tl.where(is_winner, noise, 0.0), 0))
    tl.store(best_id_ptr + place, token)
    tl.store(num_bad_ptr + place, tl.sum(num_bad, 0))


@kernel(do_not_specialize=["num_parts"])
def pick_kernel(
    tokens_ptr,  # int64 [n]
    is_finite_ptr,  # uint8 [n]
    value_ptr,  # float32 [n, num_parts], and so the others
    best_ptr,
    best_id_ptr,
    num_bad_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    num_parts,
    HAS_ROWS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The best of the parts, the lowest id among equals; and whether all logits are finite. Grid: (n,).

    `best` is the score of a row with a limit, and the noise of the value in other rows.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PARTS)
    is_part = offs < num_parts
    place = row * num_parts + offs
    best = tl.load(best_ptr + place, mask=is_part, other=0.0)
    value = tl.load(value_ptr + place, mask=is_part, other=LOWEST)
    divisor = tl.full((), 1.0, tl.float64)
    if HAS_ROWS:
        temperature = tl.load(temperature_ptr + row)
        divisor = tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    score = best + (value.to(tl.float64) - tl.max(value, 0).to(tl.float64)) / divisor
    if HAS_LIMITS:
        best = tl.where(has_limit(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row), best, score)
    else:
        best = score
    best = tl.where(is_part, best, float("-inf"))
    best_id = tl.load(best_id_ptr + place, mask=is_part, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, 0), best_id, 0x7FFFFFFF), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    num_bad = tl.sum(tl.load(num_bad_ptr + place, mask=is_part, other=0), 0)
    tl.store(is_finite_ptr + row, (num_bad == 0).to(tl.uint8))


def sample(
    logits: torch.Tensor,
    rows: SamplingRows | None,
    adjustments: Adjustments | None,
    *,
    parameters: SampleLaunch | None = None,
) -> torch.Tensor:
    """See the package. The last replaces the launch parameters."""
    return sample_and_check(logits, rows, adjustments, parameters=parameters)[0]


def sample_and_check(
    logits: torch.Tensor,
    rows: SamplingRows | None,
    adjustments: Adjustments | None,
    *,
    parameters: SampleLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package. The last replaces the launch parameters."""
    num_rows, vocab_size = logits.shape
    parameters = parameters or sample_launch(device_name(logits.device), Sizes.of(logits))
    grid = (num_rows, ceil_div(vocab_size, parameters.part))
    best, value, best_id, num_bad = (
        logits.new_empty(grid, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.int32, torch.int32)
    )
    has_limits = rows is not None and (rows.has_top_k or rows.has_top_p or rows.has_min_p)
    adjusted, source = _adjusted(logits, adjustments, has_source=has_limits)
    settings = (logits,) * 4 if rows is None else (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    best_kernel[grid](
        value,
        best,
        best_id,
        num_bad,
        logits,
        adjusted,
        source,
        *settings,
        *((logits,) * 2 if rows is None else (rows.seed, rows.position)),
        vocab_size,
        grid[1],
        *logits.stride(),
        HAS_ROWS=rows is not None,
        HAS_LIMITS=has_limits,
        HAS_ADJUSTED=adjustments is not None,
        PART=parameters.part,
        TILE=parameters.tile,
        num_warps=parameters.num_warps,
        enable_fp_fusion=False,
    )
    if rows is not None and has_limits:
        launch = Launch(
            logits,
            adjusted,
            source,
            rows,
            limited=torch.arange(num_rows, device=logits.device) if rows.limited is None else rows.limited,
            highest=value,
            lowest=torch.zeros(num_rows, dtype=torch.int32, device=logits.device),
            num_parts=grid[1],
            parameters=parameters,
        )
        _draw_limited(launch, best, best_id)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    is_finite = logits.new_empty(num_rows, dtype=torch.uint8)
    pick_kernel[(num_rows,)](
        tokens,
        is_finite,
        value,
        best,
        best_id,
        num_bad,
        *settings,
        grid[1],
        HAS_ROWS=rows is not None,
        HAS_LIMITS=has_limits,
        PARTS=round_up(grid[1]),
        enable_fp_fusion=False,
    )
    return tokens, is_finite.view(torch.bool)


def _adjusted(
    logits: torch.Tensor, adjustments: Adjustments | None, *, has_source: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adjusted logits [m, V], and of each row its row of them, or -1. Without adjustments both may be any tensors."""
    if adjustments is None and not has_source:
        return logits, logits
    source = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
    if adjustments is None:
        return logits, source
    adjusted = adjust(logits, adjustments)
    source[adjustments.rows] = torch.arange(len(adjusted), dtype=torch.int32, device=logits.device)
    return adjusted, source


def _draw_limited(launch: Launch, best: torch.Tensor, best_id: torch.Tensor) -> None:
    """Best score of each part among what the rows' limits keep, in place of what is there."""
    logits, rows, parameters = launch.logits, launch.rows, launch.parameters
    if len(launch.limited) == 0:
        return
    if rows.has_top_k:
        raise_lowest(launch, of_mass=False)
    if rows.has_top_p:
        raise_lowest(launch, of_mass=True)
    draw_kernel[(len(launch.limited), launch.num_parts)](
        best,
        best_id,
        launch.limited,
        launch.highest,
        launch.lowest,
        *launch.values,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.position,
        logits.shape[1],
        launch.num_parts,
        *logits.stride(),
        HAS_MIN_P=rows.has_min_p,
        **launch.sizes,
        num_warps=parameters.num_warps,
        enable_fp_fusion=False,
    )

"""Sampling on the GPU: the reference's tokens, by a search for what is kept and one pass for the draw."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div, round_up
from kernels.devices import device_name
from kernels.sampling.launch import SampleLaunch, Sizes, sample_launch
from kernels.sampling.rows import Adjustments, SamplingRows, rows_of
from kernels.sampling.triton_adjust import adjust
from kernels.sampling.triton_search import raise_lowest
from kernels.sampling.triton_values import Launch, highest_kernel, highest_of, load_values, ordered, scaled_scores


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


@triton.jit(do_not_specialize=["num_parts"])
def draw_kernel(
    # pointers
    best_ptr,  # float64 [n, num_parts]
    best_id_ptr,  # int32 [n, num_parts]
    highest_ptr,  # float32 [n, num_parts]
    lowest_ptr,  # uint32 as int32 [n]
    logits_ptr,  # [n, V]
    adjusted_ptr,  # float32 [m, V]
    source_ptr,  # int32 [n]
    temperature_ptr,  # float32 [n]
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
    """Best score and its token in each part; of a greedy row the largest value. Grid: (n, num_parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(source_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    lowest = tl.load(lowest_ptr + row).to(tl.uint32, bitcast=True)
    highest = highest_of(highest_ptr, row, num_parts, PARTS)
    best = tl.full((TILE,), float("-inf"), tl.float64)
    best_id = part * PART + tl.arange(0, TILE)
    for begin in range(0, PART, TILE):
        offs = part * PART + begin + tl.arange(0, TILE)
        values = load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv)
        if temperature > 0:
            is_kept = (offs < vocab_size) & (ordered(values) >= lowest)
            if tl.max(is_kept.to(tl.int32), 0) > 0:
                score = scaled_scores(values, highest, temperature)
                if HAS_MIN_P:
                    is_kept = is_kept & (tl.exp(score) >= tl.load(min_p_ptr + row).to(tl.float64))
                score += _gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), offs)
                is_better = is_kept & (score > best)
                best = tl.where(is_better, score, best)
                best_id = tl.where(is_better, offs, best_id)
        else:
            score = values.to(tl.float64)
            is_better = score > best
            best = tl.where(is_better, score, best)
            best_id = tl.where(is_better, offs, best_id)
    most = tl.max(best, 0)
    tl.store(best_ptr + row * num_parts + part, most)
    tl.store(best_id_ptr + row * num_parts + part, tl.min(tl.where(best == most, best_id, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=["num_parts"])
def pick_kernel(tokens_ptr, best_ptr, best_id_ptr, num_parts, PARTS: tl.constexpr):
    """tokens[row], int64: the best of the parts, the lowest id among equals. Grid: (n,)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PARTS)
    is_part = offs < num_parts
    best = tl.load(best_ptr + row * num_parts + offs, mask=is_part, other=float("-inf"))
    best_id = tl.load(best_id_ptr + row * num_parts + offs, mask=is_part, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, 0), best_id, 0x7FFFFFFF), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def sample(
    logits: torch.Tensor,
    rows: SamplingRows | None,
    adjustments: Adjustments | None,
    *,
    parameters: SampleLaunch | None = None,
) -> torch.Tensor:
    """See the package. The last replaces the launch parameters."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    source = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    adjusted = logits
    if adjustments is not None:
        adjusted = adjust(logits, adjustments)
        source[adjustments.rows] = torch.arange(len(adjusted), dtype=torch.int32, device=device)
    rows = rows if rows is not None else _greedy(num_rows, device)
    parameters = parameters or sample_launch(device_name(logits), Sizes.of(logits))
    num_parts = ceil_div(vocab_size, parameters.part)
    launch = Launch(
        logits,
        adjusted,
        source,
        rows,
        highest=torch.empty(num_rows, num_parts, dtype=torch.float32, device=device),
        lowest=torch.zeros(num_rows, dtype=torch.int32, device=device),
        num_parts=num_parts,
        parameters=parameters,
    )
    grid = (num_rows, num_parts)
    highest_kernel[grid](
        launch.highest,
        *launch.values,
        vocab_size,
        num_parts,
        *logits.stride(),
        PART=parameters.part,
        TILE=parameters.tile,
        num_warps=parameters.num_warps,
    )
    if rows.has_top_k:
        raise_lowest(launch, of_mass=False)
    if rows.has_top_p:
        raise_lowest(launch, of_mass=True)
    best = torch.empty(grid, dtype=torch.float64, device=device)
    best_id = torch.empty(grid, dtype=torch.int32, device=device)
    draw_kernel[grid](
        best,
        best_id,
        launch.highest,
        launch.lowest,
        *launch.values,
        rows.temperature,
        rows.min_p,
        rows.seed,
        rows.position,
        vocab_size,
        num_parts,
        *logits.stride(),
        HAS_MIN_P=rows.has_min_p,
        **launch.sizes,
        num_warps=parameters.num_warps,
        enable_fp_fusion=False,
    )
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    pick_kernel[(num_rows,)](tokens, best, best_id, num_parts, PARTS=round_up(num_parts))
    return tokens


def _greedy(num_rows: int, device: torch.device) -> SamplingRows:
    """Rows of temperature 0. What they hold beside it is not read."""
    return rows_of(num_rows, device)

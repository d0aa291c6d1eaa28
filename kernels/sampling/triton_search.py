"""The lowest logit that top-k or top-p keeps, four bits at a time.

It is the smallest t with measure(logits > t) < limit, the measure being the count for top-k and the integer mass for
top-p. Eight launches find t: each sums the measure per digit over the logits that begin with the digits found so far.
Integers give the same sums in any order, and the launches depend on shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import round_up
from kernels.sampling.reference import MASS_OF_ONE
from kernels.sampling.triton_values import Launch, highest_of, load_values, ordered, scaled_scores
from kernels.triton_launch import kernel

DIGIT_BITS = 4
NUM_PASSES = 32 // DIGIT_BITS
_NUM_DIGITS = tl.constexpr(1 << DIGIT_BITS)
_DIGIT_BITS = tl.constexpr(DIGIT_BITS)
_MASS_OF_ONE = tl.constexpr(float(MASS_OF_ONE))


@triton.jit
def _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, row, OF_MASS: tl.constexpr):
    """Whether the search changes what the row draws from."""
    limited = tl.load(top_p_ptr + row) < 1.0 if OF_MASS else tl.load(top_k_ptr + row) > 0
    return limited & (tl.load(temperature_ptr + row) > 0)


@triton.jit
def _limit(top_k_ptr, top_p_ptr, sums_ptr, row, index, num_rows, num_parts, OF_MASS: tl.constexpr, PARTS: tl.constexpr):
    """What measure(logits > t) stays below, int64; of a row without limit the largest number."""
    unlimited = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    if OF_MASS:
        # The first pass summed all that top-k keeps.
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        total = tl.sum(_digit_sums(sums_ptr, 0, index, num_rows, num_parts, PARTS), 0)
        least = tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)
        limit = tl.where(top_p < 1.0, least, unlimited)
    else:
        top_k = tl.load(top_k_ptr + row)
        limit = tl.where(top_k > 0, top_k, unlimited)
    return limit


@triton.jit
def _digit_sums(sums_ptr, pass_index, index, num_rows, num_parts, PARTS: tl.constexpr):
    """Measure per digit that a pass found in a row, int64 [16]. sums is [passes, n, num_parts, 16]."""
    offs_p = tl.arange(0, PARTS)[:, None]
    offs_d = tl.arange(0, _NUM_DIGITS)[None, :]
    base = ((pass_index * num_rows + index) * num_parts + offs_p) * _NUM_DIGITS + offs_d
    return tl.sum(tl.load(sums_ptr + base, mask=offs_p < num_parts, other=0), 0)


@triton.jit
def _descend(sums, prefix, above, limit):
    """One digit more: (prefix, measure of all logits above it).

    With sums [.. 2 5 1] of the digits .. 13 14 15, nothing above and a limit of 4: digit 14, since 1 < 4 <= 1 + 5.
    """
    digits = tl.arange(0, _NUM_DIGITS)
    is_larger = digits[None, :] > digits[:, None]
    larger = above + tl.sum(tl.where(is_larger, sums[None, :], 0), 1)
    digit = tl.min(tl.where(larger < limit, digits, _NUM_DIGITS), 0)
    return (prefix << _DIGIT_BITS) | digit.to(tl.uint32), tl.sum(tl.where(digits == digit, larger, 0), 0)


@kernel(do_not_specialize=["pass_index", "num_rows", "num_parts"])
def digit_kernel(
    # pointers
    sums_ptr,  # int64 [passes, n, num_parts, 16]
    prefix_ptr,  # uint32 as int32 [passes, n]: digits found before each pass
    above_ptr,  # int64 [passes, n]: measure of what lies above them
    limited_ptr,  # int64 [n]: the row of the logits and settings; the three above are by its place here
    lowest_ptr,  # uint32 as int32 [rows]: what an earlier search keeps
    highest_ptr,  # float32 [rows, num_parts]
    logits_ptr,  # [rows, V]
    adjusted_ptr,  # float32 [m, V]
    source_ptr,  # int32 [rows]
    temperature_ptr,  # float32 [rows]
    top_k_ptr,  # int64 [rows]
    top_p_ptr,  # float32 [rows]
    # sizes
    pass_index,
    num_rows,
    vocab_size,
    num_parts,
    # strides
    stride_ln,
    stride_lv,
    # options
    IS_FIRST: tl.constexpr,
    OF_MASS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums of one pass, counted if OF_MASS is false. Grid: (n, num_parts). Sums are int64.

    Programs of rows without this limit return at once.
    """
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(limited_ptr + index)
    if not _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, row, OF_MASS):
        return
    prefix = tl.full((), 0, tl.uint32)
    if not IS_FIRST:
        place = (pass_index - 1) * num_rows + index
        above = tl.load(above_ptr + place)
        prefix = tl.load(prefix_ptr + place).to(tl.uint32, bitcast=True)
        limit = _limit(top_k_ptr, top_p_ptr, sums_ptr, row, index, num_rows, num_parts, OF_MASS, PARTS)
        sums = _digit_sums(sums_ptr, pass_index - 1, index, num_rows, num_parts, PARTS)
        prefix, above = _descend(sums, prefix, above, limit)
        if part == 0:
            tl.store(prefix_ptr + place + num_rows, prefix.to(tl.int32, bitcast=True))
            tl.store(above_ptr + place + num_rows, above)
    source = tl.load(source_ptr + row)
    lowest = tl.load(lowest_ptr + row).to(tl.uint32, bitcast=True)
    temperature = tl.load(temperature_ptr + row)
    highest = highest_of(highest_ptr, row, num_parts, PARTS)
    shift = 32 - _DIGIT_BITS * (pass_index + 1)
    digits = tl.arange(0, _NUM_DIGITS)[:, None]
    found = tl.zeros((_NUM_DIGITS,), tl.int64)
    for begin in range(0, PART, TILE):
        offs = part * PART + begin + tl.arange(0, TILE)
        values = load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv)
        key = ordered(values)
        is_in = (offs < vocab_size) & (key >= lowest)
        if not IS_FIRST:
            is_in = is_in & ((key >> (shift + _DIGIT_BITS)) == prefix)
        if tl.max(is_in.to(tl.int32), 0) > 0:
            digit = ((key >> shift) & (_NUM_DIGITS - 1)).to(tl.int32)
            is_digit = is_in[None, :] & (digit[None, :] == digits)
            if OF_MASS:
                mass = (tl.exp(scaled_scores(values, highest, temperature)) * _MASS_OF_ONE + 0.5).to(tl.int64)
                found += tl.sum(tl.where(is_digit, mass[None, :], 0), 1)
            else:
                found += tl.sum(is_digit.to(tl.int32), 1)
    base = ((pass_index * num_rows + index) * num_parts + part) * _NUM_DIGITS
    tl.store(sums_ptr + base + tl.arange(0, _NUM_DIGITS), found)


@kernel(do_not_specialize=["num_rows", "num_parts"])
def lowest_kernel(
    lowest_ptr,
    sums_ptr,
    prefix_ptr,
    above_ptr,
    limited_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    num_rows,
    num_parts,
    LAST_PASS: tl.constexpr,
    OF_MASS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The last digit; raises lowest[row] to what this search keeps. Pointers as above. Grid: (n,)."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(limited_ptr + index)
    if not _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, row, OF_MASS):
        return
    place = LAST_PASS * num_rows + index
    limit = _limit(top_k_ptr, top_p_ptr, sums_ptr, row, index, num_rows, num_parts, OF_MASS, PARTS)
    sums = _digit_sums(sums_ptr, LAST_PASS, index, num_rows, num_parts, PARTS)
    prefix = tl.load(prefix_ptr + place).to(tl.uint32, bitcast=True)
    key, _ = _descend(sums, prefix, tl.load(above_ptr + place), limit)
    earlier = tl.load(lowest_ptr + row).to(tl.uint32, bitcast=True)
    tl.store(lowest_ptr + row, tl.where(key > earlier, key, earlier).to(tl.int32, bitcast=True))


def raise_lowest(launch: Launch, *, of_mass: bool) -> None:
    """Raise launch.lowest to what top-p (of_mass) or top-k keeps."""
    rows, num_rows, vocab_size = launch.rows, len(launch.limited), launch.logits.shape[1]
    new = launch.lowest.new_zeros
    sums = new((NUM_PASSES, num_rows, launch.num_parts, 1 << DIGIT_BITS), dtype=torch.int64)
    prefix, above = new((NUM_PASSES, num_rows)), new((NUM_PASSES, num_rows), dtype=torch.int64)
    for index in range(NUM_PASSES):
        digit_kernel[(num_rows, launch.num_parts)](
            sums,
            prefix,
            above,
            launch.limited,
            launch.lowest,
            launch.highest,
            *launch.values,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            index,
            num_rows,
            vocab_size,
            launch.num_parts,
            *launch.logits.stride(),
            IS_FIRST=index == 0,
            OF_MASS=of_mass,
            **launch.sizes,
            num_warps=launch.parameters.search_warps,
            enable_fp_fusion=False,
        )
    lowest_kernel[(num_rows,)](
        launch.lowest,
        sums,
        prefix,
        above,
        launch.limited,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        num_rows,
        launch.num_parts,
        LAST_PASS=NUM_PASSES - 1,
        OF_MASS=of_mass,
        PARTS=round_up(launch.num_parts),
    )

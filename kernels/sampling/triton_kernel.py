"""Sampling on the GPU: the reference's tokens, by a digit search for what is kept and one pass for the draw.

The lowest kept logit is the smallest t with measure(logits > t) < limit, the measure being the count for top-k and
the integer mass for top-p. Eight launches find t four bits at a time: each sums the measure per digit over the
logits that begin with the digits found so far. Integers give the same sums in any order, and the launches depend on
shapes alone. Rows lie in `parts` of PART tokens, each a program; whoever reads partial sums adds them up itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.sampling.reference import MASS_OF_ONE
from kernels.sampling.rows import Adjustments, SamplingRows
from kernels.sampling.triton_adjust import adjust

TILE = 1024  # tokens per load
PART = 8 * TILE  # tokens of one program
DIGIT_BITS = 4
NUM_PASSES = 32 // DIGIT_BITS
_NUM_DIGITS = tl.constexpr(1 << DIGIT_BITS)
_DIGIT_BITS = tl.constexpr(DIGIT_BITS)
_MASS_OF_ONE = tl.constexpr(float(MASS_OF_ONE))


@triton.jit
def _load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv):
    """Float32 values of a row: its adjusted logits where `source` names their row, else the logits."""
    is_inside = offs < vocab_size
    lowest = float("-inf")
    if source >= 0:
        values = tl.load(adjusted_ptr + source.to(tl.int64) * vocab_size + offs, mask=is_inside, other=lowest)
    else:
        ptrs = logits_ptr + row * stride_ln + offs.to(tl.int64) * stride_lv
        values = tl.load(ptrs, mask=is_inside, other=lowest).to(tl.float32)
    return values


@triton.jit
def _ordered(values):
    """Float32 as uint32 in the same order; -0 is 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _highest(highest_ptr, row, num_parts, PARTS: tl.constexpr):
    """The largest value of a row, float32."""
    offs = tl.arange(0, PARTS)
    return tl.max(tl.load(highest_ptr + row * num_parts + offs, mask=offs < num_parts, other=float("-inf")), 0)


@triton.jit
def _scores(values, highest, temperature):
    """(values - highest) / temperature in float64. Greedy rows have no score."""
    divisor = tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    return (values.to(tl.float64) - highest.to(tl.float64)) / divisor


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
def _highest_kernel(
    highest_ptr,  # float32 [n, num_parts]
    logits_ptr,  # [n, V]
    adjusted_ptr,  # float32 [m, V]
    source_ptr,  # int32 [n], row of `adjusted` or -1
    vocab_size,
    num_parts,
    stride_ln,
    stride_lv,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest value of each part. Grid: (n, num_parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(source_ptr + row)
    highest = tl.full((TILE,), float("-inf"), tl.float32)
    for begin in range(0, PART, TILE):
        offs = part * PART + begin + tl.arange(0, TILE)
        values = _load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv)
        highest = tl.maximum(highest, values)
    tl.store(highest_ptr + row * num_parts + part, tl.max(highest, 0))


@triton.jit
def _limit(top_k_ptr, top_p_ptr, sums_ptr, row, num_rows, num_parts, OF_MASS: tl.constexpr, PARTS: tl.constexpr):
    """What measure(logits > t) stays below, int64; of a row without limit the largest number."""
    unlimited = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    if OF_MASS:
        # The first pass summed all that top-k keeps.
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        total = tl.sum(_digit_sums(sums_ptr, 0, row, num_rows, num_parts, PARTS), 0)
        least = tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)
        limit = tl.where(top_p < 1.0, least, unlimited)
    else:
        top_k = tl.load(top_k_ptr + row)
        limit = tl.where(top_k > 0, top_k, unlimited)
    return limit


@triton.jit
def _digit_sums(sums_ptr, pass_index, row, num_rows, num_parts, PARTS: tl.constexpr):
    """Measure per digit that a pass found in a row, int64 [16]. sums is [passes, n, num_parts, 16]."""
    offs_p = tl.arange(0, PARTS)[:, None]
    offs_d = tl.arange(0, _NUM_DIGITS)[None, :]
    base = ((pass_index * num_rows + row) * num_parts + offs_p) * _NUM_DIGITS + offs_d
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


@triton.jit(do_not_specialize=["pass_index", "num_rows", "num_parts"])
def _digit_kernel(
    # pointers
    sums_ptr,  # int64 [passes, n, num_parts, 16]
    prefix_ptr,  # uint32 as int32 [passes, n]: digits found before each pass
    above_ptr,  # int64 [passes, n]: measure of what lies above them
    lowest_ptr,  # uint32 as int32 [n]: what an earlier search keeps
    highest_ptr,  # float32 [n, num_parts]
    logits_ptr,  # [n, V]
    adjusted_ptr,  # float32 [m, V]
    source_ptr,  # int32 [n]
    temperature_ptr,  # float32 [n]
    top_k_ptr,  # int64 [n]
    top_p_ptr,  # float32 [n]
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
    """Sums of one pass, counted if OF_MASS is false. Grid: (n, num_parts). Sums are int64."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    prefix = tl.full((), 0, tl.uint32)
    if not IS_FIRST:
        place = (pass_index - 1) * num_rows + row
        above = tl.load(above_ptr + place)
        prefix = tl.load(prefix_ptr + place).to(tl.uint32, bitcast=True)
        limit = _limit(top_k_ptr, top_p_ptr, sums_ptr, row, num_rows, num_parts, OF_MASS, PARTS)
        sums = _digit_sums(sums_ptr, pass_index - 1, row, num_rows, num_parts, PARTS)
        prefix, above = _descend(sums, prefix, above, limit)
        if part == 0:
            tl.store(prefix_ptr + place + num_rows, prefix.to(tl.int32, bitcast=True))
            tl.store(above_ptr + place + num_rows, above)
    source = tl.load(source_ptr + row)
    lowest = tl.load(lowest_ptr + row).to(tl.uint32, bitcast=True)
    temperature = tl.load(temperature_ptr + row)
    highest = _highest(highest_ptr, row, num_parts, PARTS)
    shift = 32 - _DIGIT_BITS * (pass_index + 1)
    digits = tl.arange(0, _NUM_DIGITS)[:, None]
    found = tl.zeros((_NUM_DIGITS,), tl.int64)
    for begin in range(0, PART, TILE):
        offs = part * PART + begin + tl.arange(0, TILE)
        values = _load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv)
        key = _ordered(values)
        is_in = (offs < vocab_size) & (key >= lowest)
        if not IS_FIRST:
            is_in = is_in & ((key >> (shift + _DIGIT_BITS)) == prefix)
        if tl.max(is_in.to(tl.int32), 0) > 0:
            digit = ((key >> shift) & (_NUM_DIGITS - 1)).to(tl.int32)
            is_digit = is_in[None, :] & (digit[None, :] == digits)
            if OF_MASS:
                mass = (tl.exp(_scores(values, highest, temperature)) * _MASS_OF_ONE + 0.5).to(tl.int64)
                found += tl.sum(tl.where(is_digit, mass[None, :], 0), 1)
            else:
                found += tl.sum(is_digit.to(tl.int32), 1)
    base = ((pass_index * num_rows + row) * num_parts + part) * _NUM_DIGITS
    tl.store(sums_ptr + base + tl.arange(0, _NUM_DIGITS), found)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _lowest_kernel(
    lowest_ptr,
    sums_ptr,
    prefix_ptr,
    above_ptr,
    top_k_ptr,
    top_p_ptr,
    num_rows,
    num_parts,
    LAST_PASS: tl.constexpr,
    OF_MASS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The last digit; raises lowest[row] to what this search keeps. Pointers as above. Grid: (n,)."""
    row = tl.program_id(0).to(tl.int64)
    place = LAST_PASS * num_rows + row
    limit = _limit(top_k_ptr, top_p_ptr, sums_ptr, row, num_rows, num_parts, OF_MASS, PARTS)
    sums = _digit_sums(sums_ptr, LAST_PASS, row, num_rows, num_parts, PARTS)
    prefix = tl.load(prefix_ptr + place).to(tl.uint32, bitcast=True)
    key, _ = _descend(sums, prefix, tl.load(above_ptr + place), limit)
    earlier = tl.load(lowest_ptr + row).to(tl.uint32, bitcast=True)
    tl.store(lowest_ptr + row, tl.where(key > earlier, key, earlier).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["num_parts"])
def _draw_kernel(
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
    highest = _highest(highest_ptr, row, num_parts, PARTS)
    best = tl.full((TILE,), float("-inf"), tl.float64)
    best_id = part * PART + tl.arange(0, TILE)
    for begin in range(0, PART, TILE):
        offs = part * PART + begin + tl.arange(0, TILE)
        values = _load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv)
        if temperature > 0:
            is_kept = (offs < vocab_size) & (_ordered(values) >= lowest)
            if tl.max(is_kept.to(tl.int32), 0) > 0:
                score = _scores(values, highest, temperature)
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
def _pick_kernel(tokens_ptr, best_ptr, best_id_ptr, num_parts, PARTS: tl.constexpr):
    """tokens[row], int64: the best of the parts, the lowest id among equals. Grid: (n,)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PARTS)
    is_part = offs < num_parts
    best = tl.load(best_ptr + row * num_parts + offs, mask=is_part, other=float("-inf"))
    best_id = tl.load(best_id_ptr + row * num_parts + offs, mask=is_part, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, 0), best_id, 0x7FFFFFFF), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@dataclass(frozen=True, slots=True)
class _Launch:
    """What every kernel of one step takes."""

    logits: torch.Tensor
    adjusted: torch.Tensor  # logits where there is none: never read then
    source: torch.Tensor
    rows: SamplingRows
    highest: torch.Tensor
    lowest: torch.Tensor
    num_parts: int
    part: int
    tile: int

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return self.logits, self.adjusted, self.source

    @property
    def sizes(self) -> dict[str, int]:
        return {"PARTS": triton.next_power_of_2(self.num_parts), "PART": self.part, "TILE": self.tile}


def sample(
    logits: torch.Tensor,
    rows: SamplingRows | None,
    adjustments: Adjustments | None,
    *,
    part: int = PART,
    tile: int = TILE,
) -> torch.Tensor:
    """See the package."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    source = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    adjusted = logits
    if adjustments is not None:
        adjusted = adjust(logits, adjustments)
        source[adjustments.rows] = torch.arange(len(adjusted), dtype=torch.int32, device=device)
    rows = rows if rows is not None else _greedy(num_rows, device)
    num_parts = triton.cdiv(vocab_size, part)
    launch = _Launch(
        logits,
        adjusted,
        source,
        rows,
        highest=torch.empty(num_rows, num_parts, dtype=torch.float32, device=device),
        lowest=torch.zeros(num_rows, dtype=torch.int32, device=device),
        num_parts=num_parts,
        part=part,
        tile=tile,
    )
    grid = (num_rows, num_parts)
    _highest_kernel[grid](launch.highest, *launch.values, vocab_size, num_parts, *logits.stride(), PART=part, TILE=tile)
    if rows.has_top_k:
        _search(launch, of_mass=False)
    if rows.has_top_p:
        _search(launch, of_mass=True)
    best = torch.empty(grid, dtype=torch.float64, device=device)
    best_id = torch.empty(grid, dtype=torch.int32, device=device)
    _draw_kernel[grid](
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
        enable_fp_fusion=False,
    )
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    _pick_kernel[(num_rows,)](tokens, best, best_id, num_parts, PARTS=triton.next_power_of_2(num_parts))
    return tokens


def _search(launch: _Launch, *, of_mass: bool) -> None:
    """Raise launch.lowest to what top-p (of_mass) or top-k keeps."""
    rows, (num_rows, vocab_size) = launch.rows, launch.logits.shape
    new = launch.lowest.new_zeros
    sums = new((NUM_PASSES, num_rows, launch.num_parts, 1 << DIGIT_BITS), dtype=torch.int64)
    prefix, above = new((NUM_PASSES, num_rows)), new((NUM_PASSES, num_rows), dtype=torch.int64)
    for index in range(NUM_PASSES):
        _digit_kernel[(num_rows, launch.num_parts)](
            sums,
            prefix,
            above,
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
            num_warps=8,
            enable_fp_fusion=False,
        )
    _lowest_kernel[(num_rows,)](
        launch.lowest,
        sums,
        prefix,
        above,
        rows.top_k,
        rows.top_p,
        num_rows,
        launch.num_parts,
        LAST_PASS=NUM_PASSES - 1,
        OF_MASS=of_mass,
        PARTS=triton.next_power_of_2(launch.num_parts),
    )


def _greedy(num_rows: int, device: torch.device) -> SamplingRows:
    """Rows of temperature 0. What they hold beside it is not read."""
    floats = torch.zeros(num_rows, dtype=torch.float32, device=device)
    ints = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return SamplingRows(floats, ints, floats, floats, ints, ints, False, False, False)

"""Shrink on pages in Triton, for any mix of ranks in one launch.

The sum over the input is cut in NUM_PARTS parts by the input's width alone. One program computes all parts, or each its
own plane. Planes are added in the same order by the program that ends last, or by whoever reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from triton import knobs

from kernels.buckets import ceil_div
from kernels.devices import device_name
from kernels.lora.launch import MIN_RANKS, ShrinkLaunch, Sizes, num_parts, part_steps, shrink_launch
from kernels.lora.layout import PAGE_RANKS, GroupSizes, ModuleGroup
from kernels.lora.ops import check_rows, width_of
from kernels.lora.segments import COUNTS, MANY_TOKENS, AdapterSegments, SegmentSizes, padded_block_tokens
from kernels.lora.triton_pages import page_offsets, pages_at, tokens_between
from kernels.tensor_spec import TensorSpec, spec_of
from kernels.triton_launch import Prepared, kernel, no_launch, prepare, prepares

# Zeros for the interpreter, in which NumPy warns of sums of what is masked out later.
_new = torch.Tensor.new_zeros if knobs.runtime.interpret else torch.Tensor.new_empty


@kernel(do_not_specialize=["num_slots", "width", "stride_hp", "stride_hs"])
def shrink_kernel(
    x_ptr,
    h_ptr,
    joined_ptr,
    num_done_ptr,
    pages_ptr,
    page_ids_ptr,
    first_ptr,
    rank_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    num_slots,
    scaling,
    in_features,
    width,
    stride_xt,
    stride_xk,
    stride_hp,
    stride_hs,
    stride_ht,
    stride_table,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_STEPS: tl.constexpr,
    HAS_PLANES: tl.constexpr,
    IS_JOINED: tl.constexpr,
    COUNTS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """h [plane, module, token, rank] = scaling * x [token, in] @ A[module, slot].T, float32.

    Grid: [blocks, rank tiles * planes, modules]. Without planes there is one, the sum of all parts. With IS_JOINED the
    last program of a tile adds the planes up to `joined`, of which the strides are those of a plane.
    """
    block = tl.program_id(0)
    module = tl.program_id(2).to(tl.int64)
    # What depends on nothing but the last load is loaded before anything waits for it.
    slot = tl.load(block_slot_ptr + block)
    start = tl.load(block_start_ptr + block)
    end = tl.load(block_end_ptr + block)
    if (slot >= 0) & (slot < num_slots):
        rank = tl.load(rank_ptr + module * stride_table + slot)
        first = tl.load(first_ptr + module * stride_table + slot)
        tokens, is_token = tokens_between(order_ptr, start, end, BLOCK_T)
        if HAS_PLANES:
            plane = tl.program_id(1) % NUM_PARTS
            rank_begin = (tl.program_id(1) // NUM_PARTS) * BLOCK_R
            part_begin = plane
            part_end = plane + 1
        else:
            plane = 0
            rank_begin = tl.program_id(1) * BLOCK_R
            part_begin = 0
            part_end = NUM_PARTS
        if rank_begin < rank:
            offs_r = rank_begin + tl.arange(0, BLOCK_R)
            is_rank = offs_r < rank
            x_rows = x_ptr + tokens * stride_xt
            num_tiles = tl.cdiv(in_features, TILE_WIDTH)
            pages = pages_at(
                page_ids_ptr, first, num_tiles, offs_r, is_rank, part_begin * PART_STEPS * BLOCK_K, in_features,
                BLOCK_K, TILE_WIDTH, PAGE_RANKS,
            )  # fmt: skip
            total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for part in range(part_begin, part_end):
                acc = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
                for step in range(0, PART_STEPS):
                    column = (part * PART_STEPS + step) * BLOCK_K
                    offs_k = column + tl.arange(0, BLOCK_K)
                    is_x = is_token[:, None] & (offs_k < in_features)[None, :]
                    x = tl.load(x_rows[:, None] + (offs_k.to(tl.int64) * stride_xk)[None, :], mask=is_x, other=0.0)
                    offsets, is_inside = page_offsets(
                        pages, offs_r, is_rank, column, in_features, BLOCK_K, TILE_WIDTH, PAGE_RANKS
                    )
                    # The pages of the next step. Were they read where they are used, the loads of A that run ahead
                    # would wait for them, and of three stages one would be left for A and x.
                    pages = pages_at(
                        page_ids_ptr, first, num_tiles, offs_r, is_rank, column + BLOCK_K, in_features,
                        BLOCK_K, TILE_WIDTH, PAGE_RANKS,
                    )  # fmt: skip
                    a = tl.load(pages_ptr + offsets, mask=is_inside, other=0.0)
                    acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
                total += acc
            total *= scaling
            # A launch cannot raise: ranks that h has no room for turn its rows to NaN.
            total = tl.where(rank > width, float("nan"), total)
            h_rows = h_ptr + plane.to(tl.int64) * stride_hp if HAS_PLANES else h_ptr
            in_plane = (module * stride_hs + tokens * stride_ht)[:, None] + offs_r[None, :]
            is_h = is_token[:, None] & (offs_r < tl.minimum(rank, width))[None, :]
            tl.store(h_rows + in_plane, total, mask=is_h)
            if IS_JOINED:
                # All threads have stored their values before one of them says so to the other programs.
                tl.debug_barrier()
                rank_tiles = tl.num_programs(1) // NUM_PARTS
                done_ptr = num_done_ptr + block * COUNTS + tl.program_id(2) * rank_tiles + tl.program_id(1) // NUM_PARTS
                if tl.atomic_add(done_ptr, 1, sem="acq_rel") == NUM_PARTS - 1:
                    joined = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
                    for each in range(0, NUM_PARTS):
                        # Other programs wrote them: read from where all multiprocessors see them.
                        plane_ptr = h_ptr + tl.cast(each, tl.int64) * stride_hp
                        joined += tl.load(plane_ptr + in_plane, mask=is_h, other=0.0, cache_modifier=".cg")
                    tl.store(joined_ptr + in_plane, joined, mask=is_h)
                    tl.store(done_ptr, 0)


class Form(NamedTuple):
    """How lora_shrink computes a kind of product."""

    h: tuple[int, ...]  # [planes, modules, T, width]
    joined: tuple[int, ...] | None  # None: planes are not joined
    launch: Prepared


def shrink_group(x: torch.Tensor, group: ModuleGroup, segments: AdapterSegments, max_rank: int) -> torch.Tensor:
    """See kernels.lora.ops.lora_shrink."""
    shape, joined_shape, launch = _form(spec_of(x), group.sizes, segments.sizes, max_rank)
    h = _new(x, shape, dtype=torch.float32)
    joined = h if joined_shape is None else _new(x, joined_shape, dtype=torch.float32)
    _run(launch, x, h, joined, group, segments)
    return joined


def shrink(
    x: torch.Tensor,
    h: torch.Tensor,
    group: ModuleGroup,
    segments: AdapterSegments,
    *,
    scaling: float = 1.0,
    parts: int | None = None,
    joined: torch.Tensor | None = None,
    launch: ShrinkLaunch | None = None,
) -> None:
    """x [T, in] into h [planes, modules, T, width]; planes is 1 or `parts` (default num_parts(in)).

    joined [1, modules, T, width] gets the sum of several planes; the segments must count what is done.
    """
    assert joined is None or joined.stride()[1:] == h.stride()[1:], f"joined has strides {joined.stride()}"
    is_joined = joined is not None
    prepared = _prepare(x.stride(), spec_of(h), is_joined, parts, scaling, group.sizes, segments.sizes, launch)
    _run(prepared, x, h, h if joined is None else joined, group, segments)


def _run(
    launch: Prepared,
    x: torch.Tensor,
    h: torch.Tensor,
    joined: torch.Tensor,
    group: ModuleGroup,
    segments: AdapterSegments,
) -> None:
    order, num_done = segments.order, segments.num_done
    launch(
        x,
        h,
        joined,
        order if num_done is None else num_done,
        group.pages,
        group.page_ids,
        group.first,
        group.rank,
        order,
        segments.block_slot,
        segments.block_start,
        segments.block_end,
    )


@prepares
def _form(x: TensorSpec, group: GroupSizes, segments: SegmentSizes, max_rank: int) -> Form:
    check_rows("x", x, segments, group, group.in_features)
    _, x_strides, _, device = x
    planes = num_parts(group.in_features) if segments.num_tokens < MANY_TOKENS else 1
    shape = torch.Size((planes, group.num_modules, segments.num_tokens, width_of(max_rank)))
    counts = group.num_modules * ceil_div(shape[3], MIN_RANKS)
    is_joined = planes > 1 and segments.is_counted and counts <= COUNTS
    # As of a dense tensor.
    strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    h = TensorSpec(shape, strides, torch.float32, device)
    launch = _prepare(x_strides, h, is_joined, None, 1.0, group, segments, None)
    return Form(shape, (1, *shape[1:]) if is_joined else None, launch)


@prepares
def _prepare(
    x_strides: tuple[int, ...],
    h: TensorSpec,
    is_joined: bool,
    parts: int | None,
    scaling: float,
    group: GroupSizes,
    segments: SegmentSizes,
    launch: ShrinkLaunch | None,
) -> Prepared:
    shape, strides, _, device = h
    planes, num_modules, _, width = shape
    assert not is_joined or (segments.is_counted and planes > 1), "there is nothing to join, or to count by"
    parts = num_parts(group.in_features) if parts is None else parts
    assert planes in (1, parts), f"{planes} planes for {parts} parts"
    if segments.num_blocks == 0 or width == 0:
        return no_launch
    launch = launch or shrink_launch(device_name(device), Sizes.of(group, shape, group.in_features))
    grid = (segments.num_blocks, ceil_div(width, launch.ranks) * planes, num_modules)
    numbers = {
        "num_slots": segments.num_slots,
        "scaling": scaling,
        "in_features": group.in_features,
        "width": width,
        "stride_xt": x_strides[0],
        "stride_xk": x_strides[1],
        "stride_hp": strides[0],
        "stride_hs": strides[1],
        "stride_ht": strides[2],
        "stride_table": group.stride_table,
        "BLOCK_T": padded_block_tokens(segments.block_tokens),
        "BLOCK_R": launch.ranks,
        "BLOCK_K": launch.in_columns,
        "NUM_PARTS": parts,
        "PART_STEPS": part_steps(group.in_features, parts, launch.in_columns),
        "HAS_PLANES": planes > 1,
        "IS_JOINED": is_joined,
        "COUNTS": COUNTS,
        "TILE_WIDTH": group.page_columns,
        "PAGE_RANKS": PAGE_RANKS,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }
    return prepare(shrink_kernel, grid, numbers)

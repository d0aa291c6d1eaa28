"""The tuner's problems for shrink and expand: the fused linears of an 8B Llama, at decode and prefill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch

from benchmarks.kernels.problem import Problem
from benchmarks.kernels.work import NUM_SLOTS
from kernels.cases import to_device
from kernels.lora import reference, triton_expand, triton_shrink
from kernels.lora.cases import Case, GroupInputs, in_table_of, make_group
from kernels.lora.launch import ExpandLaunch, ShrinkLaunch, Sizes, num_parts
from kernels.lora.segments import COUNTS, MANY_TOKENS, AdapterSegments, default_block_tokens, segments_in_torch

MAX_ADAPTERS = 8
EXPANDS = tuple(ExpandLaunch(out_columns, num_warps) for out_columns, num_warps in product((64, 128, 256), (2, 4, 8)))


@dataclass(frozen=True, slots=True)
class Shape:
    """Modules over one input."""

    in_features: int
    out_features: tuple[int, ...]
    page: int  # columns of a page
    rank: int
    tokens: int


def shapes(is_short: bool) -> Iterator[Shape]:
    """q, k, v; gate, up; o; down."""
    modules = ((4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (4096, (4096,)), (14336, (4096,)))
    ranks = (16, 64) if is_short else (8, 16, 32, 64, 128)
    tokens = (64, 2048) if is_short else (1, 8, 32, 64, 128, 256, 2048, 8192)
    for (in_features, out_features), rank, count in product(modules, ranks, tokens):
        yield Shape(in_features, out_features, 1024, rank, count)


def shrink_problems(device: torch.device, dtype: torch.dtype, is_short: bool) -> Iterator[Problem]:
    """Every bucket of shrink. The outputs' widths do not matter to it, only how many there are."""
    for shape in dict.fromkeys(replace(s, out_features=(s.page,) * len(s.out_features)) for s in shapes(is_short)):
        yield shrink_problem(shape, device, dtype)


def expand_problems(device: torch.device, dtype: torch.dtype, is_short: bool) -> Iterator[Problem]:
    """Every bucket of expand."""
    for shape in shapes(is_short):
        yield expand_problem(shape, device, dtype)


def shrink_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    """One bucket of shrink, in parts side by side where the op takes them, and joined."""
    exact, segments, expected, _ = _exact(shape, device, dtype)
    planes = num_parts(shape.in_features) if shape.tokens < MANY_TOKENS else 1
    h = torch.empty(planes, len(shape.out_features), shape.tokens, shape.rank, device=device)
    joined = torch.empty_like(h[:1]) if planes > 1 else None
    output = h if joined is None else joined

    def run(launch: ShrinkLaunch) -> None:
        triton_shrink.shrink(exact.x, h, exact.group, segments, joined=joined, launch=launch)

    def is_right(launch: ShrinkLaunch) -> bool:
        output.fill_(float("nan"))
        run(launch)
        return torch.equal(output[0].nan_to_num(nan=NO_VALUE), expected.nan_to_num(nan=NO_VALUE))

    sizes = asdict(Sizes.of_shrink(h, exact.group))
    default = ShrinkLaunch.default(shape.rank, shape.page, sizes["dtype"])
    widths = [ranks for ranks in (16, 32, 64, 128) if ranks <= max(default.ranks, shape.rank)]
    candidates = [ShrinkLaunch(*values) for values in product(widths, (64, 128), (2, 4, 8), (2, 3, 4, 5))]
    return Problem(sizes, default, candidates, is_right, run)


def expand_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    """One bucket of expand, from the plane that the op's shrink leaves."""
    exact, segments, h, expected = _exact(shape, device, dtype)
    parts = h[None]
    y = exact.y.clone()

    def run(launch: ExpandLaunch) -> None:
        triton_expand.expand(parts, y, exact.group, segments, add_inputs=True, launch=launch)

    def is_right(launch: ExpandLaunch) -> bool:
        y.copy_(exact.y)
        run(launch)
        return torch.equal(y, expected)

    sizes = asdict(Sizes.of_expand(parts, exact.group))
    return Problem(sizes, ExpandLaunch.default(shape.page), EXPANDS, is_right, run)


# Stands for NaN where two tensors are compared; no sum of the cases comes near it.
NO_VALUE = 1e30


def _exact(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[GroupInputs, AdapterSegments, torch.Tensor, torch.Tensor]:
    """Small integers on the device, their segments, h [modules, T, rank] and y by definition; h is NaN where unused."""
    num_adapters = min(shape.tokens, MAX_ADAPTERS)
    slots = tuple(token % num_adapters for token in range(shape.tokens))
    case = Case("tune", slots, (shape.rank,) * num_adapters, shape.in_features, tile_width=shape.page)
    inputs = make_group(case, shape.out_features, dtype, is_exact=True, is_uniform=True)
    block_tokens = default_block_tokens(shape.tokens)
    inputs = replace(inputs, group=in_table_of(inputs.group, NUM_SLOTS))
    segments = segments_in_torch(inputs.token_slots, NUM_SLOTS, block_tokens, num_adapters)
    segments = replace(segments, num_done=torch.zeros(segments.num_blocks, COUNTS, dtype=torch.int32))
    h = torch.full((len(shape.out_features), shape.tokens, shape.rank), float("nan"))
    y = inputs.y.clone()
    reference.shrink(inputs.x, h, inputs.group, segments)
    reference.expand(h, y, inputs.group, segments, add_inputs=True)
    return to_device(inputs, device), to_device(segments, device), h.to(device), y.to(device)

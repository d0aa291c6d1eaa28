"""The native LoRA ops over the arena's pages: the structures that they take."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.lora.layout import Epilogue, ModuleGroup
from kernels.lora.segments import AdapterSegments
from kernels.native import DTYPES, Program, Step, integers, pointers, run_one


class LoraTokens(ctypes.Structure):
    """Which token has which adapter, and where h lies; lora.h says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers("order", "block_slot", "block_start", "block_end"),
        *integers("num_blocks", "block_tokens"),
        *pointers("h", "expanded"),
        *integers("width"),
        *pointers("next", "slot_of_column", "sign_of_column"),
    ]


class LoraModules(ctypes.Structure):
    """A group of modules and the rows that they read and write; pages.h says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers(
            "x", "y", "pages", "page_ids", "first", "rank", "scaling", "dora_scale", "lora_bias", "base_bias", "out"
        ),
        *integers("x_stride", "y_stride", "in_features", "num_modules", "num_slots", "tile_width", "dtype"),
        ("shrink_scaling", ctypes.c_double),
        *integers("lora_pass"),
    ]


@dataclass(frozen=True, slots=True)
class Summed:
    """Where the sums of h go, for tokens whose adapters' A and B are summed."""

    h: torch.Tensor  # float32, of the shape of each pass's h; one for all passes
    slot_of_column: npt.NDArray[np.int32]  # by column of the slot table: the slot whose adapter it scales
    sign_of_column: npt.NDArray[np.float32]  # of the scale


def lora_tokens(
    segments: AdapterSegments, h: torch.Tensor, summed: Summed | None = None, following: LoraTokens | None = None
) -> LoraTokens:
    """The native form of segments on the CPU; h float32 [modules, T, width] is contiguous. Keeps all arguments alive.

    `following`: the tokens by a further adapter.
    """
    tokens = LoraTokens(
        order=segments.order.data_ptr(),
        block_slot=segments.block_slot.data_ptr(),
        block_start=segments.block_start.data_ptr(),
        block_end=segments.block_end.data_ptr(),
        num_blocks=segments.num_blocks,
        block_tokens=segments.block_tokens,
        h=h.data_ptr(),
        expanded=(h if summed is None else summed.h).data_ptr(),
        width=h.shape[-1],
        next=None if following is None else ctypes.addressof(following),
        slot_of_column=None if summed is None else summed.slot_of_column.ctypes.data,
        sign_of_column=None if summed is None else summed.sign_of_column.ctypes.data,
    )
    tokens.keeps = (segments, h, summed, following)
    return tokens


def problem(
    group: ModuleGroup,
    x: torch.Tensor | None,
    y: torch.Tensor | None,
    epilogue: Epilogue | None = None,
    *,
    scaling: float = 1.0,
    lora_pass: int = 0,
) -> LoraModules:
    """The argument of all ops: shrink and embed read x, expand writes y. Only expand takes the epilogue.

    x [T, in], of embed int64 [T], and y [T, sum of out] may have rows that lie apart. The tables are read when the op
    runs, so that it sees every load and eviction until then. The op is for the step's tokens of one pass: 0 those by
    their first adapter, and so on.
    """
    out = torch.tensor(group.out_features, dtype=torch.int64)
    table = {} if epilogue is None else {"dora_scale": epilogue.dora_scale, "lora_bias": epilogue.lora_bias}
    base_bias = None if epilogue is None else epilogue.base_bias
    modules = LoraModules(
        x=_address(x),
        y=_address(y),
        pages=group.pages.data_ptr(),
        page_ids=group.page_ids.data_ptr(),
        first=group.first.data_ptr(),
        rank=group.rank.data_ptr(),
        scaling=group.scaling.data_ptr(),
        dora_scale=_address(table.get("dora_scale")),
        lora_bias=_address(table.get("lora_bias")),
        base_bias=_address(base_bias),
        out=out.data_ptr(),
        x_stride=x.stride(0) if x is not None else 0,
        y_stride=y.stride(0) if y is not None else 0,
        in_features=group.in_features,
        num_modules=group.num_modules,
        num_slots=group.num_slots,
        tile_width=group.pages.shape[2],
        dtype=DTYPES[group.pages.dtype],
        shrink_scaling=scaling,
        lora_pass=lora_pass,
    )
    modules.keeps = (out, base_bias)
    return modules


def can_serve(group: ModuleGroup, *rows: torch.Tensor) -> bool:
    """Whether the tables are whole rows of one dtype each, and the rows of x or y dense."""
    tables = (group.first, group.rank, group.scaling)
    return group.pages.dtype in DTYPES and all(
        tensor.is_contiguous() if tensor.dim() == 1 else tensor.stride(-1) == 1 for tensor in (*tables, *rows)
    )


def shrink(
    x: torch.Tensor, h: torch.Tensor, group: ModuleGroup, segments: AdapterSegments, *, scaling: float = 1.0
) -> None:
    """Into h [modules, T, width]; see kernels.lora.reference."""
    run_one("lora_shrink", problem(group, x, None, scaling=scaling), step_of(segments, h))


def embed(token_ids: torch.Tensor, h: torch.Tensor, group: ModuleGroup, segments: AdapterSegments) -> None:
    """Into h [1, T, width] of the only module; see kernels.lora.reference."""
    ids = token_ids.long()  # held here: a problem keeps no rows alive
    run_one("lora_embed", problem(group, ids, None), step_of(segments, h))


def expand(
    h: torch.Tensor, y: torch.Tensor, group: ModuleGroup, segments: AdapterSegments, epilogue: Epilogue | None = None
) -> None:
    """y += of h [modules, T, width]; see kernels.lora.reference."""
    run_one("lora_expand", problem(group, None, y, epilogue), step_of(segments, h))


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    group: ModuleGroup,
    segments: AdapterSegments,
    h: torch.Tensor,
    epilogue: Epilogue | None,
) -> None:
    """Shrink into h [modules, T, width], then expand, by one call."""
    modules, program = problem(group, x, y, epilogue), Program()
    program.add("lora_shrink", modules)
    program.add("lora_expand", modules)
    program.run(step_of(segments, h))


def step_of(segments: AdapterSegments, h: torch.Tensor) -> Step:
    tokens = lora_tokens(segments, h)
    step = Step(num_tokens=segments.num_tokens, lora=ctypes.addressof(tokens))
    step.keeps = tokens
    return step


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

"""The operators on pages: shrink (x @ A), expand (h @ B), their forms for slices and for fused linears.

The server uses `add_lora_group`, `lora_embed` and `lora_expand`. The bgmv and sgmv operators have the interface of
Punica and vLLM, and the server does not use them yet. bgmv: every token is its own block, for one or few tokens per
slot; takes the slots of the tokens. sgmv: blocks of tokens that share a slot; takes segments. Lengths of segments
become token slots by `torch.repeat_interleave(slots, lengths, output_size=num_tokens)`.

On a GPU the Triton kernels run, on a CPU with a C compiler native code, elsewhere torch's products. With Triton and
with native code bgmv and sgmv give the same bits.
"""

from __future__ import annotations

import torch

from kernels.buckets import round_up
from kernels.devices import check_devices, runs_triton
from kernels.lora import choice, cpu, native
from kernels.lora.layout import H_ALIGN, Epilogue, GroupSizes, ModuleGroup, PagedModule
from kernels.lora.segments import AdapterSegments, SegmentSizes, blocks_of_one, split_by_length
from kernels.native import get_num_threads, has_native
from kernels.tensor_spec import TensorSpec, spec_of


def bgmv_shrink(
    x: torch.Tensor, module: PagedModule, out: torch.Tensor, token_slots: torch.Tensor, *, scaling: float = 1.0
) -> None:
    """out [T, width] float32 = scaling * x [T, in] @ A.T in the first `rank` columns; the others are not written.

    Rows without an adapter, or whose slot is outside the table, are not written. A rank above the width is refused;
    on a GPU its rows are NaN instead.
    """
    _shrink(x, ModuleGroup.of([module]), out[None], _blocks_of_one(token_slots, module), scaling)


def sgmv_shrink(
    x: torch.Tensor, module: PagedModule, out: torch.Tensor, segments: AdapterSegments, *, scaling: float = 1.0
) -> None:
    """bgmv_shrink over blocks of tokens."""
    _shrink(x, ModuleGroup.of([module]), out[None], segments, scaling)


def bgmv_expand(
    h: torch.Tensor, module: PagedModule, y: torch.Tensor, token_slots: torch.Tensor, *, add_inputs: bool = True
) -> None:
    """y [T, out or more] += scaling of the slot * h [T, width] @ B in its first `out` columns.

    Without add_inputs those columns are overwritten, with zero in rows without an adapter. A rank above the width is
    refused; on a GPU its rows are NaN instead.
    """
    _expand(
        h[None, None],
        ModuleGroup.of([module]),
        _slice(y, 0, module.out_features),
        _blocks_of_one(token_slots, module),
        add_inputs,
    )


def sgmv_expand(
    h: torch.Tensor, module: PagedModule, y: torch.Tensor, segments: AdapterSegments, *, add_inputs: bool = False
) -> None:
    """bgmv_expand over blocks of tokens."""
    _expand(h[None, None], ModuleGroup.of([module]), _slice(y, 0, module.out_features), segments, add_inputs)


def bgmv_expand_slice(
    h: torch.Tensor,
    module: PagedModule,
    y: torch.Tensor,
    token_slots: torch.Tensor,
    *,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """bgmv_expand into the columns slice_offset : slice_offset + slice_size of y, as many as the module has."""
    group = ModuleGroup.of([module])
    _expand(h[None, None], group, _slice(y, slice_offset, slice_size), _blocks_of_one(token_slots, module), add_inputs)


def sgmv_expand_slice(
    h: torch.Tensor,
    module: PagedModule,
    y: torch.Tensor,
    segments: AdapterSegments,
    *,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> None:
    """bgmv_expand_slice over blocks of tokens."""
    _expand(h[None, None], ModuleGroup.of([module]), _slice(y, slice_offset, slice_size), segments, add_inputs)


def shrinks_apart(x: torch.Tensor) -> bool:
    """Whether lora_shrink and lora_expand serve x best. Elsewhere add_lora_group does both at once, in less time."""
    return runs_triton(x)


def lora_shrink(x: torch.Tensor, group: ModuleGroup, segments: AdapterSegments, *, max_rank: int) -> torch.Tensor:
    """x @ A.T of every module of the group in one launch: float32 [planes, modules, T, width] for `lora_expand`.

    The width is the next power of two from max_rank on; columns past a slot's rank are not set. max_rank must be at
    least the ranks of the segments' slots at these modules; above the width a slot's rows are NaN on a GPU. The planes
    add up to the product. With few tokens the sum over the input is computed in several parts at once, which are joined
    to one plane if the segments can count them.
    """
    if runs_triton(x):
        from kernels.lora.triton_shrink import shrink_group

        return shrink_group(x, group, segments, max_rank)
    h = _empty_h(1, group.num_modules, segments.num_tokens, max_rank, x.device)
    _shrink(x, group, h[0], segments, 1.0)
    return h


def lora_embed(
    token_ids: torch.Tensor, module: PagedModule, segments: AdapterSegments, *, max_rank: int
) -> torch.Tensor:
    """The shrink of an embedding: A[:, token_ids[t]], float32 [1, 1, T, width] as `lora_shrink` gives it.

    token_ids is int32 or int64 [T]. An id outside the module's columns gives NaN. So does a rank above the width on a
    GPU; a CPU refuses it.
    """
    _check_ids(token_ids, segments.num_tokens)
    check_segments(segments.sizes, module.first.shape[0])
    check_devices(token_ids=token_ids, order=segments.order, pages=module.pages, first=module.first)
    h = _empty_h(1, 1, segments.num_tokens, max_rank, token_ids.device)
    if runs_triton(module.pages):
        from kernels.lora import triton_embedding

        triton_embedding.embed(token_ids, h[0, 0], module, segments)
    elif _runs_native(ModuleGroup.of([module]), h[0], segments, token_ids):
        native.embed(token_ids, h[0], ModuleGroup.of([module]), segments)
    else:
        cpu.embed(token_ids, h[0], ModuleGroup.of([module]), segments)
    return h


def lora_expand(
    h: torch.Tensor,
    group: ModuleGroup,
    y: torch.Tensor,
    segments: AdapterSegments,
    *,
    add_inputs: bool = True,
    epilogue: Epilogue | None = None,
) -> None:
    """y [T, sum of out] += scaling * h @ B for every module of the group, side by side, in one launch.

    With an epilogue also the LoRA biases and DoRA scales of the slots. A rank above the width of h is refused; on a GPU
    its rows are NaN instead.
    """
    if epilogue is not None:
        check_epilogue(epilogue, group, add_inputs)
        tables = {"dora_scale": epilogue.dora_scale, "lora_bias": epilogue.lora_bias, "base_bias": epilogue.base_bias}
        check_devices(y=y, values=epilogue.values, **tables)
    _expand(h, group, y, segments, add_inputs, epilogue)


def add_lora_group(
    y: torch.Tensor,
    x: torch.Tensor,
    group: ModuleGroup,
    segments: AdapterSegments,
    *,
    max_rank: int,
    epilogue: Epilogue | None = None,
) -> None:
    """y [T, sum of out] += scaling * (x [T, in] @ A.T) @ B by each token's slot: a shrink and an expand.

    max_rank bounds the ranks of the segments' slots at these modules. A rank above its power of two is refused; on a
    GPU its rows are NaN instead.
    """
    if not has_native(x, y, group.pages) or runs_triton(x):
        lora_expand(lora_shrink(x, group, segments, max_rank=max_rank), group, y, segments, epilogue=epilogue)
        return
    h = _empty_h(1, group.num_modules, segments.num_tokens, max_rank, x.device)
    if _runs_native(group, h[0], segments, x, y):
        check_rows("x", spec_of(x), segments.sizes, group.sizes, group.in_features)
        check_rows("y", spec_of(y), segments.sizes, group.sizes, sum(group.out_features))
        if epilogue is not None:
            check_epilogue(epilogue, group, add_inputs=True)
        short, long = _by_length(segments, group.pages.dtype, max_rank)
        native.add(y, x, group, short, h[0], epilogue)
        if long is not None:
            cpu.add(y, x, group, long, h[0], epilogue)
    else:
        _shrink(x, group, h[0], segments, 1.0)
        lora_expand(h, group, y, segments, epilogue=epilogue)


def _by_length(
    segments: AdapterSegments, dtype: torch.dtype, rank: int
) -> tuple[AdapterSegments, AdapterSegments | None]:
    """The blocks for native code, and those of adapters with so many tokens that products are faster here.

    The measured times are those of one thread. Products are not used if torch has fewer threads than native code, as
    beside native linears.
    """
    if segments.num_tokens < choice.TOKEN_COUNTS[0] or torch.get_num_threads() < get_num_threads():
        return segments, None
    num_tokens = choice.products_from(dtype, rank)
    if num_tokens is None or segments.num_tokens < num_tokens:
        return segments, None
    return split_by_length(segments, num_tokens)


def _shrink(x: torch.Tensor, group: ModuleGroup, h: torch.Tensor, segments: AdapterSegments, scaling: float) -> None:
    """Into h [modules, T, width]."""
    check_rows("x", spec_of(x), segments.sizes, group.sizes, group.in_features)
    check_h(spec_of(h[None]), group.sizes, segments.sizes)
    check_devices(x=x, h=h)
    if runs_triton(x):
        from kernels.lora.triton_shrink import shrink as launch

        launch(x, h[None], group, segments, scaling=scaling)
    elif _runs_native(group, h, segments, x):
        native.shrink(x, h, group, segments, scaling=scaling)
    else:
        cpu.shrink(x, h, group, segments, scaling=scaling)


def _expand(
    h: torch.Tensor,
    group: ModuleGroup,
    y: torch.Tensor,
    segments: AdapterSegments,
    add_inputs: bool,
    epilogue: Epilogue | None = None,
) -> None:
    """From h [planes, modules, T, width]."""
    if runs_triton(y):
        from kernels.lora.triton_expand import expand as launch

        launch(h, y, group, segments, add_inputs=add_inputs, epilogue=epilogue)
        return
    check_rows("y", spec_of(y), segments.sizes, group.sizes, sum(group.out_features))
    check_h(spec_of(h), group.sizes, segments.sizes)
    check_devices(y=y, h=h)
    if len(h) == 1 and _runs_native(group, h[0], segments, y):
        native.expand(h[0], y if add_inputs else y.zero_(), group, segments, epilogue)
    else:
        cpu.expand(h.sum(0), y, group, segments, add_inputs=add_inputs, epilogue=epilogue)


def _runs_native(group: ModuleGroup, h: torch.Tensor, segments: AdapterSegments, *rows: torch.Tensor) -> bool:
    """Whether native code serves these tensors, h [modules, T, width]. Raises ValueError for a rank above the width."""
    if not has_native(*rows) or not h.is_contiguous() or not native.can_serve(group, *rows):
        return False
    is_known = (
        (segments.block_slot >= 0)
        & (segments.block_slot < group.num_slots)
        & (segments.block_end > segments.block_start)
    )
    slots = segments.block_slot[is_known].long()
    ranks = group.rank[:, slots]
    if ranks.numel() and int(ranks.max()) > h.shape[-1]:
        slot = int(slots[ranks.amax(0).argmax()])
        raise ValueError(f"slot {slot} has rank {int(ranks.max())}, h has room for {h.shape[-1]}")
    return True


def _slice(y: torch.Tensor, offset: int, size: int) -> torch.Tensor:
    if offset < 0 or size < 0 or offset + size > y.shape[-1]:
        raise ValueError(f"columns {offset} to {offset + size} are not all in y, which has {y.shape[-1]}")
    return y[:, offset : offset + size]


def _blocks_of_one(token_slots: torch.Tensor, module: PagedModule) -> AdapterSegments:
    if token_slots.dtype != torch.int32 or token_slots.dim() != 1:
        raise ValueError(f"token_slots is {token_slots.dtype} {list(token_slots.shape)}, want int32 [num_tokens]")
    return blocks_of_one(token_slots.contiguous(), module.first.shape[0])


def _empty_h(planes: int, modules: int, num_tokens: int, max_rank: int, device: torch.device) -> torch.Tensor:
    width = width_of(max_rank)
    # Zeros for Triton's interpreter, in which NumPy warns of sums of what is masked out later.
    make = torch.empty if device.type == "cuda" else torch.zeros
    return make(planes, modules, num_tokens, width, dtype=torch.float32, device=device)


def _check_ids(token_ids: torch.Tensor, num_tokens: int) -> None:
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.shape != (num_tokens,):
        raise ValueError(f"token_ids is {token_ids.dtype} {list(token_ids.shape)}, want int32 or int64 [{num_tokens}]")


def check_rows(name: str, rows: TensorSpec, segments: SegmentSizes, group: GroupSizes, width: int) -> None:
    """Raise ValueError unless there is a row of x or y for each token."""
    check_segments(segments, group.num_slots)
    check_devices(**{name: rows}, order=segments, pages=group)
    if rows.shape != (segments.num_tokens, width) or rows.dtype != group.dtype:
        raise ValueError(
            f"{name} is {rows.dtype} {list(rows.shape)}, want {group.dtype} [{segments.num_tokens}, {width}] "
            "as the segments and the adapters are"
        )


def check_segments(segments: SegmentSizes, num_slots: int) -> None:
    """Raise ValueError for segments of more slots than the modules have."""
    if segments.num_slots > num_slots:
        raise ValueError(
            f"the segments are of {segments.num_slots} slots, the modules have {num_slots}: use at most that number"
        )


def check_h(h: TensorSpec, group: GroupSizes, segments: SegmentSizes) -> None:
    """Raise ValueError unless h is [planes, modules, T, width]."""
    if h.dtype != torch.float32 or h.shape[1:3] != (group.num_modules, segments.num_tokens) or h.strides[3] != 1:
        raise ValueError(
            f"h is {h.dtype} {list(h.shape)} with strides {h.strides}, want float32 [planes, {group.num_modules}, "
            f"{segments.num_tokens}, width] with ranks side by side"
        )


def width_of(max_rank: int) -> int:
    """Of h. A bucket, since the grids follow from it."""
    if max_rank < 0:
        raise ValueError(f"max_rank is {max_rank}, want at least 0")
    return max(round_up(max_rank), H_ALIGN) if max_rank else 0


def check_epilogue(epilogue: Epilogue, group: ModuleGroup, add_inputs: bool) -> None:
    """Tables and vectors of these modules."""
    if epilogue.dora_scale is not None and not add_inputs:
        raise ValueError("a DoRA scale multiplies the base output as well: it needs add_inputs=True")
    if epilogue.base_bias is not None and epilogue.dora_scale is None:
        raise ValueError("base_bias is of no use without a DoRA scale")
    slots = (group.num_modules, group.num_slots)
    page = group.pages.shape[1] * group.pages.shape[2] * group.pages.element_size() // 4
    _check_table("values", epilogue.values, torch.float32, (len(group.pages), page))
    _check_table("dora_scale", epilogue.dora_scale, torch.int64, slots)
    _check_table("lora_bias", epilogue.lora_bias, torch.int64, slots)
    _check_table("base_bias", epilogue.base_bias, torch.float32, (sum(group.out_features),))


def _check_table(name: str, table: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if table is not None and (table.dtype != dtype or table.shape != shape or table.stride(-1) != 1):
        raise ValueError(
            f"{name} is {table.dtype} {list(table.shape)}, want {dtype} {list(shape)}, columns side by side"
        )

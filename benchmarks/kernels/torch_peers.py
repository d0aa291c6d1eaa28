"""What torch itself offers for the same work, in the versions that have it: attention over dense or paged keys, and
products grouped by adapter.

Each is a call of nothing over inputs that are made here, in the layout that it takes; that work is not timed. What a
version or a device cannot run raises when it is first called, and is then left out of the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.measure import Call


def dense_attention(
    query: torch.Tensor,
    dense: Sequence[torch.Tensor],
    query_start: Sequence[int],
    lengths: Sequence[int],
    *,
    is_causal: bool,
    is_compiled: bool,
) -> dict[str, Call]:
    """SDPA, varlen_attn and, where requested since it compiles, FlexAttention.

    query [T, Hq, D], as many queries in each sequence; dense: keys and values [sequences, Hkv, length, D]. Causal only
    where the queries are as many as the keys.
    """
    num_sequences = len(lengths)
    rows = query.view(num_sequences, -1, *query.shape[1:]).transpose(1, 2)
    peers: dict[str, Call] = {
        "SDPA, contiguous": lambda: scaled_dot_product_attention(
            rows, dense[0], dense[1], is_causal=is_causal, enable_gqa=True
        )
    }
    if query.is_cuda:
        peers["varlen_attn"] = varlen_call(query, dense, query_start, lengths, is_causal=is_causal)
        if is_compiled:
            peers["FlexAttention"] = _flex(rows, dense, is_causal=is_causal)
    return peers


def paged_varlen(
    query: torch.Tensor,
    caches: Sequence[torch.Tensor],
    tables: torch.Tensor,
    query_start: Sequence[int],
    lengths: Sequence[int],
) -> dict[str, Call]:
    """varlen_attn over the same pages, in the torch versions whose varlen_attn takes a block table (2.12 on)."""
    if not query.is_cuda or "block_table" not in _varlen_parameters():
        return {}
    from torch.nn.attention.varlen import varlen_attn

    starts, used = _int32(query_start, query.device), _int32(lengths, query.device)
    there = tables.to(query.device)
    most = max(end - begin for begin, end in pairwise(query_start))
    return {
        "varlen_attn, paged": lambda: varlen_attn(
            query,
            caches[0],
            caches[1],
            starts,
            None,
            most,
            max(lengths),
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=used,
            block_table=there,
        )
    }


def grouped_products(
    x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group_ends: Sequence[int]
) -> dict[str, Call]:
    """y + (x @ a[i]) @ b[i] for tokens sorted by adapter, as two grouped products.

    x [T, in], y [T, out], a [n, in, r], b [n, r, out]; adapter i has the tokens before group_ends[i].
    """
    if not hasattr(torch, "_grouped_mm"):
        return {}
    ends = _int32(group_ends, x.device)
    b = b.contiguous()
    a = a.contiguous()
    return {"two _grouped_mm": lambda: y + torch._grouped_mm(torch._grouped_mm(x, a, offs=ends), b, offs=ends)}


def batched_products(
    x: torch.Tensor, y: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], scaling: torch.Tensor
) -> dict[str, Call]:
    """y += (x @ a[i].T) @ b[i] * scaling batched, in a copy of y: one shrink of all modules, an expand of each.

    For tokens sorted by adapter, the same number of each. x [T, in], y [T, sum of out]; by module a [n, r, in] and
    b [n, r, out]; scaling [n] is multiplied into b beforehand.
    """
    if len(x) % len(scaling):
        return {}
    rows, sums = (value.view(len(scaling), -1, value.shape[1]) for value in (x, y.clone()))
    stacked = torch.cat(list(a), dim=1).transpose(1, 2)
    scaled = scale(b, scaling)
    ranks, widths = [part.shape[1] for part in a], [part.shape[2] for part in b]

    def call() -> None:
        h = torch.bmm(rows, stacked)
        for target, part, matrix in zip(torch.split(sums, widths, 2), torch.split(h, ranks, 2), scaled, strict=True):
            target.baddbmm_(part, matrix)

    return {"bmm": call}


def scale(b: Sequence[torch.Tensor], scaling: torch.Tensor) -> list[torch.Tensor]:
    """Each b [n, r, out] times scaling [n]."""
    return [(part * scaling[:, None, None]).to(part.dtype) for part in b]


def varlen_call(
    query: torch.Tensor,
    dense: Sequence[torch.Tensor],
    query_start: Sequence[int],
    lengths: Sequence[int],
    *,
    is_causal: bool,
) -> Call:
    """Over keys [sum of lengths, heads, D], repeated for every query head where torch cannot share them."""
    parameters = _varlen_parameters()
    keys, values = (part.transpose(1, 2).flatten(0, 1) for part in dense)
    options: dict[str, object] = {}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    else:
        group = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    if is_causal:
        options |= {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    starts, key_starts = _int32(query_start, query.device), _int32(ends, query.device)
    most = max(end - begin for begin, end in pairwise(query_start))

    def call() -> object:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(query, keys, values, starts, key_starts, most, max(lengths), **options)  # type: ignore[arg-type]

    return call


def _varlen_parameters() -> frozenset[str]:
    """Names of varlen_attn's parameters; empty in a torch without it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _flex(rows: torch.Tensor, dense: Sequence[torch.Tensor], *, is_causal: bool) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if is_causal:
        mask = create_block_mask(
            lambda _, __, query, key: query >= key, None, None, rows.shape[2], dense[0].shape[2], device=rows.device
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(rows, dense[0], dense[1], block_mask=mask, enable_gqa=True)


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)

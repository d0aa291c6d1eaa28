"""Measures from how many tokens of one adapter on torch's products are faster than native code: `products_from`.

Native code reads each page once per block and keeps a block's sums in registers. Products first copy the adapter's
pages, and may then use units that only large products fill, such as AMX. Measured once for each dtype and two ranks,
and kept (kernels/native/measured.py).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from kernels.lora import cpu, native
from kernels.lora.layout import PAGE_RANKS, ModuleGroup
from kernels.lora.segments import segments_on_host
from kernels.native.measured import Results, best_times_s, measured
from kernels.native.program import one_thread

# Segments that are measured; one below the first always goes to native code.
TOKEN_COUNTS = (64, 256, 1024)
# Ranks that stand for others: from the second on, and below.
RANKS = (16, 64)
SIDE, TILE_WIDTH = 1024, 256  # of the module
BUDGET_S = 0.004  # for each token count, beside two turns of each way
# Products that take so many times as long with a few hundred tokens are not measured with more. Some dtypes have no
# fast products: float16 took 18 times as long with AVX-512 (benchmarks/LOG.md).
HOPELESS = 2.0
# Less is not worth the other way's bits and copies.
WORTHWHILE = 0.9


def products_from(dtype: torch.dtype, rank: int) -> int | None:
    """Tokens of one adapter of about this rank from which products are faster here; None: not with 1024 either."""
    results = timed(dtype, rank)
    faster = None
    for num_tokens in reversed(TOKEN_COUNTS):
        times = results.get(str(num_tokens))
        if times is None or times["products"] > WORTHWHILE * times["native"]:
            break
        faster = num_tokens
    return faster


def prepare(dtype: torch.dtype) -> None:
    """Measure now, so that no request waits for it."""
    for rank in RANKS:
        timed(dtype, rank)


def timed(dtype: torch.dtype, rank: int) -> Results:
    """Microseconds of both ways in one thread, by number of tokens."""
    stands_for = RANKS[rank >= RANKS[1]]
    name = str(dtype).removeprefix("torch.")
    return measured("lora products", f"{name} rank {stands_for}", partial(_measure, dtype, stands_for))


def _measure(dtype: torch.dtype, rank: int) -> Results:
    num_tiles = SIDE // TILE_WIDTH
    num_pages = rank // PAGE_RANKS * num_tiles * 2
    random = torch.Generator().manual_seed(0)
    pages = torch.empty(num_pages, PAGE_RANKS, TILE_WIDTH).uniform_(-0.01, 0.01, generator=random).to(dtype)
    first, ranks = (torch.tensor([[value]], dtype=torch.int32) for value in (0, rank))
    ids = torch.arange(num_pages, dtype=torch.int32)
    group = ModuleGroup(pages, ids, first, ranks, torch.ones(1, 1), SIDE, (SIDE,))
    results: Results = {}
    with one_thread():
        for num_tokens in TOKEN_COUNTS:
            x = torch.empty(num_tokens, SIDE).uniform_(-1, 1, generator=random).to(dtype)
            y, h = torch.zeros_like(x), torch.zeros(1, num_tokens, rank)
            segments = segments_on_host(np.zeros(num_tokens, dtype=np.int32), 1)
            calls = {"native": [partial(native.add, y, x, group, segments, h, None)], "products": []}
            calls["products"].append(partial(cpu.add, y, x, group, segments, h, None))
            times = best_times_s(calls, budget_s=BUDGET_S)
            results[str(num_tokens)] = {way: round(time_s * 1e6, 1) for way, time_s in times.items()}
            if num_tokens >= TOKEN_COUNTS[1] and times["products"] > HOPELESS * times["native"]:
                break
    return results

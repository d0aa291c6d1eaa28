"""Which form of a linear's weight is fastest on this machine, decided by measurement: `fastest_form`.

Measured once for each dtype and rough size, and kept (kernels/native/measured.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial

import torch

from kernels.linear.native import problem
from kernels.linear.panels import to_panels
from kernels.native import DTYPES, Program, Step, has_native
from kernels.native.measured import best_times_s, measured
from kernels.native.program import one_thread

# A decode step has a row for each running request, a prefill step hundreds.
DECODE_ROWS, PREFILL_ROWS = (1, 8, 32), (128, 512)
# Inputs and outputs of the weights that stand for others: small ones, of up to SMALL_SIZE elements, and all others. The
# order of the forms was the same for all others (256 x 1024 to 8192 x 1024). The time of many rows follows from the
# number of operations, so that smaller weights do.
SMALL_SIDE, LARGE_SIDE, PREFILL_SIDE = 256, 1024, 512
SMALL_SIZE = 1 << 17
# Of each form. All forms' copies do not fit the caches of most CPUs, as the weights of a model do not.
COPIES_BYTES = 16 << 20
BUDGET_S = 0.008  # for each row count


class Form(StrEnum):
    """How a weight [out, in] lies in memory."""

    NATIVE = "native"  # panels, kernels/linear/panels.py
    ONEDNN = "onednn"  # oneDNN's blocked layout, torch.ops.mkldnn._reorder_linear_weight
    PLAIN = "plain"  # as it is, for torch.nn.functional.linear
    SHARED = "shared"  # as it is, for native code: what may stay the embedding's weight as well


_IN_ONE_CALL = (Form.NATIVE, Form.SHARED)  # all copies


def fastest_form(out_features: int, in_features: int, dtype: torch.dtype) -> Form:
    """The form that serves a weight of this size best, of those that can be had here.

    Each of the five row counts has the same share: a form's score is the product of its times, so that being twice as
    fast at one row makes up for being half as fast at another number of rows. Three of five shares are decodes of few
    requests, where the weights' bytes decide, and two are large batches and prefills, where the operations do.
    """
    return _fastest(out_features, in_features, dtype, tuple(Form))


def fastest_unpacked_form(out_features: int, in_features: int, dtype: torch.dtype) -> Form:
    """The same of the forms that leave the weight as it is."""
    return _fastest(out_features, in_features, dtype, (Form.PLAIN, Form.SHARED))


def _fastest(out_features: int, in_features: int, dtype: torch.dtype, forms: tuple[Form, ...]) -> Form:
    times = form_times_us(out_features, in_features, dtype)
    return min((form for form in times if form in forms), key=lambda form: sum(map(math.log, times[form].values())))


def form_times_us(out_features: int, in_features: int, dtype: torch.dtype) -> Mapping[Form, Mapping[int, float]]:
    """Microseconds of one product in one thread by row count, for each form that can be had here.

    In one thread, since the time of several is that of whoever else uses the cores meanwhile, and the result is kept.
    """
    side = SMALL_SIDE if out_features * in_features <= SMALL_SIZE else LARGE_SIDE
    name = str(dtype).removeprefix("torch.")
    results = measured("linear forms", f"{name} {side}x{side}", partial(_measure, side, dtype))
    return {Form(form): {int(rows): us for rows, us in times.items()} for form, times in results.items()}


def to_onednn(weight: torch.Tensor) -> torch.Tensor | None:
    """oneDNN's layout of a weight [out, in], or None if this CPU has none for its dtype."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    except RuntimeError:  # it names the instructions that it misses
        return None
    return packed


def onednn_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch.nn.functional.linear for a weight in oneDNN's layout; x [..., in] of any leading sizes."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output


def _measure(side: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Times by form and row count."""
    times: dict[str, dict[str, float]] = {}
    random = torch.Generator().manual_seed(0)
    for sizes, row_counts in ((side, DECODE_ROWS), (min(side, PREFILL_SIDE), PREFILL_ROWS)):
        weight = _numbers(sizes, sizes, dtype, random)
        is_streamed = row_counts is DECODE_ROWS
        num_copies = COPIES_BYTES // (weight.numel() * weight.element_size()) if is_streamed else 1
        with one_thread():
            products = _products(weight, num_copies)
            for rows in row_counts:
                x = _numbers(rows, sizes, dtype, random)
                calls = {form: [partial(product, x) for product in copies] for form, copies in products.items()}
                for form, time_s in best_times_s(calls, budget_s=BUDGET_S).items():
                    num_products = num_copies if form in _IN_ONE_CALL else 1
                    times.setdefault(form, {})[str(rows)] = round(time_s * 1e6 / num_products, 1)
    return times


def _numbers(num_rows: int, num_columns: int, dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    return torch.empty(num_rows, num_columns).uniform_(-1, 1, generator=random).to(dtype)


def _products(weight: torch.Tensor, num_copies: int) -> dict[Form, list[Callable[[torch.Tensor], torch.Tensor]]]:
    """For each form that can be had, products with copies of the weight."""
    products: dict[Form, list[Callable[[torch.Tensor], torch.Tensor]]] = {}
    if weight.dtype in DTYPES and has_native(weight):
        panels = [to_panels(weight) for _ in range(num_copies)]
        # All copies by one call, as the linears of a recorded step are run.
        products[Form.NATIVE] = [partial(_native_linears, op="linear", weights=panels, out_features=weight.shape[0])]
        copies = [weight.clone() for _ in range(num_copies)]
        products[Form.SHARED] = [
            partial(_native_linears, op="plain_linear", weights=copies, out_features=weight.shape[0])
        ]
    packed = [one for one in (to_onednn(weight) for _ in range(num_copies)) if one is not None]
    if packed:
        products[Form.ONEDNN] = [partial(onednn_linear, packed=one, bias=None) for one in packed]
    plain = [weight.clone() for _ in range(num_copies)]
    products[Form.PLAIN] = [partial(_plain_linear, weight=one) for one in plain]
    return products


def _native_linears(x: torch.Tensor, op: str, weights: list[torch.Tensor], out_features: int) -> torch.Tensor:
    y, program = x.new_empty(len(x), out_features), Program()
    for weight in weights:
        program.add(op, problem(x, weight, None, y))
    program.run(Step(num_tokens=len(x)))
    return y


def _plain_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)

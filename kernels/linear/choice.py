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
from kernels.linear.onednn import onednn_linear, to_onednn
from kernels.linear.panels import to_panels
from kernels.native import DTYPES, Program, Step, has_native
from kernels.native.measured import best_times_s, measured
from kernels.native.program import one_thread

# Raise the number whenever the measurement changes, so that older results are not used.
MEASUREMENT = "linear forms 2"
# A decode step has a row for each running request, a prefill step hundreds.
DECODE_ROWS, PREFILL_ROWS = (1, 8, 32), (128, 512)
# Inputs and outputs of the weights that stand for others: small ones, of up to SMALL_SIZE elements, and all others. The
# order of the forms was the same for all others (256 x 1024 to 8192 x 1024). The time of many rows follows from the
# number of operations, so that smaller weights do.
SMALL_SIDE, LARGE_SIDE, PREFILL_SIDE = 256, 1024, 512
SMALL_SIZE = 1 << 17
# Of each form. All forms' copies do not fit the caches of most CPUs, as the weights of a model do not.
COPIES_BYTES = 16 << 20
BUDGET_S = 0.006  # for each row count


class Form(StrEnum):
    """How a weight [out, in] lies in memory."""

    NATIVE = "native"  # panels, kernels/linear/panels.py
    ONEDNN = "onednn"  # oneDNN's blocked layout, kernels/linear/onednn.py
    PLAIN = "plain"  # as it is, for torch.nn.functional.linear
    SHARED = "shared"  # as it is, for native code: what may stay the embedding's weight as well


def fastest_form(out_features: int, in_features: int, dtype: torch.dtype) -> Form:
    """The fastest form for a weight of this size, of the forms that are available here.

    Each of the five row counts has the same share: a form's score is the product of its times, so that being twice as
    fast at one row makes up for being half as fast at another number of rows. Three of five shares are decodes of few
    requests, where the weights' bytes decide, and two are large batches and prefills, where the operations do.
    """
    return _fastest(out_features, in_features, dtype, tuple(Form))


def fastest_unpacked_form(out_features: int, in_features: int, dtype: torch.dtype) -> Form:
    """The fastest of the forms that leave the weight as it is."""
    return _fastest(out_features, in_features, dtype, (Form.PLAIN, Form.SHARED))


def _fastest(out_features: int, in_features: int, dtype: torch.dtype, forms: tuple[Form, ...]) -> Form:
    times = form_times_us(out_features, in_features, dtype)
    return min((form for form in times if form in forms), key=lambda form: sum(map(math.log, times[form].values())))


def form_times_us(out_features: int, in_features: int, dtype: torch.dtype) -> Mapping[Form, Mapping[int, float]]:
    """Microseconds of one product in one thread by row count, for each form that can be had here.

    In one thread: with several threads the time depends on other processes on the cores, and the result is kept.
    """
    side = SMALL_SIDE if out_features * in_features <= SMALL_SIZE else LARGE_SIDE
    name = str(dtype).removeprefix("torch.")
    results = measured(MEASUREMENT, f"{name} {side}x{side}", partial(_measure, side, dtype))
    return {Form(form): {int(rows): us for rows, us in times.items()} for form, times in results.items()}


def _measure(side: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Times by form and row count."""
    times: dict[str, dict[str, float]] = {}
    random = torch.Generator().manual_seed(0)
    with one_thread():
        for sizes, row_counts in ((side, DECODE_ROWS), (min(side, PREFILL_SIDE), PREFILL_ROWS)):
            weight = _numbers(sizes, sizes, dtype, random)
            is_streamed = row_counts is DECODE_ROWS
            copies = copies_by_form(
                weight, COPIES_BYTES // (weight.numel() * weight.element_size()) if is_streamed else 4
            )
            for rows in row_counts:
                x = _numbers(rows, sizes, dtype, random)
                products = {form: [product_in(form, x, one, sizes) for one in copies[form]] for form in copies}
                for form, time_s in best_times_s(products, budget_s=BUDGET_S).items():
                    times.setdefault(form, {})[str(rows)] = max(round(time_s * 1e6, 1), 0.1)
    return times


def _numbers(num_rows: int, num_columns: int, dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    return torch.empty(num_rows, num_columns).uniform_(-1, 1, generator=random).to(dtype)


def copies_by_form(weight: torch.Tensor, num_copies: int) -> dict[Form, list[torch.Tensor]]:
    """Copies of the weight in each available form."""
    copies = {Form.PLAIN: [weight.clone() for _ in range(num_copies)]}
    if weight.dtype in DTYPES and has_native(weight):
        copies[Form.NATIVE] = [to_panels(weight) for _ in range(num_copies)]
        copies[Form.SHARED] = [weight.clone() for _ in range(num_copies)]
    packed = [one for one in (to_onednn(weight) for _ in range(num_copies)) if one is not None]
    if packed:
        copies[Form.ONEDNN] = packed
    return copies


def product_in(form: Form, x: torch.Tensor, weight: torch.Tensor, out_features: int) -> Callable[[], torch.Tensor]:
    """The product of rows with a weight in a form, ready to be run."""
    if form is Form.ONEDNN:
        return lambda: onednn_linear(x, weight, None)
    if form is Form.PLAIN:
        return lambda: torch.nn.functional.linear(x, weight)
    # Recorded, as the linears of a step are.
    y, program, step = x.new_empty(len(x), out_features), Program(), Step(num_tokens=len(x))
    program.add("linear" if form is Form.NATIVE else "plain_linear", problem(x, weight, None, y))

    def run() -> torch.Tensor:
        program.run(step)
        return y

    return run

"""The native sampling ops: the structures that sample.c takes, and all ops of a step in one run."""

from __future__ import annotations

import ctypes

import torch

from kernels.buckets import ceil_div
from kernels.native import DTYPES, Program, Step, has_native, integers, pointers, run_one
from kernels.sampling.rows import Adjustments, SamplingRows

PART = 16384  # tokens of a task, as values.h has it
_SERVED = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = ("temperature", "top_p", "min_p", "top_k", "seed", "position")
_ADJUSTED = ("rows", "repetition", "presence", "frequency", "history_row", "history")


class Sampling(ctypes.Structure):
    """Logits, how their rows draw, and what is found; values.h says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers("logits", "adjusted", "source", *_ROWS),
        *pointers("highest", "highest_token", "is_finite_part", "best", "best_token", "lowest", "tokens", "is_finite"),
        *integers("stride", "vocab", "dtype"),
    ]


class Adjusting(ctypes.Structure):
    """How logits are changed before that; sample.c says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers("logits", "adjusted", *_ADJUSTED, "bias_row", "bias_token", "bias"),
        *integers("stride", "vocab", "dtype", "num_rows", "num_biases"),
    ]


def can_serve(logits: torch.Tensor) -> bool:
    """Whether native code samples from these: on the CPU, with dense rows."""
    return logits.dtype in _SERVED and logits.stride(1) == 1 and has_native(logits)


def sample(
    logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int64 [n], and whether all logits of the row are finite, bool [n]; the token of other rows is 0."""
    num_rows, vocab_size = logits.shape
    parts = num_rows, ceil_div(vocab_size, PART)
    program, memory = Program(), _Memory()
    tokens, is_finite = logits.new_empty(num_rows, dtype=torch.int64), logits.new_empty(num_rows, dtype=torch.bool)
    of = Sampling(
        logits=logits.data_ptr(),
        highest=memory.new(parts, torch.float32),
        highest_token=memory.new(parts, torch.int64),
        is_finite_part=memory.new(parts, torch.uint8),
        tokens=tokens.data_ptr(),
        is_finite=is_finite.data_ptr(),
        stride=logits.stride(0),
        vocab=vocab_size,
        dtype=DTYPES[logits.dtype],
    )
    if adjustments is not None:
        source = torch.full((num_rows,), -1, dtype=torch.int32)
        source[adjustments.rows] = torch.arange(len(adjustments.rows), dtype=torch.int32)
        of.source = memory.of(source)
        of.adjusted = memory.new((len(adjustments.rows), vocab_size), torch.float32)
        program.add("sample_adjust", _adjusting(logits, adjustments, of.adjusted, memory))
    program.add("sample_highest", of)
    if rows is not None:
        for name in _ROWS:
            setattr(of, name, memory.of(getattr(rows, name)))
        of.best = memory.new(parts, torch.float64)
        of.best_token = memory.new(parts, torch.int64)
        of.lowest = memory.of(torch.full((num_rows,), float("-inf")))
        if rows.has_top_k or rows.has_top_p:
            program.add("sample_limits", of)
        program.add("sample_draw", of)
    program.add("sample_pick", of)
    program.run(Step(num_tokens=num_rows))
    return tokens, is_finite


def adjust(logits: torch.Tensor, adjustments: Adjustments) -> torch.Tensor:
    """The adjusted logits of the m rows, float32 [m, vocab]."""
    adjusted = logits.new_empty(len(adjustments.rows), logits.shape[1], dtype=torch.float32)
    memory = _Memory()
    run_one("sample_adjust", _adjusting(logits, adjustments, adjusted.data_ptr(), memory), Step())
    return adjusted


class _Memory:
    """Tensors that the ops of a run work on."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Address of a tensor with any contents."""
        return self.of(torch.empty(shape, dtype=dtype))

    def of(self, tensor: torch.Tensor) -> int:
        """Address of the tensor's numbers, one after the other."""
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()


def _adjusting(logits: torch.Tensor, adjustments: Adjustments, adjusted: int, memory: _Memory) -> Adjusting:
    order = adjustments.bias_row.argsort()
    return Adjusting(
        logits=logits.data_ptr(),
        adjusted=adjusted,
        bias_row=memory.of(adjustments.bias_row[order]),
        bias_token=memory.of(adjustments.bias_token[order]),
        bias=memory.of(adjustments.bias[order]),
        stride=logits.stride(0),
        vocab=logits.shape[1],
        dtype=DTYPES[logits.dtype],
        num_rows=len(adjustments.rows),
        num_biases=len(order),
        **{name: memory.of(getattr(adjustments, name)) for name in _ADJUSTED},
    )

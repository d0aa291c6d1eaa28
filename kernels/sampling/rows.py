"""The settings of each row for `sample`: how it draws, and how its logits are changed before."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of n rows draws. All tensors lie on the logits' device."""

    temperature: torch.Tensor  # float32 [n], no unit, >= 0; 0 is greedy
    top_k: torch.Tensor  # int64 [n] most likely tokens kept; 0 keeps all
    top_p: torch.Tensor  # float32 [n] nucleus, in (0, 1]; 1 keeps all
    min_p: torch.Tensor  # float32 [n] least probability kept, as a part of the most likely token's, in [0, 1]
    seed: torch.Tensor  # int64 [n], the 64 bits of an unsigned seed
    position: torch.Tensor  # int64 [n] index of the token within its completion, from 0
    # False saves a search that no row of the step needs. True is always correct; the device is not read.
    has_top_k: bool = True
    has_top_p: bool = True
    has_min_p: bool = True
    # int64 [m], in order: limits are computed for these rows alone, which are all that draw and have one, and maybe
    # others. None: for every row.
    limited: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes to the logits of m of the n rows before they are drawn from. All tensors lie on the logits' device.

    Of a token's logit x, in this order: its bias is added; if the token is in the prompt or completion, x / repetition
    if x > 0, else x * repetition; then - frequency * times - presence * (times > 0), `times` being how often it is in
    the completion. Logits of banned tokens have a bias of -inf.
    """

    rows: torch.Tensor  # int64 [m], different rows of the logits
    repetition: torch.Tensor  # float32 [m], no unit, > 0; 1 changes nothing
    presence: torch.Tensor  # float32 [m], logits; 0 changes nothing
    frequency: torch.Tensor  # float32 [m], logits per occurrence; 0 changes nothing
    # int64 [m]: place of the row's history in `history`, -1 for none: its penalties then change nothing.
    history_row: torch.Tensor
    history: torch.Tensor  # int32 [num_histories, vocab]: IN_PROMPT if in the prompt, plus IN_COMPLETION per occurrence
    # Biases, in any order. No pair (bias_row, bias_token) appears twice.
    bias_row: torch.Tensor  # int64 [num_biases], index into `rows`
    bias_token: torch.Tensor  # int64 [num_biases]
    bias: torch.Tensor  # float32 [num_biases], logits; -inf bans


IN_PROMPT = 1
IN_COMPLETION = 2


@dataclass(frozen=True, slots=True)
class RowParameter:
    """One number of each row: its dtype on the device, and the value that changes nothing."""

    dtype: torch.dtype
    neutral: float


# By the fields of SamplingRows, but for the position.
DRAW_PARAMETERS = {
    "temperature": RowParameter(torch.float32, 0.0),
    "top_k": RowParameter(torch.int64, 0),
    "top_p": RowParameter(torch.float32, 1.0),
    "min_p": RowParameter(torch.float32, 0.0),
    "seed": RowParameter(torch.int64, 0),
}
# Those that SamplingRows says of, in has_NAME, whether a row uses them.
FILTERS = tuple(name for name in DRAW_PARAMETERS if f"has_{name}" in SamplingRows.__dataclass_fields__)


def rows_of(num_rows: int, device: torch.device | str = "cpu", **values: float | torch.Tensor) -> SamplingRows:
    """n rows with these values, by field of SamplingRows; a number is every row's. What is left out changes nothing."""
    unknown = values.keys() - _ROW_DTYPES.keys()
    if unknown:
        raise ValueError(f"SamplingRows has no {', '.join(sorted(unknown))}")
    neutral = {name: parameter.neutral for name, parameter in DRAW_PARAMETERS.items()}
    given = {"position": 0, **neutral, **values}
    tensors = {
        name: value.to(device, _ROW_DTYPES[name])
        if isinstance(value, torch.Tensor)
        else torch.full((num_rows,), value, dtype=_ROW_DTYPES[name], device=device)
        for name, value in given.items()
    }
    return SamplingRows(**tensors, **{f"has_{name}": name in values for name in FILTERS})  # type: ignore[arg-type]  # mypy takes the flags for tensors


# By the fields of Adjustments.
PENALTIES = {
    "repetition": RowParameter(torch.float32, 1.0),
    "presence": RowParameter(torch.float32, 0.0),
    "frequency": RowParameter(torch.float32, 0.0),
}
_ROW_DTYPES = {**{name: parameter.dtype for name, parameter in DRAW_PARAMETERS.items()}, "position": torch.int64}
_ADJUSTMENT_DTYPES = {
    **{name: parameter.dtype for name, parameter in PENALTIES.items()},
    "rows": torch.int64,
    "history_row": torch.int64,
}
_BIAS_DTYPES = {"bias_row": torch.int64, "bias_token": torch.int64, "bias": torch.float32}


def check_rows(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Raise ValueError unless the rows are those of logits [n, vocab]."""
    for name, dtype in _ROW_DTYPES.items():
        _check(name, getattr(rows, name), dtype, logits.shape[:1], logits.device)
    if rows.limited is not None:
        _check("limited", rows.limited, torch.int64, torch.Size((rows.limited.numel(),)), logits.device)


def check_adjustments(logits: torch.Tensor, adjustments: Adjustments) -> None:
    """Raise ValueError unless shapes, dtypes and device fit logits [n, vocab]. Values are not looked at."""
    for name, dtype in _ADJUSTMENT_DTYPES.items():
        _check(name, getattr(adjustments, name), dtype, adjustments.rows.shape[:1], logits.device)
    for name, dtype in _BIAS_DTYPES.items():
        _check(name, getattr(adjustments, name), dtype, adjustments.bias.shape[:1], logits.device)
    history = adjustments.history
    wanted = torch.Size((history.shape[0] if history.dim() else 0, logits.shape[1]))
    _check("history", history, torch.int32, wanted, logits.device)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, want {dtype} {list(shape)} on {device}"
        )
    if not tensor.is_contiguous():  # kernels take no strides
        raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")

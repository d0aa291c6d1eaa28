"""Rows that return a vector instead of tokens: what is kept of them from chunk to chunk, and the vectors at their end.

A prefill may come in any chunks, beside any other rows, so a vector must not depend on them. The last and the first
hidden state do not. A mean is summed in whole numbers, whose sum is the same in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from data_plane.engine.batch import PassOutput, StepBatch
from data_plane.engine.rows import Rows
from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array, NewRow, PooledRow, PoolingKind

# A mean is summed in units of 2^-24, a float32's rounding at 1. With values below 2^18, 2^20 tokens fit into an int64.
# A larger value counts as not finite: hidden states after a norm are below 2^16 in all of float16, and far below.
_UNIT = float(2**24)
_MAX_VALUE = float(2**18)


class ScoreHeads(Protocol):
    """The score heads of the adapters in slots."""

    def num_labels(self, slot: int) -> int:
        """Labels of the score head in a slot that is ready; 0: its adapter has none."""

    def score(self, slot: int, state: torch.Tensor) -> torch.Tensor:
        """float32 logits [num_labels] of a hidden state, float32 [width]."""


@dataclass(slots=True)
class _Pooled:
    """One row that returns a vector."""

    kind: PoolingKind
    num_labels: int  # 0: the hidden state itself is returned
    slot: int | None
    first: torch.Tensor | None = None  # float32 [width]
    total: torch.Tensor | None = None  # int64 [width], in units of 1 / _UNIT
    is_small: torch.Tensor | None = None  # bool []: every value so far could be summed
    num_tokens: int = 0  # in `total`


class Pooler:
    """The rows of an engine that return vectors."""

    def __init__(self, *, max_rows: int, hidden_width: int, heads: ScoreHeads) -> None:
        self.is_pooling = np.zeros(max_rows, dtype=np.bool_)
        self._hidden_width = hidden_width
        self._heads = heads
        self._rows: dict[int, _Pooled] = {}

    def add(self, new: NewRow) -> None:
        """Begin a row; nothing is kept of one that generates. Raises PlanRefused for what cannot be pooled."""
        if new.pooling is None:
            if new.num_labels:
                raise PlanRefused(f"new row {new.row} has {new.num_labels} labels and no pooling")
            return
        if not self._hidden_width:
            raise PlanRefused(f"new row {new.row} wants a vector, and the model's last hidden state is not known")
        if new.pooling is not PoolingKind.LAST and new.num_computed_tokens:
            raise PlanRefused(
                f"new row {new.row} pools {new.pooling.value} hidden states, of which {new.num_computed_tokens} are "
                "computed already"
            )
        if new.is_host_fed or new.sampling.num_prompt_logprobs is not None:
            raise PlanRefused(f"new row {new.row} wants a vector, and samples or returns log-probabilities too")
        known = 0 if new.slot is None else self._heads.num_labels(new.slot)
        if new.num_labels not in (0, known):
            raise PlanRefused(f"new row {new.row} has {new.num_labels} labels, its adapter has {known}")
        self.is_pooling[new.row] = True
        self._rows[new.row] = _Pooled(new.pooling, new.num_labels, new.slot)

    def free(self, rows: Int32Array) -> None:
        """End rows."""
        for row in rows[self.is_pooling[rows]].tolist():
            self.is_pooling[row] = False
            del self._rows[row]

    def clear(self) -> None:
        """End every row."""
        self.is_pooling[:] = False
        self._rows.clear()

    @property
    def num_rows(self) -> int:
        """Rows that return vectors."""
        return len(self._rows)

    def take(self, batch: StepBatch, hidden: torch.Tensor) -> list[PooledRow]:
        """Keep what is needed of the step's last hidden states [num_tokens, width].

        Returns the vectors of the rows whose prefill ended, in the step's order. Vectors may hold what is not finite.
        """
        ended: list[tuple[int, torch.Tensor]] = []
        is_ended = np.isin(batch.rows, batch.pooled_rows)
        for index in np.flatnonzero(self.is_pooling[batch.rows]).tolist():
            row, begin = int(batch.rows[index]), int(batch.starts[index])
            tokens = hidden[begin : begin + int(batch.num_tokens[index])].float()
            pooled = self._rows[row]
            if pooled.kind is PoolingKind.MEAN:
                _add(pooled, tokens)
            elif pooled.kind is PoolingKind.FIRST and pooled.first is None:
                pooled.first = tokens[0].clone()
            if is_ended[index]:
                ended.append((row, self._vector(pooled, tokens[-1])))
        if not ended:
            return []
        values = torch.cat([vector for _, vector in ended]).cpu().numpy()  # the device is waited for once
        ends = np.cumsum([len(vector) for _, vector in ended])[:-1]
        return [PooledRow(row, own) for (row, _), own in zip(ended, np.split(values, ends), strict=True)]

    def _vector(self, pooled: _Pooled, last: torch.Tensor) -> torch.Tensor:
        """float32: the row's result. What is not finite in the last hidden state makes it not finite."""
        vector = last
        if pooled.kind is not PoolingKind.LAST:
            of_more = _mean(pooled) if pooled.kind is PoolingKind.MEAN else pooled.first
            assert of_more is not None, "a row ended before its first token"
            # Other rows may use its KV from here on: all of it must be finite, and the last token attended to all.
            vector = torch.where(torch.isfinite(last).all(), of_more, torch.nan)
        if pooled.num_labels:
            assert pooled.slot is not None, "a row with labels has an adapter"
            vector = self._heads.score(pooled.slot, vector)
        return vector


def with_pooled(rows: Rows, batch: StepBatch, output: PassOutput, pooled: list[PooledRow]) -> PassOutput:
    """The output with the vectors of the rows that return one, in the step's order. These rows stay idle."""
    returned, not_finite = list[PooledRow](), list[int]()
    for entry in pooled:
        if np.isfinite(entry.values).all():
            returned.append(entry)
        else:
            not_finite.append(entry.row)
    failed = np.array(not_finite, dtype=np.int32)
    rows.maybe_non_finite[batch.pooled_rows] = np.isin(batch.pooled_rows, failed)
    rows.forget_given(batch.pooled_rows)
    all_failed = np.concatenate([output.failed_rows, failed])
    is_ended = ~np.isin(batch.ended_rows, np.concatenate([all_failed, output.waiting_rows]))
    ended = batch.ended_rows[is_ended].astype(np.int32)
    tokens = np.zeros(len(ended), dtype=np.int32)
    tokens[np.isin(ended, output.rows)] = output.token_ids
    return replace(output, rows=ended, token_ids=tokens, failed_rows=all_failed, pooled=returned)


def _add(pooled: _Pooled, tokens: torch.Tensor) -> None:
    """Add hidden states, float32 [n, width], to a row's sum."""
    is_small = (tokens.abs() < _MAX_VALUE).all()
    whole = torch.where(is_small, tokens.double() * _UNIT, 0.0).round().to(torch.int64).sum(dim=0)
    pooled.total = whole if pooled.total is None else pooled.total + whole
    pooled.is_small = is_small if pooled.is_small is None else pooled.is_small & is_small
    pooled.num_tokens += len(tokens)


def _mean(pooled: _Pooled) -> torch.Tensor:
    assert pooled.total is not None and pooled.is_small is not None, "a row ended before its first token"
    mean = (pooled.total.double() / (_UNIT * pooled.num_tokens)).float()
    return torch.where(pooled.is_small, mean, torch.nan)

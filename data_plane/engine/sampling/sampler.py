"""How every row of a worker samples: settings by row number, checked when a row begins, as the tensors that the
sampling kernels take. Options that no row uses cost nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from motet.v1 import types_pb2

from contract.sampling import PARAMETERS, Parameter
from data_plane.engine.rows import BoolArray, Int64Array
from data_plane.engine.sampling.token_history import TokenHistory
from data_plane.errors import PlanRefused
from data_plane.plan import Float32Array, Int32Array, NewRow, RowSampling
from kernels.devices import upload, upload_all
from kernels.sampling import (
    DRAW_PARAMETERS,
    FILTERS,
    PENALTIES,
    Adjustments,
    RowParameter,
    SamplingRows,
    processed_logits,
    sample_and_check,
)

# Token ids and what is added to their logits; -inf bans.
_Biases = tuple[Int64Array, Float32Array]
_NO_BIASES: _Biases = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))
# Sets of rows whose settings stay on the device: those of a step, by the size of their vocabularies, and of passes with
# drafts.
_MOST_SETS = 64


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """Counts of a sampler."""

    num_adjusted_rows: int  # rows whose logits are changed in some step
    num_biased_rows: int
    num_histories: int  # of rows with penalties
    num_history_places: int  # allocated, histories included


@dataclass(slots=True)
class _OnDevice:
    """What a set of rows needs to draw, on the device. Only positions change from step to step."""

    settings: SamplingRows | None  # with every position 0; None: all rows are greedy
    counted: tuple[torch.Tensor, torch.Tensor] | None  # indices of the rows with a history, and its places; int64
    # Of the last step: which rows were before their min_tokens, bool [n] as bytes, and what changes their logits.
    adjustments: tuple[bytes, Adjustments | None] | None = None


class Sampler:
    """Settings of all rows, and the histories of those with penalties."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # What each row draws by, and its penalties: [max_rows] by the names that the kernels have for them.
        self._draw = _arrays(DRAW_PARAMETERS, max_rows)
        self._penalties = _arrays(PENALTIES, max_rows)
        self._min_tokens = np.zeros(max_rows, dtype=np.int64)
        self._is_adjusted = np.zeros(max_rows, dtype=np.bool_)  # logits are changed in some step
        self._history_place = np.full(max_rows, -1, dtype=np.int64)  # -1: no penalties
        self._num_tokens = np.full(max_rows, vocab_size)  # of the row's vocabulary
        # By row: its biases before and after min_tokens generated tokens. Rows without any are not in it.
        self._biases: dict[int, tuple[_Biases, _Biases]] = {}
        # By the size of a vocabulary, that of the model first.
        self._histories = {vocab_size: TokenHistory(vocab_size=vocab_size, device=device)}
        # By the numbers of rows that drew lately, as bytes. Valid until a row begins or ends.
        self._on_device: dict[bytes, _OnDevice] = {}
        # Most likely tokens returned beside each token; -1: no log-probabilities.
        self.num_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._logprobs_mode = np.full(max_rows, types_pb2.LOGPROBS_MODE_RAW, dtype=np.int64)

    def add(self, new: NewRow, vocab_size: int | None = None) -> None:
        """Begin a row, whose adapter has that many tokens; None: as the model. Raises PlanRefused for bad settings."""
        row, sampling = new.row, new.sampling
        num_tokens = self._vocab_size if vocab_size is None else vocab_size
        _check(new, num_tokens)
        self._num_tokens[row] = num_tokens
        self._on_device.clear()
        for name, values in self._draw.items():
            values[row] = getattr(sampling, name) if name != "seed" else np.uint64(sampling.seed).astype(np.int64)
        self._draw["top_k"][row] = min(sampling.top_k, num_tokens)
        for name, values in self._penalties.items():
            values[row] = getattr(sampling, f"{name}_penalty")
        self._min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.num_prompt_logprobs[row] = -1 if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs
        self._logprobs_mode[row] = sampling.logprobs_mode
        if _has_penalties(sampling):
            prompt, completion = np.split(new.token_ids, [new.num_prompt_tokens])
            if num_tokens not in self._histories:
                self._histories[num_tokens] = TokenHistory(vocab_size=num_tokens, device=self._device)
            self._history_place[row] = self._histories[num_tokens].take(prompt, completion)
        banned = sampling.banned_token_ids
        if sampling.biased_token_ids is not None or banned is not None:
            after = _biases(sampling)
            self._biases[row] = (after if banned is None else _ban(after, banned), after)
        self._is_adjusted[row] = self._history_place[row] >= 0 or row in self._biases

    def inspect(self, row: int) -> dict[str, float]:
        """What a row draws by, for tests: its numbers by the kernels' names, and its counts of log-probabilities."""
        numbers = {name: values[row].item() for name, values in (*self._draw.items(), *self._penalties.items())}
        counts = {
            "num_logprobs": self.num_logprobs,
            "num_prompt_logprobs": self.num_prompt_logprobs,
            "logprobs_mode": self._logprobs_mode,
        }
        return numbers | {name: values[row].item() for name, values in counts.items()}

    def stats(self) -> SamplerStats:
        """What the rows hold at present."""
        num_held = sum(history.num_held for history in self._histories.values())
        num_places = sum(len(history.table) for history in self._histories.values())
        return SamplerStats(int(self._is_adjusted.sum()), len(self._biases), num_held, num_places)

    def free(self, rows: Int32Array) -> None:
        """End rows."""
        self._on_device.clear()
        for row in rows[self._is_adjusted[rows]].tolist():
            if self._history_place[row] >= 0:
                self._release(int(self._num_tokens[row]), int(self._history_place[row]))
            self._history_place[row] = -1
            self._biases.pop(row, None)
            self._is_adjusted[row] = False

    def has_history(self, rows: Int64Array) -> BoolArray:
        """bool [n]: whether a row has penalties, by the tokens that it has sampled."""
        return self._history_place[rows] >= 0

    def lift_bans(self, rows: Sequence[int]) -> None:
        """Let banned tokens end these rows before min_tokens: their constraints allow nothing else."""
        for row in rows:
            self._min_tokens[row] = 0

    def clear(self) -> None:
        """End every row."""
        self._on_device.clear()
        self._is_adjusted[:] = False
        self._history_place[:] = -1
        self._biases.clear()
        own = self._histories[self._vocab_size]
        own.clear()
        self._histories = {self._vocab_size: own}

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        positions_there: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each of the rows, int64 [n] on the device, from its logits [n, vocab]; histories count it.

        The rows have vocabularies of one size.

        The second result, bool [n], says whether all logits of a row are finite; if not, its token means nothing.
        positions [n] are the indices of the tokens in the rows' completions, from 0; `positions_there` are the same on
        the device, int64, where they are there already.
        """
        there = self._of(rows)
        settings = there.settings
        if settings is not None:
            settings = replace(
                settings, position=self._tensor(positions) if positions_there is None else positions_there
            )
        tokens, is_finite = sample_and_check(logits, settings, self.adjustments(rows, positions))
        if there.counted is not None:
            indices, places = there.counted
            self._histories[logits.shape[1]].count(places, tokens[indices])
        return tokens, is_finite

    def processed_logits(
        self, logits: torch.Tensor, rows: Int64Array, positions: Int64Array
    ) -> tuple[Int64Array, torch.Tensor] | None:
        """For the rows that return log-probabilities of what they are drawn from: their indices, and these logits.

        To be called before `sample`, which counts the new token in the rows' histories. None if no row wants them.
        """
        wants = (self.num_logprobs[rows] >= 0) & (self._logprobs_mode[rows] == types_pb2.LOGPROBS_MODE_PROCESSED)
        if not wants.any():
            return None
        indices = np.flatnonzero(wants)
        chosen, at = rows[indices], positions[indices]
        settings = self._of(chosen).settings
        return indices, processed_logits(
            logits[self._tensor(indices)],
            None if settings is None else replace(settings, position=self._tensor(at)),
            self.adjustments(chosen, at),
        )

    def _release(self, num_tokens: int, place: int) -> None:
        """Give a history back; the last one of an adapter's vocabulary gives the memory back."""
        history = self._histories[num_tokens]
        history.release(place)
        if num_tokens != self._vocab_size and history.num_held == 0:
            del self._histories[num_tokens]

    def adjustments(self, rows: Int64Array, positions: Int64Array) -> Adjustments | None:
        """Adjustments of the rows whose logits change in this step. None if no row's logits change."""
        is_adjusted = self._is_adjusted[rows]
        if not is_adjusted.any():
            return None
        there = self._of(rows)
        is_before = (is_adjusted & (positions < self._min_tokens[rows])).tobytes()
        if there.adjustments is None or there.adjustments[0] != is_before:
            there.adjustments = is_before, self._adjustments(rows, positions)
        return there.adjustments[1]

    def _of(self, rows: Int64Array) -> _OnDevice:
        key = rows.tobytes()
        found = self._on_device.pop(key, None)
        if found is None:
            places = self._history_place[rows]
            indices = np.flatnonzero(places >= 0)
            counted = upload_all(self._device, indices, places[indices]) if len(indices) else None
            found = _OnDevice(self._settings(rows), None if counted is None else (counted[0], counted[1]))
            if len(self._on_device) == _MOST_SETS:
                del self._on_device[next(iter(self._on_device))]
        self._on_device[key] = found  # those used last lie at the end
        return found

    def _settings(self, rows: Int64Array) -> SamplingRows | None:
        """Sampling settings of `rows`, with every position set to 0. None if all rows are greedy."""
        if not self._draw["temperature"][rows].any():
            return None
        values = {name: array[rows] for name, array in self._draw.items()}
        is_limited = {name: values[name] != DRAW_PARAMETERS[name].neutral for name in FILTERS}
        limited = np.flatnonzero(np.logical_or.reduce(list(is_limited.values())) & (values["temperature"] > 0))
        *numbers, position, limited_there = upload_all(self._device, *values.values(), np.zeros_like(rows), limited)
        settings: dict[str, Any] = dict(zip(values, numbers, strict=True))
        settings |= {f"has_{name}": bool(has_one.any()) for name, has_one in is_limited.items()}
        return SamplingRows(**settings, position=position, limited=limited_there)

    def _adjustments(self, rows: Int64Array, positions: Int64Array) -> Adjustments | None:
        biases_by_index = {
            index: self._biases_of(int(rows[index]), int(positions[index]))
            for index in np.flatnonzero(self._is_adjusted[rows]).tolist()
        }
        indices = np.array(
            [i for i, (token_ids, _) in biases_by_index.items() if len(token_ids) or self._history_place[rows[i]] >= 0],
            dtype=np.int64,
        )
        if len(indices) == 0:
            return None
        adjusted, biases = rows[indices], [biases_by_index[index] for index in indices.tolist()]
        arrays = {
            "rows": indices,
            "history_row": self._history_place[adjusted],
            "bias_row": np.repeat(np.arange(len(indices)), [len(token_ids) for token_ids, _ in biases]),
            "bias_token": np.concatenate([token_ids for token_ids, _ in biases]),
            "bias": np.concatenate([values for _, values in biases]),
            **{name: values[adjusted] for name, values in self._penalties.items()},
        }
        there = dict(zip(arrays, upload_all(self._device, *arrays.values()), strict=True))
        return Adjustments(**there, history=self._history_of(adjusted).table)

    def _history_of(self, rows: Int64Array) -> TokenHistory:
        """The histories of rows with vocabularies of one size, of which none may have a history."""
        num_tokens = int(self._num_tokens[rows[0]])
        return self._histories.get(num_tokens) or TokenHistory(vocab_size=num_tokens, device=self._device)

    def _biases_of(self, row: int, position: int) -> _Biases:
        """Biases for the token at this index of the row's completion."""
        if row not in self._biases:
            return _NO_BIASES
        before, after = self._biases[row]
        return before if position < self._min_tokens[row] else after

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return upload(values, self._device)


def _arrays(parameters: Mapping[str, RowParameter], max_rows: int) -> dict[str, npt.NDArray[Any]]:
    """By name, the neutral value of each row."""
    return {
        name: np.full(max_rows, parameter.neutral, dtype=np.float32 if parameter.dtype.is_floating_point else np.int64)
        for name, parameter in parameters.items()
    }


def _has_penalties(sampling: RowSampling) -> bool:
    return any(getattr(sampling, f"{name}_penalty") != penalty.neutral for name, penalty in PENALTIES.items())


def _biases(sampling: RowSampling) -> _Biases:
    if sampling.biased_token_ids is None or sampling.biases is None:
        return _NO_BIASES
    return sampling.biased_token_ids.astype(np.int64), sampling.biases


def _ban(biases: _Biases, banned: Int32Array) -> _Biases:
    """The biases with -inf for the banned tokens."""
    token_ids, values = biases
    others = ~np.isin(token_ids, banned)
    distinct = np.unique(banned).astype(np.int64)
    return (
        np.concatenate([token_ids[others], distinct]),
        np.concatenate([values[others], np.full(len(distinct), -np.inf, dtype=np.float32)]),
    )


def _check(new: NewRow, vocab_size: int) -> None:
    """Refuse settings out of range, by name."""
    sampling = new.sampling
    for parameter in PARAMETERS:
        value = getattr(sampling, parameter.attribute)
        if value != parameter.default and not _has_meaning(parameter, value, vocab_size):
            raise PlanRefused(f"new row {new.row} has {parameter.attribute} {value}")
    if sampling.min_tokens < 0:
        raise PlanRefused(f"new row {new.row} has min_tokens {sampling.min_tokens}")
    if sampling.num_prompt_logprobs is not None and new.num_computed_tokens:
        raise PlanRefused(
            f"new row {new.row} requests log-probabilities of its prompt, of which {new.num_computed_tokens} tokens "
            "are computed already"
        )
    if new.is_host_fed and _has_penalties(sampling):
        raise PlanRefused(f"new row {new.row} is host-fed and has penalties: fed tokens are not counted")
    _check_biases(new, vocab_size)


def _has_meaning(parameter: Parameter, value: float, vocab_size: int) -> bool:
    """Whether the kernels can use the value. They take more than clients may request: any temperature and penalty."""
    if parameter.choices:
        return parameter.is_valid(value)
    if not parameter.is_float:  # beam search requests more log-probabilities than clients may
        return value >= 0 and (parameter.default is not None or value <= vocab_size)
    may_be_negative = parameter.lowest is not None and parameter.lowest < 0
    is_probability = parameter.highest == 1
    is_low = (value < 0 and not may_be_negative) or (value == 0 and not parameter.is_valid(0.0))
    return math.isfinite(value) and not is_low and not (is_probability and value > 1)


def _check_biases(new: NewRow, vocab_size: int) -> None:
    sampling = new.sampling
    for name, token_ids in (
        ("biased_token_ids", sampling.biased_token_ids),
        ("banned_token_ids", sampling.banned_token_ids),
    ):
        if token_ids is not None and len(token_ids) and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
            raise PlanRefused(f"new row {new.row} has {name} outside [0, {vocab_size})")
    if sampling.biased_token_ids is not None and sampling.biases is not None:
        if len(np.unique(sampling.biased_token_ids)) != len(sampling.biases):
            raise PlanRefused(f"new row {new.row} has one token twice in biased_token_ids, or fewer biases than tokens")
        if not np.isfinite(sampling.biases).all():
            raise PlanRefused(f"new row {new.row} has biases that are not finite")
    if sampling.banned_token_ids is not None and len(np.unique(sampling.banned_token_ids)) == vocab_size:
        raise PlanRefused(f"new row {new.row} has every token of the vocabulary in banned_token_ids")

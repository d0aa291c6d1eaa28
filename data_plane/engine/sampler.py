"""How every row of a worker samples: settings by row number, checked when a row begins, as the tensors that the
sampling kernels take. A row costs per step only what it asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from data_plane.engine.rows import Int64Array
from data_plane.engine.token_history import TokenHistory
from data_plane.errors import PlanRefused
from data_plane.plan import Float32Array, Int32Array, NewRow, RowSampling
from kernels.devices import upload
from kernels.sampling import Adjustments, SamplingRows, sample_and_check

# Token ids and what is added to their logits; -inf bans.
_Biases = tuple[Int64Array, Float32Array]
_NO_BIASES: _Biases = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))


class Sampler:
    """Settings of all rows, and the histories of those with penalties."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._temperature = np.zeros(max_rows, dtype=np.float32)
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._top_p = np.ones(max_rows, dtype=np.float32)
        self._min_p = np.zeros(max_rows, dtype=np.float32)
        self._seed = np.zeros(max_rows, dtype=np.int64)  # the unsigned seed's 64 bits
        self._repetition = np.ones(max_rows, dtype=np.float32)
        self._presence = np.zeros(max_rows, dtype=np.float32)
        self._frequency = np.zeros(max_rows, dtype=np.float32)
        self._min_tokens = np.zeros(max_rows, dtype=np.int64)
        self._is_adjusted = np.zeros(max_rows, dtype=np.bool_)  # logits are changed in some step
        self._history_place = np.full(max_rows, -1, dtype=np.int64)  # -1: no penalties
        # By row: its biases before and after min_tokens generated tokens. Rows without any are not in it.
        self._biases: dict[int, tuple[_Biases, _Biases]] = {}
        self._history = TokenHistory(vocab_size=vocab_size, device=device)
        # What the last drawn rows were told, while rows stay what they are: only their positions are new in each step.
        self._last_draws: tuple[bytes, SamplingRows | None] | None = None
        # Most likely tokens told beside each token, -1 for no log-probabilities.
        self.num_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_rows, -1, dtype=np.int64)

    def add(self, new: NewRow) -> None:
        """Begin a row. Raises PlanRefused on settings that make no sense."""
        row, sampling = new.row, new.sampling
        _check(new, self._vocab_size)
        self._last_draws = None
        self._temperature[row] = sampling.temperature
        self._top_k[row] = min(sampling.top_k, self._vocab_size)
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = np.uint64(sampling.seed).astype(np.int64)
        self._repetition[row] = sampling.repetition_penalty
        self._presence[row] = sampling.presence_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.num_prompt_logprobs[row] = -1 if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs
        if _has_penalties(sampling):
            prompt, answer = np.split(new.token_ids, [new.num_prompt_tokens])
            self._history_place[row] = self._history.take(prompt, answer)
        banned = sampling.banned_token_ids
        if sampling.biased_token_ids is not None or banned is not None:
            after = _biases(sampling)
            self._biases[row] = (after if banned is None else _ban(after, banned), after)
        self._is_adjusted[row] = self._history_place[row] >= 0 or row in self._biases

    def free(self, rows: Int32Array) -> None:
        """End rows."""
        for row in rows[self._is_adjusted[rows]].tolist():
            if self._history_place[row] >= 0:
                self._history.release(int(self._history_place[row]))
            self._history_place[row] = -1
            self._biases.pop(row, None)
            self._is_adjusted[row] = False

    def clear(self) -> None:
        """End every row."""
        self._is_adjusted[:] = False
        self._history_place[:] = -1
        self._biases.clear()
        self._history.clear()

    def sample(
        self, logits: torch.Tensor, rows: Int64Array, positions: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each of the rows, int64 [n] on the device, from its logits [n, vocab]; histories count it.

        And whether all logits of the row are finite, bool [n]; else the token means nothing. positions [n] are the
        places of the tokens in the rows' answers, from 0.
        """
        adjustments = self._adjustments(rows, positions) if self._is_adjusted[rows].any() else None
        tokens, is_finite = sample_and_check(logits, self._draws(rows, positions), adjustments)
        places = self._history_place[rows]
        if (places >= 0).any():
            self._history.count(self._tensor(places[places >= 0]), tokens[self._tensor(np.flatnonzero(places >= 0))])
        return tokens, is_finite

    def _draws(self, rows: Int64Array, positions: Int64Array) -> SamplingRows | None:
        key = rows.tobytes()
        if self._last_draws is None or self._last_draws[0] != key:
            self._last_draws = (key, self._settings(rows))
        settings = self._last_draws[1]
        return None if settings is None else replace(settings, position=self._tensor(positions))

    def _settings(self, rows: Int64Array) -> SamplingRows | None:
        """Of rows at position 0; None if all are greedy."""
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        return SamplingRows(
            temperature=self._tensor(temperature),
            top_k=self._tensor(top_k),
            top_p=self._tensor(top_p),
            min_p=self._tensor(min_p),
            seed=self._tensor(self._seed[rows]),
            position=self._tensor(np.zeros_like(rows)),
            has_top_k=bool(top_k.any()),
            has_top_p=bool((top_p < 1).any()),
            has_min_p=bool(min_p.any()),
        )

    def _adjustments(self, rows: Int64Array, positions: Int64Array) -> Adjustments | None:
        """Of the rows whose logits change in this step; None if there is none."""
        biases_at = {
            index: self._biases_of(int(rows[index]), int(positions[index]))
            for index in np.flatnonzero(self._is_adjusted[rows]).tolist()
        }
        at = np.array(
            [i for i, (token_ids, _) in biases_at.items() if len(token_ids) or self._history_place[rows[i]] >= 0],
            dtype=np.int64,
        )
        if len(at) == 0:
            return None
        adjusted, biases = rows[at], [biases_at[index] for index in at.tolist()]
        counts = [len(token_ids) for token_ids, _ in biases]
        return Adjustments(
            rows=self._tensor(at),
            repetition=self._tensor(self._repetition[adjusted]),
            presence=self._tensor(self._presence[adjusted]),
            frequency=self._tensor(self._frequency[adjusted]),
            history_row=self._tensor(self._history_place[adjusted]),
            history=self._history.table,
            bias_row=self._tensor(np.repeat(np.arange(len(at)), counts)),
            bias_token=self._tensor(np.concatenate([token_ids for token_ids, _ in biases])),
            bias=self._tensor(np.concatenate([values for _, values in biases])),
        )

    def _biases_of(self, row: int, position: int) -> _Biases:
        """Biases of a row's token at that place of its answer."""
        if row not in self._biases:
            return _NO_BIASES
        before, after = self._biases[row]
        return before if position < self._min_tokens[row] else after

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return upload(values, self._device)


def _has_penalties(sampling: RowSampling) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)


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
    for name, is_right in (
        ("temperature", sampling.temperature >= 0),
        ("top_k", sampling.top_k >= 0),
        ("top_p", 0 < sampling.top_p <= 1),
        ("min_p", 0 <= sampling.min_p <= 1),
        ("repetition_penalty", sampling.repetition_penalty > 0),
        ("presence_penalty", True),
        ("frequency_penalty", True),
        ("min_tokens", sampling.min_tokens >= 0),
        ("num_logprobs", sampling.num_logprobs is None or 0 <= sampling.num_logprobs <= vocab_size),
        (
            "num_prompt_logprobs",
            sampling.num_prompt_logprobs is None or 0 <= sampling.num_prompt_logprobs <= vocab_size,
        ),
    ):
        value = getattr(sampling, name)
        if not is_right or not np.isfinite(0 if value is None else value):
            raise PlanRefused(f"new row {new.row} has {name} {value}")
    if sampling.num_prompt_logprobs is not None and new.num_computed_tokens:
        raise PlanRefused(
            f"new row {new.row} asks for log-probabilities of its prompt, of which {new.num_computed_tokens} tokens "
            "are computed already"
        )
    if new.is_stepwise and _has_penalties(sampling):
        raise PlanRefused(f"new row {new.row} is stepwise and has penalties: what it is fed is not counted")
    _check_biases(new, vocab_size)


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

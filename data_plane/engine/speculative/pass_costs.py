"""Whether drafts make a plan faster: the measured times of passes, and the number of passes that rows need.

Times decide only whether rows draft. No token depends on them.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data_plane.engine.rows import Int64Array

_Floats = npt.NDArray[np.floating[Any]]

# Passes with numbers of tokens between two of these share one time.
_BUCKETS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192]
_WEIGHT = 1 / 4  # of the latest pass in the running mean
_OUTLIER = 2.0  # a pass counts as at most so many times the mean: the system may take the core away
_NUM_FIRST = 2  # passes before a time is believed; the smaller one counts
_STALE = 512  # passes after which a time that was not measured again is unknown
_GAIN = 0.97  # of the time without drafts that a plan with drafts may take: below it, errors of the estimate decide


@dataclass(slots=True)
class _Time:
    """The mean time of the passes of one bucket."""

    time_s: float
    num_passes: int
    latest: int  # pass that was measured last


class PassCosts:
    """Running means of passes by tokens, separately with and without adapters.

    Passes that verify drafts have times of their own: on a GPU the others may be replays of graphs.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[bool, bool, int], _Time] = {}
        self._num_passes = 0

    def observe(self, num_tokens: int, *, has_adapters: bool, time_s: float, is_verifying: bool = False) -> None:
        """A pass of this many tokens took this long."""
        self._num_passes += 1
        key = has_adapters, is_verifying, self._bucket(num_tokens)
        known = self._times.get(key)
        if known is None or self._is_stale(known):
            self._times[key] = _Time(time_s, 1, self._num_passes)
            return
        known.latest = self._num_passes
        known.num_passes += 1
        if known.num_passes <= _NUM_FIRST:
            known.time_s = min(known.time_s, time_s)
        else:
            known.time_s += _WEIGHT * (min(time_s, _OUTLIER * known.time_s) - known.time_s)

    def time_s(self, num_tokens: int, *, has_adapters: bool, is_verifying: bool = False) -> float | None:
        """What a pass of this many tokens takes; None while it is unknown."""
        known = self._times.get((has_adapters, is_verifying, self._bucket(num_tokens)))
        if known is None or known.num_passes < _NUM_FIRST or self._is_stale(known):
            return None
        return known.time_s

    def can_gain(self, num_rows: int, num_steps: int, *, has_adapters: bool) -> bool:
        """Whether a plan of `num_steps` steps would be faster if every row had all its drafts accepted.

        True while the time of a pass with drafts is unknown, so that it gets known; False while the time of a pass
        without drafts is.
        """
        plain = self.time_s(num_rows, has_adapters=has_adapters)
        if plain is None:
            return False
        drafted = self.time_s(num_rows * num_steps, has_adapters=has_adapters, is_verifying=True)
        return drafted is None or drafted < _GAIN * num_steps * plain

    def can_gain_beside(self, num_rows: int, num_steps: int, *, has_adapters: bool) -> bool:
        """Whether such a plan could be faster though one of its rows has no draft, and so needs every step alone."""
        plain = self.time_s(num_rows, has_adapters=has_adapters)
        alone = self.time_s(1, has_adapters=has_adapters)
        if plain is None or alone is None:
            return False
        return plain + (num_steps - 1) * alone < _GAIN * num_steps * plain

    def gains(self, counts: Int64Array, most: Int64Array, shares: _Floats, *, has_adapters: bool) -> bool:
        """Whether drafts make the rest of a plan faster. Per row [n]: its drafts, the tokens that it may be ahead
        after this pass, and how likely a draft is accepted."""
        if not counts.any():
            return False
        num_rows, num_steps = len(counts), int(most.max()) + 1
        plain = self.time_s(num_rows, has_adapters=has_adapters)
        if plain is None:
            return False
        # A row is done with this pass if all its drafts are accepted and they reach the end of the plan.
        unfinished = 1.0 - np.where(counts >= most, shares**most, 0.0)
        first = self.time_s(num_rows + int(counts.sum()), has_adapters=has_adapters, is_verifying=True)
        total = plain if first is None else first  # unknown: it is tried, and known then
        for later in range(1, num_steps):
            alive = np.where(most >= later, unfinished**later, 0.0)
            is_needed = 1.0 - float(np.prod(1.0 - alive))
            if is_needed < 1e-3:
                break
            # Rows that did not finish draft again, for what is left of the plan.
            tokens = float((alive * (1 + np.minimum(counts, np.maximum(most - later, 0)))).sum()) / is_needed
            time_s = self.time_s(max(round(tokens), 1), has_adapters=has_adapters, is_verifying=True)
            total += is_needed * (plain if time_s is None else time_s)
        return total < _GAIN * num_steps * plain

    def _is_stale(self, known: _Time) -> bool:
        return self._num_passes - known.latest > _STALE

    @staticmethod
    def _bucket(num_tokens: int) -> int:
        return _BUCKETS[min(bisect.bisect_left(_BUCKETS, num_tokens), len(_BUCKETS) - 1)]

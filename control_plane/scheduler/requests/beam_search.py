"""Beam search: which continuations live on, which ended, and when to stop. Pure: log-probabilities in, beams out.

The algorithm is that of transformers' generate() (version 5), one prompt at a time. Each step ranks the continuations
of all beams by the sum of their log-probabilities. Those among the best `width` that end (by a stop token or at the
longest length) become hypotheses, scored by sum / length ** length_penalty. The best `width` hypotheses are kept. The
best `width` continuations that do not end are the next beams.

The search is over when no continuation is left, or when `width` hypotheses exist and early_stopping is set, or when the
best beam, scored at its present length, is no better than the worst of `width` hypotheses.

transformers takes (1 + number of stop tokens) * width continuations of all beams, so that at least `width` do not end.
The same beams follow from the `num_candidates` best tokens of each beam: its best `width` that do not end are among
them, and so are its best `width` of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from control_plane.scheduler.types import BeamSearch


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation of the prompt that may go on. It shares its tokens with its parent: a step copies none."""

    logprob: float = 0.0  # sum over token_ids
    num_tokens: int = 0  # generated
    last_token_id: int = -1  # meaningful with num_tokens > 0
    parent: Beam | None = field(default=None, repr=False)  # with one token less

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens."""
        tokens: list[int] = []
        beam = self
        while beam.parent is not None:
            tokens.append(beam.last_token_id)
            beam = beam.parent
        return tuple(reversed(tokens))


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation of the prompt that ended."""

    token_ids: tuple[int, ...]
    score: float  # logprob / number of tokens ** length_penalty


class BeamSearcher:
    """One search."""

    def __init__(
        self, search: BeamSearch, *, stop_token_ids: frozenset[int], min_tokens: int, max_generated: int
    ) -> None:
        self.search = search
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._max_generated = max_generated
        self.beams = [Beam()]  # best first, all of one length; none once it is over
        self.hypotheses: list[Hypothesis] = []  # best first, at most `width`

    @property
    def num_candidates(self) -> int:
        """Most likely tokens to be known of each beam; where the vocabulary is smaller, all of it."""
        return self.search.width + len(self._stop_token_ids)

    def advance(self, candidates: Sequence[Iterable[tuple[int, float]]]) -> list[int]:
        """Go one token further; where each of the new beams comes from, as a position among the old ones.

        `candidates`: for each beam its `num_candidates` most likely tokens with their log-probabilities, the most
        likely first; read no further than matters, so that many stop tokens cost little.
        """
        width, num_tokens = self.search.width, self.beams[0].num_tokens + 1
        banned = self._stop_token_ids if num_tokens <= self._min_tokens else frozenset[int]()
        ranked = sorted(
            (
                (beam.logprob + logprob, parent, token_id)
                for parent, (beam, tokens) in enumerate(zip(self.beams, candidates, strict=True))
                for token_id, logprob in self._relevant(tokens, banned)
            ),
            key=lambda entry: (-entry[0], entry[1], entry[2]),
        )
        self._finish([entry for entry in ranked[:width] if self._ends(entry[2], num_tokens)], num_tokens)
        going_on = [entry for entry in ranked if not self._ends(entry[2], num_tokens)][:width]
        if not going_on or not self._may_improve(going_on[0][0], num_tokens):
            self.beams = []
            return []
        self.beams = [Beam(logprob, num_tokens, token_id, self.beams[parent]) for logprob, parent, token_id in going_on]
        return [parent for _, parent, _ in going_on]

    def _relevant(self, candidates: Iterable[tuple[int, float]], banned: frozenset[int]) -> Iterator[tuple[int, float]]:
        """One beam's `width` best that may go on, and those before them that end and may be among the best of all."""
        width = self.search.width
        num_relevant = num_going_on = 0
        for token_id, logprob in candidates:
            if token_id in banned:
                continue
            is_stop = token_id in self._stop_token_ids
            if not is_stop or num_relevant < width:
                yield token_id, logprob
            num_relevant += 1
            num_going_on += not is_stop
            if num_going_on == width:
                return

    def _ends(self, token_id: int, num_tokens: int) -> bool:
        return num_tokens >= self._max_generated or token_id in self._stop_token_ids

    def _finish(self, entries: list[tuple[float, int, int]], num_tokens: int) -> None:
        self.hypotheses += [
            Hypothesis((*self.beams[parent].token_ids, token_id), self._score(logprob, num_tokens))
            for logprob, parent, token_id in entries
        ]
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equal ones the earlier first
        del self.hypotheses[self.search.width :]

    def _may_improve(self, best_logprob: float, num_tokens: int) -> bool:
        if len(self.hypotheses) < self.search.width:
            return True
        return not self.search.early_stopping and self._score(best_logprob, num_tokens) > self.hypotheses[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / math.pow(num_tokens, self.search.length_penalty)

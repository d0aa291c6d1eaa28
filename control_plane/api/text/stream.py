"""One sequence's way from token ids to deliverable text: detokeniser, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.api.text.detokenizer import Detokenizer
from control_plane.api.text.stop_strings import StopMatcher, StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens became."""

    num_tokens: int  # how many were taken; fewer than given where a stop string ended the sequence
    text: str  # deliverable text
    stop_string: str | None = None  # the stop string that ended the sequence


class TextStream:
    """Takes tokens in order; `detokenizer` is None where the checkpoint has no tokenizer: then text is empty.

    Stop strings are looked for in the text after the first `min_tokens` tokens. `includes_stop`: what is found is
    delivered too.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: StopStrings,
        min_tokens: int = 0,
        *,
        includes_stop: bool = False,
    ) -> None:
        self.includes_stop = includes_stop
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._num_unsearched = min_tokens  # tokens to come whose text is not looked at
        self._is_searching = min_tokens == 0

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Text of more tokens; stops at the token that completes a stop string."""
        if self._detokenizer is None:
            return Piece(len(token_ids), "")
        pieces = []
        for position, token_id in enumerate(token_ids):
            if not self._is_searching:
                self._is_searching = self._num_unsearched == 0
                if not self._is_searching:
                    self._num_unsearched -= 1
                    pieces.append(self._detokenizer.push(token_id))
                    continue
            pieces.append(self._matcher.push(self._detokenizer.push(token_id)))
            if self._matcher.matched is not None:
                return Piece(position + 1, "".join(pieces) + self._found(), self._matcher.matched)
        return Piece(len(token_ids), "".join(pieces))

    def finish(self) -> Piece:
        """What was held back, at the end of the sequence."""
        if self._detokenizer is None:
            return Piece(0, "")
        if not self._is_searching:
            return Piece(0, self._detokenizer.finish())
        text = self._matcher.push(self._detokenizer.finish())
        if self._matcher.matched is not None:
            return Piece(0, text + self._found(), self._matcher.matched)
        return Piece(0, text + self._matcher.finish())

    def _found(self) -> str:
        """The stop string, where it is delivered."""
        return (self._matcher.matched or "") if self.includes_stop else ""

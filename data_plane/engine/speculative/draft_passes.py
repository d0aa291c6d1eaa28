"""The passes that verify drafts: every token of the rows and of their drafts is computed as a decode step would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from data_plane.constraints.masks import Masks
from data_plane.constraints.rows import ConstraintRows
from data_plane.engine.batch import Drafts, PassOutput
from data_plane.engine.rows import BoolArray, Int64Array, Rows
from data_plane.engine.sampling.draws import Draws
from data_plane.engine.sampling.results import ResultCopies
from data_plane.plan import Int32Array
from kernels.devices import upload, upload_all


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """A token for each position of a pass."""

    on_device: torch.Tensor  # int64 [n]
    token_ids: Int32Array  # [n] the same
    is_finite: BoolArray  # [n]: whether all of its logits were


@dataclass(frozen=True, slots=True)
class DraftPasses:
    """Parts of an engine. Belongs to the compute thread."""

    rows: Rows
    draws: Draws
    copies: ResultCopies
    constraints: ConstraintRows
    last_tokens: torch.Tensor  # int64 [max_rows] on the device: what each row feeds next
    # Computes the logits [n, vocab] of the rows' next tokens and of their drafts. May change the rows' computed tokens.
    logits: Callable[[Int64Array, Drafts], torch.Tensor]
    # Draws the next token of rows, and keeps it.
    sample: Callable[[Int64Array, torch.Tensor, Masks | None], PassOutput]

    def are_free(self, rows: Int64Array) -> BoolArray:
        """bool [n]: whether the token of a position depends on its logits alone, not on the tokens before it. So it is
        without penalties and constraints. Rows that return log-probabilities are not free, either."""
        return self.draws.are_free(rows) & ~self.constraints.has_each(rows)

    def draw(self, rows: Int64Array, ahead: Int64Array, logits: torch.Tensor, at: Int64Array) -> DrawnTokens:
        """Draw for rows [n], `ahead` [n] tokens behind their next one, from the logits at these places [n]. Waits.

        No draw has more tokens than there are rows: the largest step, beside which KV blocks are made, has room for
        these.
        """
        parts = []
        for begin in range(0, len(at), self.rows.max_rows):
            part = slice(begin, begin + self.rows.max_rows)
            own = logits if len(at[part]) == len(logits) else logits[upload(at[part], logits.device)]
            parts.append(self.draws.draw(own, rows[part], None, ahead=ahead[part]))
        tokens, finite = (torch.cat([part[index] for part in parts]) for index in range(2))
        return DrawnTokens(tokens, *self.copies.start(tokens, finite).read())

    def keep(self, drawn: DrawnTokens, rows: Int64Array, counts: Int64Array, last: Int64Array) -> None:
        """Rows [n] sampled so many tokens each [n], the last of which lie at these places [n] of what was drawn."""
        numbers, places = upload_all(self.last_tokens.device, rows, last)
        self.last_tokens[numbers] = drawn.on_device[places]
        number = self.rows.note_sampled(rows, counts)
        self.rows.note_results(number, rows, drawn.is_finite[last])

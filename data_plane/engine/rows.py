"""The rows of a worker: the state of each request between steps, as arrays, and how plans change it.

Every part of a plan is checked here before the model uses it; a plan that contradicts the rows raises PlanRefused. No
torch: values are on the host. Only the last sampled tokens are kept on the device, by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_plane.adapters.arena.scaled_columns import ScaledColumns
from data_plane.engine.row_adapters import RowAdapters
from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array, NewRow, StepPlan

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RowState:
    """A row between two steps."""

    is_used: bool
    slot: int | None  # of its adapter; None: the base model
    num_computed: int  # leading tokens whose KV is in the cache


class Rows:
    """State of all rows, by row number."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_blocks: int,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        vocab_size: int,
        scaled: ScaledColumns,
    ) -> None:
        self.max_rows = max_rows
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.num_tokens = np.full(max_rows, vocab_size)  # of the vocabulary of each row's adapter
        self.is_used = np.zeros(max_rows, dtype=np.bool_)
        self.is_paused = np.zeros(max_rows, dtype=np.bool_)
        # Invariant of used rows: num_computed <= num_known <= num_computed + 1 once the prefill has ended. A row is
        # decoding when one known token, the last one, is not computed.
        self.is_decoding = np.zeros(max_rows, dtype=np.bool_)
        self.num_known = np.zeros(max_rows, dtype=np.int64)  # tokens given or sampled
        self.num_computed = np.zeros(max_rows, dtype=np.int64)  # leading tokens whose KV is in the cache
        # Leading tokens whose KV was in the cache when the row began.
        self.num_given = np.zeros(max_rows, dtype=np.int64)
        self.num_prompt = np.zeros(max_rows, dtype=np.int64)  # tokens of the prompt; the rest was generated
        self.block_table = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.num_row_blocks = np.zeros(max_rows, dtype=np.int64)
        self.slot = np.full(max_rows, -1, dtype=np.int32)  # adapter slot, -1 for none
        self.slot_generation = np.zeros(max_rows, dtype=np.int64)
        self.is_host_fed = np.zeros(max_rows, dtype=np.bool_)  # decodes only in steps that feed it
        # The row's KV may hold values that are not finite: it is not known that its last logits were finite.
        self.maybe_non_finite = np.zeros(max_rows, dtype=np.bool_)
        self._last_sampled = np.full(max_rows, -1, dtype=np.int64)  # number of the last step in which the row sampled
        self._num_sampled = 0  # steps that sampled
        self.begun = np.zeros(max_rows, dtype=np.int64)  # how often a row with this number began
        self.token_ids: dict[int, Int32Array] = {}  # given tokens of rows whose prefill has not ended
        self.adapters = RowAdapters(max_rows, scaled)

    def clear(self) -> None:
        """Forget every row."""
        self.is_used[:] = False
        self.is_paused[:] = False
        self.is_decoding[:] = False
        self.maybe_non_finite[:] = False
        self._last_sampled[:] = -1
        self.token_ids.clear()
        self.adapters.clear()

    def inspect(self, row: int) -> RowState:
        """What is known of a row."""
        slot = int(self.slot[row])
        return RowState(bool(self.is_used[row]), slot if slot >= 0 else None, int(self.num_computed[row]))

    def own_blocks_of(self, row: int) -> Int32Array:
        """The row's blocks that the row itself fills, copies of other rows' blocks included."""
        return self.block_table[row, self.num_given[row] // self.block_size : self.num_row_blocks[row]]

    def free(self, rows: Int32Array) -> None:
        """End rows."""
        self._check_rows("freed_rows", rows)
        for row in rows.tolist():
            if not self.is_used[row]:
                raise PlanRefused(f"freed_rows names row {row}, which is not used")
            self.is_used[row] = self.is_paused[row] = self.is_decoding[row] = self.maybe_non_finite[row] = False
            self._last_sampled[row] = -1
            self.token_ids.pop(row, None)
        self.adapters.free(rows)

    def add(self, new: NewRow, vocab_size: int | None = None) -> None:
        """Begin a row. `vocab_size` is that of its adapter; None: the model's."""
        vocab_size = self.vocab_size if vocab_size is None else vocab_size
        row, num_tokens, num_row_blocks = new.row, len(new.token_ids), len(new.block_ids)
        if not 0 <= row < self.max_rows:
            raise PlanRefused(f"new row {row} is not one of the {self.max_rows} rows")
        if self.is_used[row]:
            raise PlanRefused(f"new row {row} is used already")
        if num_row_blocks > self.block_table.shape[1]:
            raise PlanRefused(f"new row {row} has {num_row_blocks} blocks, at most {self.block_table.shape[1]} fit")
        if not 0 <= new.num_computed_tokens < num_tokens:
            raise PlanRefused(
                f"new row {row} has {new.num_computed_tokens} of {num_tokens} tokens computed; "
                "at least one is left to compute"
            )
        if not 0 < new.num_prompt_tokens <= num_tokens:
            raise PlanRefused(f"new row {row} has {num_tokens} tokens, {new.num_prompt_tokens} of them the prompt")
        if new.num_computed_tokens > num_row_blocks * self.block_size:
            raise PlanRefused(f"new row {row} has {new.num_computed_tokens} tokens computed in {num_row_blocks} blocks")
        if new.token_ids.min() < 0 or new.token_ids.max() >= vocab_size:
            raise PlanRefused(f"new row {row} has a token id outside [0, {vocab_size})")
        self._check_blocks(f"new row {row}", new.block_ids)
        self.adapters.add(new)
        self.begun[row] += 1
        self.is_used[row] = self.maybe_non_finite[row] = True
        self.is_paused[row] = self.is_decoding[row] = False
        self.num_known[row] = num_tokens
        self.num_computed[row] = self.num_given[row] = new.num_computed_tokens
        self.num_prompt[row] = new.num_prompt_tokens
        self.block_table[row, :num_row_blocks] = new.block_ids
        self.num_row_blocks[row] = num_row_blocks
        self.slot[row] = -1 if new.slot is None else new.slot
        self.slot_generation[row] = new.slot_generation
        self.num_tokens[row] = vocab_size
        self.is_host_fed[row] = new.is_host_fed
        self.token_ids[row] = new.token_ids

    def append_blocks(self, pairs: Int32Array) -> None:
        """Append (row, block id) pairs to the tables."""
        self._check_used("appended_blocks", pairs[:, 0])
        self._check_blocks("appended_blocks", pairs[:, 1])
        for row, block_id in pairs.tolist():
            end = self.num_row_blocks[row]
            if end == self.block_table.shape[1]:
                raise PlanRefused(f"appended_blocks gives row {row} more than the {end} blocks that a context takes")
            self.block_table[row, end] = block_id
            self.num_row_blocks[row] = end + 1

    def pause(self, plan: StepPlan) -> None:
        """Apply paused_rows, then resumed_rows."""
        for name, rows, is_paused in (
            ("paused_rows", plan.paused_rows, True),
            ("resumed_rows", plan.resumed_rows, False),
        ):
            self._check_used(name, rows)
            if (self.is_paused[rows] == is_paused).any():
                row = int(rows[self.is_paused[rows] == is_paused][0])
                raise PlanRefused(f"{name} names row {row}, which is {'paused' if is_paused else 'not paused'} already")
            self.is_paused[rows] = is_paused

    def note_sampled(self, rows: Int64Array, counts: Int64Array | int = 1) -> int:
        """These rows sampled so many tokens each, the last of which they feed next. The number of the step, for
        `note_results`."""
        self._num_sampled += 1
        self.num_known[rows] += counts
        self.is_decoding[rows] = True
        self.maybe_non_finite[rows] = True
        self._last_sampled[rows] = self._num_sampled
        self.forget_given(rows)
        return self._num_sampled

    def note_results(self, number: int, rows: Int64Array, is_finite: BoolArray) -> None:
        """The results of a step with this number came; is_finite [n]: whether the logits of these rows were finite.

        Rows that ended meanwhile, or sampled in a later step, are left alone.
        """
        is_last = self._last_sampled[rows] == number
        self.maybe_non_finite[rows[is_last]] = ~is_finite[is_last]

    def sit_out(self, rows: Int64Array) -> None:
        """These rows computed and did not sample: they feed their last token again."""
        self.num_computed[rows] -= 1
        self.is_decoding[rows] = True
        self.maybe_non_finite[rows] = True
        self.forget_given(rows)

    def forget_given(self, rows: Int64Array) -> None:
        """Drop the given tokens of rows whose prefill has ended."""
        if self.token_ids:
            for row in rows.tolist():
                self.token_ids.pop(row, None)

    def decoding(self, fed: Int32Array) -> Int64Array:
        """Rows that decode in a step that feeds these rows, ascending."""
        decodes = self.is_decoding & ~self.is_paused & ~self.is_host_fed
        decodes[fed] = True
        return np.flatnonzero(decodes)

    def check_fed(self, pairs: Int32Array) -> None:
        """Refuse fed tokens of rows that are not waiting for one."""
        rows, tokens = pairs[:, 0], pairs[:, 1]
        self._check_used("fed_tokens", rows)
        if len(np.unique(rows)) != len(rows):
            raise PlanRefused("fed_tokens names one row twice")
        is_waiting = self.is_host_fed[rows] & self.is_decoding[rows] & ~self.is_paused[rows]
        if not is_waiting.all():
            row = int(rows[~is_waiting][0])
            raise PlanRefused(f"fed_tokens names row {row}, which is not a host-fed row past its prefill")
        is_unknown = (tokens < 0) | (tokens >= self.num_tokens[rows])
        if is_unknown.any():
            highest = int(self.num_tokens[rows[is_unknown.argmax()]])
            raise PlanRefused(f"fed_tokens has a token id outside [0, {highest})")

    def check_swaps(self, swap_outs: Int32Array, swap_ins: Int32Array) -> None:
        """Refuse swaps out of range or onto one block twice."""
        for name, blocks, host_blocks, destinations in (
            ("swap_outs", swap_outs[:, 0], swap_outs[:, 1], swap_outs[:, 1]),
            ("swap_ins", swap_ins[:, 1], swap_ins[:, 0], swap_ins[:, 1]),
        ):
            self._check_blocks(name, blocks)
            if len(host_blocks) and (host_blocks.min() < 0 or host_blocks.max() >= self.num_host_blocks):
                raise PlanRefused(f"{name} names a host block outside [0, {self.num_host_blocks})")
            if len(np.unique(destinations)) != len(destinations):
                raise PlanRefused(f"{name} writes one block twice")

    def check_copies(self, copies: Int32Array) -> None:
        """Refuse block copies out of range or onto one block twice."""
        self._check_blocks("block_copies", copies.reshape(-1))
        if len(np.unique(copies[:, 1])) != len(copies):
            raise PlanRefused("block_copies writes one block twice")

    def check_prefills(self, prefills: Int32Array) -> None:
        """Refuse prefills of unknown tokens."""
        rows, counts = prefills[:, 0], prefills[:, 1]
        self._check_used("prefills", rows)
        if len(np.unique(rows)) != len(rows):
            raise PlanRefused("prefills names one row twice")
        left = self.num_known[rows] - self.num_computed[rows]
        wrong = (counts < 1) | (counts > left) | self.is_decoding[rows]
        if wrong.any():
            index = int(wrong.argmax())
            row = rows[index]
            raise PlanRefused(
                f"prefills gives row {row} {counts[index]} tokens; {left[index]} of its known tokens are not computed"
                f"{' and it is decoding' if self.is_decoding[row] else ''}"
            )

    def _check_rows(self, name: str, rows: Int32Array) -> None:
        if len(rows) and (rows.min() < 0 or rows.max() >= self.max_rows):
            raise PlanRefused(f"{name} names a row outside [0, {self.max_rows})")

    def _check_used(self, name: str, rows: Int32Array) -> None:
        self._check_rows(name, rows)
        if not self.is_used[rows].all():
            raise PlanRefused(f"{name} names row {int(rows[~self.is_used[rows]][0])}, which is not used")

    def _check_blocks(self, name: str, block_ids: Int32Array) -> None:
        if len(block_ids) and (block_ids.min() < 0 or block_ids.max() >= self.num_blocks):
            raise PlanRefused(f"{name} names a block outside [0, {self.num_blocks})")

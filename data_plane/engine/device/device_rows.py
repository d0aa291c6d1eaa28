"""The rows' state on the device, for steps in which every row feeds one token.

`Rows` on the host owns the state. Of the rows of a step, what the device does not have yet goes there in one upload.
A step advances both copies by the same rule, so that a steady step uploads appended blocks alone.
"""

from __future__ import annotations

import numpy as np
import torch

from data_plane.engine.rows import Int64Array, Rows
from data_plane.plan import Int32Array
from kernels.devices import upload, upload_all
from kernels.row_state import DecodeInputs, DraftTokens, RowState, decode_inputs, store_differences, store_tokens


class DeviceRows:
    """State by row number. Belongs to the compute thread."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        max_rows, max_blocks = rows.block_table.shape
        width = _padded(max_blocks)  # Triton compiles a kernel anew for rows that are not at multiples of 16 bytes
        # One tensor, so that one scatter brings every kind of change.
        places = _padded(max_rows)
        self._whole = torch.zeros(3 * places + max_rows * width, dtype=torch.int32, device=device)
        self._prompt_at, self._slots_at, self._tables_at, self._width = places, 2 * places, 3 * places, width
        self.state = RowState(
            torch.zeros(max_rows, dtype=torch.int64, device=device),
            self._whole[:max_rows],
            self._whole[self._prompt_at : self._prompt_at + max_rows],
            self._whole[self._slots_at : self._slots_at + max_rows],
            self._whole[self._tables_at :].view(max_rows, width),
        )
        # What the device has of each row: of which row by this number, its computed tokens, its slot and its blocks.
        self._begun = np.full(max_rows, -1, dtype=np.int64)
        self._num_computed = np.zeros(max_rows, dtype=np.int64)
        self._slots = np.zeros(max_rows, dtype=np.int32)
        self._num_blocks = np.zeros(max_rows, dtype=np.int64)
        self._no_drafts = [torch.full((max_rows,), -1, dtype=torch.int32, device=device) for _ in range(2)]
        self._row_ids: tuple[bytes, torch.Tensor] = (b"", torch.zeros(0, dtype=torch.int32, device=device))

    @property
    def last_tokens(self) -> torch.Tensor:
        """int64 [max_rows]: what each row feeds next."""
        return self.state.last_tokens

    @property
    def block_size(self) -> int:
        return self._rows.block_size

    def begin_step(self, decoding: Int64Array, slots: Int32Array) -> tuple[torch.Tensor, DecodeInputs]:
        """The rows, int32 [n] on the device, and what a step of them reads, which advances the device's copy.

        `slots` int32 [n] are those of their tokens, -1 for no adapter.
        """
        row_ids = self.advance(decoding, slots)
        drafts = DraftTokens(*(none[: len(row_ids)] for none in self._no_drafts))
        return row_ids, decode_inputs(self.state, row_ids, self.block_size, drafts)

    def advance(self, decoding: Int64Array, slots: Int32Array) -> torch.Tensor:
        """The rows, int32 [n] on the device, the same tensor while they are the same. What the device lacks of them is
        there then; the caller queues `decode_inputs` for them, which advances the device's copy."""
        row_ids = self._update(decoding, slots)
        self._num_computed[decoding] += 1
        return row_ids

    def with_drafts(
        self, token_rows: Int64Array, ahead: Int64Array, token_ids: Int64Array, slots: Int32Array
    ) -> tuple[torch.Tensor, DraftTokens]:
        """The row of each token of a pass with drafts, int32 [n] on the device, and the drafts, for `decode_inputs`.

        Of each token [n]: its row, how many tokens of the row come before it, its id where it is a draft, and the slot
        of its adapter. What the device lacks of the rows is there then. Its copy is not advanced.
        """
        is_first = ahead == 0
        places, values = self._differences(token_rows[is_first], slots[is_first])
        arrays = token_rows, ahead, token_ids, np.concatenate([places, values])
        row_ids, *drafts, differences = upload_all(self._device, *(array.astype(np.int32) for array in arrays))
        if len(places):
            store_differences(self._whole, differences)
        return row_ids, DraftTokens(*drafts)

    def tables_of(self, step_rows: Int64Array) -> torch.Tensor:
        """The block tables by row number, int32 [max_rows, blocks] on the device, with all blocks of these rows."""
        places, values = self._differences(step_rows)
        if len(places):
            store_differences(self._whole, upload(np.concatenate([places, values]).astype(np.int32), self._device))
        return self.state.block_tables

    def end_step(self, row_ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """These rows, int32 [n], feed these tokens next, int64 [n]; both on the device."""
        store_tokens(self.state.last_tokens, row_ids, tokens)

    def clear(self) -> None:
        """Every row was forgotten."""
        self._begun[:] = -1

    def _update(self, decoding: Int64Array, slots: Int32Array) -> torch.Tensor:
        """Bring the device up to date for these rows. Their numbers on the device."""
        places, values = self._differences(decoding, slots)
        key = decoding.tobytes()
        is_other = self._row_ids[0] != key
        if not is_other and len(places) == 0:
            return self._row_ids[1]
        row_ids = decoding if is_other else decoding[:0]
        at = _padded(len(row_ids))
        packed = np.zeros(at + 2 * len(places), dtype=np.int32)
        packed[: len(row_ids)] = row_ids
        packed[at : at + len(places)] = places
        packed[at + len(places) :] = values
        there = upload(packed, self._device)
        if len(places):
            store_differences(self._whole, there[at:])
        if is_other:
            self._row_ids = (key, there[: len(row_ids)])
        return self._row_ids[1]

    def _differences(self, decoding: Int64Array, slots: Int32Array | None = None) -> tuple[Int64Array, Int64Array]:
        """Places in the whole, and their values, that the device does not have of these rows. `slots`: of their tokens;
        None: this step does not read them."""
        rows = self._rows
        is_new = self._begun[decoding] != rows.begun[decoding]
        computed = rows.num_computed[decoding]
        moved = decoding[is_new | (self._num_computed[decoding] != computed)]
        new = decoding[is_new]
        first = np.where(is_new, 0, self._num_blocks[decoding])
        counts = rows.num_row_blocks[decoding] - first
        owners = np.repeat(decoding, counts)
        columns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        self._begun[new] = rows.begun[new]
        self._num_computed[decoding] = computed
        self._num_blocks[decoding] = rows.num_row_blocks[decoding]
        places = [moved, self._prompt_at + new, self._tables_at + owners * self._width + columns]
        values = [rows.num_computed[moved], rows.num_prompt[new], rows.block_table[owners, columns].astype(np.int64)]
        if slots is not None:
            is_other = self._slots[decoding] != slots
            self._slots[decoding] = slots
            places.append(self._slots_at + decoding[is_other])
            values.append(slots[is_other].astype(np.int64))
        return np.concatenate(places), np.concatenate(values)


def _padded(count: int) -> int:
    """Elements of int32 that end at a multiple of 16 bytes."""
    return -(-count // 4) * 4

"""Steps in which every row feeds one token and samples: built from the rows' state on the device, or replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.adapters.step.further_columns import FurtherColumns
from data_plane.adapters.step.lora_step import LoraStep
from data_plane.adapters.step.row_step import RowStep
from data_plane.engine.batch import Drafts, check_distinct, check_room
from data_plane.engine.device.device_rows import DeviceRows
from data_plane.engine.device.step_graphs import GraphKey, Recorder, StepGraphs
from data_plane.engine.rows import Int64Array, Rows
from data_plane.models.loader import LoadedModel
from data_plane.plan import Int32Array
from kernels.buckets import bucket
from kernels.paged_attention import RowBatch
from kernels.row_state import DecodeInputs, decode_inputs


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a step leaves on the device, for its n rows in order."""

    logits: torch.Tensor  # [n, vocab], valid until the next step
    row_ids: torch.Tensor  # int32 [n]
    completion_index: torch.Tensor  # int64 [n]: index in its completion of the token that a row samples


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """What the adapters of a step add (see StepContext)."""

    lora: LoraStep | None = None
    head_lora: LoraStep | None = None
    rows: RowStep | None = None
    head_rows: RowStep | None = None


class DecodeSteps:
    """The decode steps of one engine. Belongs to the compute thread."""

    def __init__(
        self,
        rows: Rows,
        device_rows: DeviceRows,
        model: LoadedModel,
        steps: AdapterSteps,
        prepare: Callable[[Int64Array, Int64Array], None],
    ) -> None:
        """`prepare` is called before each step with its rows and the blocks that it writes; it raises where an adapter
        is not ready."""
        self._rows = rows
        self._device_rows = device_rows
        self._model = model
        self._steps = steps
        self._prepare = prepare
        self._every_token = torch.arange(rows.max_rows, device=device_rows.last_tokens.device)
        self._longest = rows.block_table.shape[1] * rows.block_size
        self._graphs: StepGraphs | None = None

    @property
    def graphs(self) -> StepGraphs | None:
        """None before `record`."""
        return self._graphs

    def record(self, recorder: Recorder, sizes: Sequence[int], *, has_adapters: bool) -> None:
        """Record graphs for steps of up to each of these `sizes`, in rows. The engine has no rows."""
        graphs = StepGraphs(self._device_rows, self._steps, self._recorded_forward, recorder, sizes)
        graphs.record_all(has_adapters=has_adapters)
        self._graphs = graphs

    def run(self, decoding: Int64Array, drafts: Drafts | None = None) -> Decoded:
        """Queue the step of these rows, at least one, up to its logits. Raises PlanRefused where a row lacks blocks, or
        two tokens have one KV position.

        With `drafts` each draft is a token of the step, behind its row's own. Then the rows' computed tokens stay as
        they are.
        """
        rows = self._rows
        ahead = np.zeros(len(decoding), dtype=np.int64) if drafts is None else drafts.ahead
        token_rows = decoding if drafts is None else np.repeat(decoding, drafts.counts + 1)
        positions = rows.num_computed[token_rows] + ahead
        check_room(rows, token_rows, positions + 1)
        index, offset = np.divmod(positions, rows.block_size)
        blocks = rows.block_table[token_rows, index].astype(np.int64)
        check_distinct(blocks * rows.block_size + offset)
        self._prepare(decoding, blocks)
        token_slots, further = rows.adapters.of_tokens(token_rows, positions)
        key = None
        if self._graphs is not None and further is None:
            # Passes with drafts have many sizes, each of which would hold up the requests.
            key = self._graphs.find(len(token_rows), token_slots, may_record=drafts is None)
        if drafts is not None:
            return self._run_drafts(token_rows, drafts, key, token_slots, further, int(positions.max()) + 1)
        if key is not None and self._graphs is not None:
            logits, completion_index, row_ids = self._graphs.run(key, decoding, token_slots)
        else:
            adapters = self._adapters(token_slots, further)
            row_ids, inputs = self._device_rows.begin_step(decoding, token_slots)
            logits = self._forward(row_ids, inputs, adapters, self._bounded(int(positions.max()) + 1))
            completion_index = inputs.completion_index
        rows.num_computed[decoding] += 1
        return Decoded(logits, row_ids, completion_index)

    def _run_drafts(
        self,
        token_rows: Int64Array,
        drafts: Drafts,
        key: GraphKey | None,
        token_slots: Int32Array,
        further: FurtherColumns | None,
        longest: int,
    ) -> Decoded:
        row_ids, there = self._device_rows.with_drafts(token_rows, drafts.ahead, drafts.pass_ids, token_slots)
        if key is not None and self._graphs is not None:
            logits, completion_index = self._graphs.run_drafts(key, row_ids, there)
        else:
            inputs = decode_inputs(self._device_rows.state, row_ids, self._device_rows.block_size, there)
            logits = self._forward(row_ids, inputs, self._adapters(token_slots, further), self._bounded(longest))
            completion_index = inputs.completion_index
        return Decoded(logits, row_ids, completion_index)

    def _bounded(self, longest: int) -> int:
        """What no length of a step exceeds, in few different numbers."""
        return min(bucket(longest), self._longest)

    def _adapters(self, token_slots: Int32Array, further: FurtherColumns | None) -> StepAdapters:
        every = token_slots if further is None else np.concatenate([token_slots, *further.every])
        slots = np.unique(every[every >= 0]).tolist()
        if not slots:
            return StepAdapters()
        steps, of_tokens = self._steps, torch.from_numpy(token_slots)
        lora = steps.begin(of_tokens, slots, further)
        replaced = steps.begin_rows(of_tokens)
        # The head sees every token of the step.
        head = steps.begin_head(of_tokens, further) if lora is not None else None
        return StepAdapters(lora, head, replaced, replaced)

    def _recorded_forward(self, row_ids: torch.Tensor, inputs: DecodeInputs, lora: LoraStep | None) -> torch.Tensor:
        return self._forward(row_ids, inputs, StepAdapters(lora), self._longest)

    def _forward(
        self, row_ids: torch.Tensor, inputs: DecodeInputs, adapters: StepAdapters, max_context_len: int
    ) -> torch.Tensor:
        """Logits [n, vocab]; the KV of each row's token is written."""
        batch = RowBatch(self._device_rows.state.block_tables, row_ids, inputs.context_lens, max_context_len)
        context = self._model.context
        context.begin(batch, inputs.kv_positions, adapters.lora, adapters.head_lora, adapters.rows, adapters.head_rows)
        try:
            every = self._every_token[: len(row_ids)]
            if len(every) < len(row_ids):  # drafts are more tokens than there are rows
                every = torch.arange(len(row_ids), device=row_ids.device)
            return self._model.logits(inputs.input_ids, inputs.positions, every)
        finally:
            context.end()

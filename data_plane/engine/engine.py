"""The real engine (data_plane.plan.Engine): rows, one packed forward pass per step, sampling. One thread."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from data_plane.adapters.arena import AdapterArena
from data_plane.engine.batch import StepBatch, build_batch
from data_plane.engine.kv_cache import KVCache
from data_plane.engine.rows import Rows
from data_plane.errors import PlanRefused
from data_plane.models.loader import LoadedModel
from data_plane.plan import AdapterSlots, Capacities, Int32Array, StepOutput, StepPlan
from kernels.sampling import sample

logger = logging.getLogger(__name__)


class TorchEngine:
    """Executes step plans on a loaded model. Keeps rows, KV and the last sampled tokens; decides nothing."""

    def __init__(self, model: LoadedModel, cache: KVCache, arena: AdapterArena, capacities: Capacities) -> None:
        self.capacities = capacities
        self.slots: AdapterSlots = arena
        self._model = model
        self._cache = cache
        self._arena = arena
        self._rows = Rows(
            max_rows=capacities.max_rows,
            max_blocks=-(-capacities.max_model_len // capacities.block_size),
            num_blocks=capacities.num_blocks,
            block_size=capacities.block_size,
            vocab_size=capacities.vocab_size,
        )
        device = cache.keys[0].device
        self._last_tokens = torch.zeros(capacities.max_rows, dtype=torch.int64, device=device)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Apply the plan, compute, sample (see Engine)."""
        started = time.perf_counter()
        self._apply(plan)
        batch = build_batch(
            self._rows, plan.prefills, self._last_tokens, max_step_tokens=self.capacities.max_step_tokens
        )
        if batch is None:
            rows = tokens = failed = np.zeros(0, dtype=np.int32)
        else:
            with torch.inference_mode():
                rows, tokens, failed = self._compute(batch)
        step_time_us = int((time.perf_counter() - started) * 1e6)
        return StepOutput(plan.step_id, rows, tokens, failed, step_time_us)

    def reset(self) -> None:
        """Forget all rows, slots and KV. Raises where the device is lost: such a worker must not attach again."""
        if self._last_tokens.is_cuda:
            torch.cuda.synchronize()
        self._clean(np.flatnonzero(self._rows.is_used & self._rows.is_suspect).astype(np.int32))
        self._rows.clear()
        self._arena.clear()

    def _apply(self, plan: StepPlan) -> None:
        """The plan's differences, in the order of plan.proto."""
        rows = self._rows
        freed = plan.freed_rows
        in_range = freed[(freed >= 0) & (freed < rows.max_rows)]
        self._clean(in_range[rows.is_used[in_range] & rows.is_suspect[in_range]])
        rows.free(freed)
        for new in plan.new_rows:
            if new.slot is not None:
                if not 0 <= new.slot < self.capacities.num_slots:
                    raise PlanRefused(f"new row {new.row} names slot {new.slot} of {self.capacities.num_slots}")
                self._arena.check(new.slot, new.slot_generation)
            rows.add(new)
        rows.append_blocks(plan.appended_blocks)
        rows.pause(plan)
        rows.check_copies(plan.block_copies)
        rows.check_prefills(plan.prefills)
        self._cache.copy_blocks(plan.block_copies)

    def _compute(self, batch: StepBatch) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Forward pass and sampling; advances the rows. Returns rows, tokens and failed rows."""
        rows = self._rows
        for slot, generation in set(
            zip(rows.slot[batch.rows].tolist(), rows.slot_generation[batch.rows].tolist(), strict=True)
        ):
            if slot >= 0:
                self._arena.check(slot, generation)
        lora = self._arena.begin_step(batch.token_slots, batch.slots) if batch.slots else None
        context = self._model.context
        context.begin(batch.attention, batch.slot_mapping, lora)
        try:
            logits = self._model.logits(batch.input_ids, batch.position_ids, batch.sampled_at)
        finally:
            context.end()
        rows.num_computed[batch.rows] += batch.num_tokens
        sampled = batch.sampled_rows
        if len(sampled) == 0:
            empty = np.zeros(0, dtype=np.int32)
            return empty, empty, empty
        finite = torch.isfinite(logits).all(dim=-1)
        is_finite = finite.cpu().numpy()
        if not is_finite.all():
            # Both ends count a token for a failed row, so that they agree on what decodes; it is never told.
            logits = logits.masked_fill(~finite.unsqueeze(1), 0.0)
        tokens = sample(logits, batch.sampling)
        self._last_tokens[torch.from_numpy(sampled).to(tokens.device)] = tokens
        rows.num_known[sampled] += 1
        rows.is_decoding[sampled] = True
        rows.is_suspect[sampled] = ~is_finite
        for row in sampled.tolist():
            rows.token_ids.pop(row, None)
        on_host = tokens.cpu().numpy().astype(np.int32)
        numbers = sampled.astype(np.int32)
        return numbers[is_finite], on_host[is_finite], numbers[~is_finite]

    def _clean(self, suspects: Int32Array) -> None:
        """Make the KV of rows that end finite where it may not be."""
        for row in suspects.tolist():
            self._cache.make_finite(self._rows.blocks_of(row))

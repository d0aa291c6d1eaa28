"""The real engine (data_plane.plan.Engine): rows, one packed forward pass per step, sampling. One thread.

A step returns as soon as its work is queued on the device. It waits for its own results only where a later step needs
them on the host: in a pass that verifies drafts, and for rows with a constraint, log-probabilities or a vector. A step
whose rows all decode one token is computed from their state on the device where that is a GPU, waiting or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from data_plane.adapters.arena.adapter_arena import AdapterArena
from data_plane.adapters.arena.scaled_columns import ScaledColumns
from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.adapters.step.side_stream import SideStream
from data_plane.constraints.lanes import Lanes
from data_plane.constraints.masks import Masks
from data_plane.constraints.rows import ConstraintRows
from data_plane.engine.batch import Drafts, PassOutput, StepBatch, build_batch, split_prefills
from data_plane.engine.device.decode_steps import DecodeSteps
from data_plane.engine.device.device_rows import DeviceRows
from data_plane.engine.fresh_blocks import FreshBlocks
from data_plane.engine.host_blocks import HostBlocks
from data_plane.engine.kv_cache import KVCache
from data_plane.engine.pooling import Pooler, with_pooled
from data_plane.engine.rows import Int64Array, Rows, RowState
from data_plane.engine.sampling.draws import Draws
from data_plane.engine.sampling.logprobs import joined
from data_plane.engine.sampling.results import ResultCopies, ResultCopy, result_copies
from data_plane.engine.sampling.sampler import Sampler, SamplerStats
from data_plane.engine.speculative.draft_passes import DraftPasses
from data_plane.engine.speculative.pass_costs import PassCosts
from data_plane.engine.speculative.speculation import Speculation
from data_plane.engine.steps_under_way import StepsUnderWay
from data_plane.errors import PlanRefused
from data_plane.models.loader import LoadedModel
from data_plane.plan import (
    AdapterSlots,
    Capacities,
    DoneStep,
    Int32Array,
    PendingStep,
    PooledRow,
    RowLogprobs,
    StepOutput,
    StepPlan,
    Vocabulary,
    no_pairs,
)
from data_plane.spans import span
from kernels.devices import upload

# One forward pass keeps at most so many bytes of float32 logits for log-probabilities of prompts, or for drafts, beside
# those of the tokens that its rows sample.
PROMPT_LOGITS_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of an engine."""

    num_rows: int  # in use
    sampler: SamplerStats
    num_drafted: int = 0  # draft tokens verified since the start
    num_accepted: int = 0  # of these


class TorchEngine:
    """Executes step plans on a loaded model. Keeps rows, KV and the last sampled tokens; plans make all decisions."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        arena: AdapterArena,
        capacities: Capacities,
        host_blocks: HostBlocks | None = None,
        *,
        prompt_logits_bytes: int = PROMPT_LOGITS_BYTES,
        speculative: str = "off",
        lanes: Lanes | None = None,
        copies: ResultCopies | None = None,
        decodes_on_device: bool | None = None,
        side: SideStream | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`lanes`: the threads that follow constraints; None: some of its own. `copies`: how results come to the host;
        None: as the device does it. `decodes_on_device`: whether steps that only decode are built from the rows' state
        on the device; None: on a GPU. `side`: see AdapterSteps."""
        self.capacities = capacities
        self.slots: AdapterSlots = arena
        self.model = model
        self.kv_cache = cache
        self.arena = arena
        self.adapter_steps = AdapterSteps(arena, side)
        self._host_blocks = host_blocks
        self._rows = Rows(
            max_rows=capacities.max_rows,
            max_blocks=-(-capacities.longest_row // capacities.block_size),
            num_blocks=capacities.num_blocks,
            num_host_blocks=capacities.num_host_blocks,
            block_size=capacities.block_size,
            vocab_size=capacities.vocab_size,
            scaled=ScaledColumns(arena.table),
        )
        self._fresh_blocks = FreshBlocks(self._rows, cache, host_blocks)
        device = cache.keys[0].device
        self._sampler = Sampler(max_rows=capacities.max_rows, vocab_size=capacities.vocab_size, device=device)
        self._draws = Draws(self._rows, self._sampler)
        most = capacities.max_rows if speculative == "off" else capacities.max_step_tokens
        self._copies = copies or result_copies(device, most=most)
        self._clock = clock
        self._under_way = StepsUnderWay(self._rows, clock)
        self._constraints = ConstraintRows(capacities.vocab_size, lanes=lanes)
        self._pooler = Pooler(max_rows=capacities.max_rows, hidden_width=capacities.hidden_width, heads=arena)
        self._most_prompt_logits = max(prompt_logits_bytes // (4 * capacities.vocab_size), 1)
        # On a GPU decode steps are built from the rows' state on the device, so that they upload next to nothing.
        self._device_rows = DeviceRows(self._rows, device)
        self._decodes_on_device = device.type == "cuda" if decodes_on_device is None else decodes_on_device
        self.decode_steps = DecodeSteps(self._rows, self._device_rows, model, self.adapter_steps, self._prepare)
        self._last_tokens = self._device_rows.last_tokens
        self._speculation: Speculation | None = None
        if speculative != "off":
            self._speculation = Speculation(
                self._rows,
                self._constraints,
                max_step_tokens=capacities.max_step_tokens,
                most_drafts=self._most_prompt_logits,
                costs=PassCosts() if speculative == "auto" else None,
                passes=self._draft_passes(),
                clock=clock,
            )

    def execute(self, plan: StepPlan) -> StepOutput:
        """Submit the plan and wait for its results (see Engine)."""
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Apply the plan, queue the computation and the samples (see Engine)."""
        started_s = self._clock()
        self._under_way.settle()
        with span("apply the plan"):
            self._apply(plan)
        decoding = self._rows.decoding(plan.fed_tokens[:, 0])
        num_tokens, most = len(decoding) + int(plan.prefills[:, 1].sum()), self.capacities.max_step_tokens
        if num_tokens > most:
            raise PlanRefused(f"the step has {num_tokens} tokens, at most {most} are allowed")
        with torch.inference_mode():
            if self._speculation is not None and (early := self._speculation.step(plan, decoding)) is not None:
                moved, time_us = self._take_moved(), self._microseconds_since(started_s)
                return DoneStep(replace(early, step_time_us=time_us, num_moved_blocks=moved[0], move_time_us=moved[1]))
            if self._needs_results(np.concatenate([decoding, plan.prefills[:, 0]])):
                return DoneStep(self._compute(plan, decoding, started_s))
            return self._queue(plan, decoding, started_s)

    def _needs_results(self, rows: Int64Array) -> bool:
        """Whether a step of these rows needs what it samples on the host."""
        return (
            (len(self._constraints) > 0 and self._constraints.has_any(rows))
            or bool((self._sampler.num_logprobs[rows] >= 0).any())
            or bool((self._sampler.num_prompt_logprobs[rows] >= 0).any())
            or bool(self._pooler.is_pooling[rows].any())
        )

    def _queue(self, plan: StepPlan, decoding: Int64Array, started_s: float) -> PendingStep:
        """Queue a step whose rows get a token each, and nothing else. Does not wait for the device."""
        if self._decodes_on_device and len(decoding) and len(plan.prefills) == 0:
            return self._queue_decodes(plan, decoding, started_s)
        batch = self._build(decoding, plan.prefills)
        if batch is None:
            return DoneStep(self._output(plan, PassOutput(), started_s))
        with span("forward"):
            logits, _ = self._forward(batch)
        sampled = batch.sampled_rows
        with span("sample"):
            tokens, finite, _ = self._draws.draw(logits, sampled, None)
            self._last_tokens[batch.sampled_on_device] = tokens
            copy = self._copies.start(tokens, finite)
        return self._begin(plan, sampled, copy, started_s)

    def _queue_decodes(self, plan: StepPlan, decoding: Int64Array, started_s: float) -> PendingStep:
        """`_queue` for a step that only decodes, from the rows' state on the device."""
        with span("forward"):
            decoded = self.decode_steps.run(decoding)
        with span("sample"):
            tokens, finite, _ = self._draws.draw(decoded.logits, decoding, None, decoded.completion_index)
            self._device_rows.end_step(decoded.row_ids, tokens)
            copy = self._copies.start(tokens, finite)
        return self._begin(plan, decoding, copy, started_s)

    def _begin(self, plan: StepPlan, sampled: Int64Array, copy: ResultCopy, started_s: float) -> PendingStep:
        """These rows sampled a token each. The copy brings their tokens."""
        step = self._under_way.begin(plan.step_id, sampled, copy, moved=self._take_moved(), started_s=started_s)
        if self._speculation is not None:
            self._speculation.expect(step, only_decodes=len(plan.prefills) == 0)
        return step

    def _compute(self, plan: StepPlan, decoding: Int64Array, started_s: float) -> StepOutput:
        """Compute a step of any kind, and wait for its results."""
        wants_logprobs = self._sampler.num_prompt_logprobs[plan.prefills[:, 0]] >= 0
        pieces, prefills = split_prefills(plan.prefills, wants_logprobs, most=self._most_prompt_logits)
        prompt_logprobs: list[RowLogprobs] = []
        for piece in pieces:
            self._pass(decoding[:0], piece, prompt_logprobs)
        began_s = self._clock()
        only_decodes = len(decoding) > 0 and len(plan.prefills) == 0
        if only_decodes and self._decodes_on_device:
            output = self._decode_pass(decoding)
        else:
            output = self._pass(decoding, prefills, prompt_logprobs)
        if self._speculation is not None and only_decodes:
            self._speculation.observe(decoding, len(decoding), self._clock() - began_s)
        return replace(self._output(plan, output, started_s), prompt_logprobs=joined(prompt_logprobs))

    def _output(self, plan: StepPlan, output: PassOutput, started_s: float) -> StepOutput:
        moved = self._take_moved()
        return StepOutput(
            plan.step_id,
            output.rows,
            output.token_ids,
            output.failed_rows,
            self._microseconds_since(started_s),
            output.sampled_logprobs,
            num_moved_blocks=moved[0],
            move_time_us=moved[1],
            pooled=output.pooled,
            unconstrained_rows=output.unconstrained_rows,
            waiting_rows=output.waiting_rows,
        )

    def _take_moved(self) -> tuple[int, int]:
        return (0, 0) if self._host_blocks is None else self._host_blocks.take_moved()

    def _microseconds_since(self, started_s: float) -> int:
        return int((self._clock() - started_s) * 1e6)

    def read_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Read a vocabulary before rows name it (see Engine)."""
        self._constraints.read(vocabulary)

    def reset(self) -> None:
        """Forget all rows, slots and KV. Raises if the device is lost: such a worker must not attach again."""
        if self._last_tokens.is_cuda:
            torch.cuda.synchronize()
        self._under_way.clear()
        self._device_rows.clear()
        self._fresh_blocks.leave(np.arange(self.capacities.max_rows, dtype=np.int32))
        self._rows.clear()
        self._sampler.clear()
        self._pooler.clear()
        self._constraints.clear()
        if self._speculation is not None:
            self._speculation.clear()
        self.arena.clear()

    def inspect(self, row: int) -> RowState:
        """What is known of a row between two steps."""
        return self._rows.inspect(row)

    @property
    def num_scaled_columns(self) -> int:
        """Pairs of an adapter and a scale that rows use."""
        return self._rows.adapters.num_scaled_columns

    def stats(self) -> EngineStats:
        """What the rows hold at present."""
        drafts = (0, 0) if self._speculation is None else self._speculation.totals
        return EngineStats(int(self._rows.is_used.sum()), self._sampler.stats(), *drafts)

    def _apply(self, plan: StepPlan) -> None:
        """The plan's differences, in the order of plan.proto."""
        rows = self._rows
        if len(freed := plan.freed_rows):
            self._fresh_blocks.leave(freed[(freed >= 0) & (freed < rows.max_rows)])
            rows.free(freed)
            self._sampler.free(freed)
            self._pooler.free(freed)
            self._constraints.free(freed)
            if self._speculation is not None:
                self._speculation.free(freed)
        for new in plan.new_rows:
            self.arena.check_row(new)
            vocab_size = None if new.slot is None else self.arena.num_tokens(new.slot)
            rows.add(new, vocab_size)
            self._sampler.add(new, vocab_size)
            self._pooler.add(new)
            self._constraints.add(new, vocab_size)
            if self._speculation is not None:
                self._speculation.add(new)
        if len(plan.appended_blocks):
            rows.append_blocks(plan.appended_blocks)
        if len(plan.paused_rows) or len(plan.resumed_rows):
            rows.pause(plan)
        if len(plan.fed_tokens):
            rows.check_fed(plan.fed_tokens)
        if len(plan.swap_outs) or len(plan.swap_ins):
            rows.check_swaps(plan.swap_outs, plan.swap_ins)
        if len(plan.block_copies):
            rows.check_copies(plan.block_copies)
        if len(plan.prefills):
            rows.check_prefills(plan.prefills)
        if len(plan.fed_tokens):
            fed = upload(plan.fed_tokens.astype(np.int64), self._last_tokens.device)
            self._last_tokens[fed[:, 0]] = fed[:, 1]
        if self._host_blocks is not None:
            self._host_blocks.move(plan.swap_outs, plan.swap_ins)
            self._host_blocks.before_writing(plan.block_copies[:, 1].astype(np.int64))
        if len(plan.block_copies):
            self.kv_cache.copy_blocks(plan.block_copies)
        if plan.new_rows or len(plan.appended_blocks):
            self._fresh_blocks.clean(plan)

    def _pass(self, decoding: Int64Array, prefills: Int32Array, prompt_logprobs: list[RowLogprobs]) -> PassOutput:
        """One forward pass, its tokens and vectors. Appends to prompt_logprobs those of the pass's prompts."""
        batch = self._build(decoding, prefills)
        if batch is None:
            return PassOutput()
        with span("forward"):
            logits, pooled = self._forward(batch)
        num_sampled = len(batch.sampled_rows)
        with span("sample"):
            prompt_logprobs += self._draws.logprobs(logits[num_sampled:], batch.prompt_requests)
            sampled = batch.sampled_rows
            masks = self._constraints.collect(sampled, is_alone=len(batch.rows) == len(sampled))
            if masks is not None and masks.waiting:
                kept = batch.kept[upload(np.array(masks.waiting), logits.device)]
                waiting = upload(sampled[masks.waiting], logits.device)
                self._last_tokens[waiting] = batch.input_ids[kept]  # a prompt's last token is fed again
            output = self._sample_ready(sampled, logits[:num_sampled], masks)
        return output if len(batch.pooled_rows) == 0 else with_pooled(self._rows, batch, output, pooled)

    def _decode_pass(self, decoding: Int64Array) -> PassOutput:
        """`_pass` for rows that all decode, from their state on the device."""
        with span("forward"):
            decoded = self.decode_steps.run(decoding)
        with span("sample"):
            masks = self._constraints.collect(decoding, is_alone=True)
            return self._sample_ready(decoding, decoded.logits, masks, decoded.completion_index)

    def _draft_passes(self) -> DraftPasses:
        def logits_of(decoding: Int64Array, drafts: Drafts) -> torch.Tensor:
            if self._decodes_on_device:
                return self.decode_steps.run(decoding, drafts).logits
            batch = self._build(decoding, drafts=drafts)
            assert batch is not None, "a pass with drafts has no rows"
            return self._forward(batch)[0]

        parts = self._rows, self._draws, self._copies, self._constraints, self._last_tokens
        return DraftPasses(*parts, logits=logits_of, sample=self._sample)

    def _build(
        self, decoding: Int64Array, prefills: Int32Array | None = None, drafts: Drafts | None = None
    ) -> StepBatch | None:
        with span("build the batch"):
            return build_batch(
                self._rows,
                decoding,
                no_pairs() if prefills is None else prefills,
                self._last_tokens,
                num_prompt_logprobs=self._sampler.num_prompt_logprobs,
                is_pooling=self._pooler.is_pooling,
                drafts=drafts,
                device_rows=self._device_rows if self._decodes_on_device else None,
            )

    def _forward(self, batch: StepBatch) -> tuple[torch.Tensor, list[PooledRow]]:
        """Run the pass, advance the rows. Returns logits of the tokens that are kept, and vectors of pooled rows."""
        rows = self._rows
        self._prepare(batch.rows, batch.written_blocks)
        steps = self.adapter_steps
        lora = steps.begin(batch.token_slots, batch.slots, batch.further) if batch.slots else None
        head_lora = steps.begin_head(batch.kept_slots, batch.kept_further) if lora is not None else None
        replaced = steps.begin_rows(batch.token_slots) if batch.slots else None
        head_replaced = None if replaced is None else steps.begin_rows(batch.kept_slots)
        context = self.model.context
        context.begin(batch.attention, batch.kv_positions, lora, head_lora, replaced, head_replaced)
        try:
            hidden = None
            if self._pooler.num_rows and self._pooler.is_pooling[batch.rows].any():
                logits, hidden = self.model.logits_and_hidden(batch.input_ids, batch.position_ids, batch.kept)
            else:
                logits = self.model.logits(batch.input_ids, batch.position_ids, batch.kept)
        finally:
            context.end()
        rows.num_computed[batch.rows] += batch.num_tokens
        return logits, [] if hidden is None else self._pooler.take(batch, hidden)

    def _prepare(self, step_rows: Int64Array, written_blocks: Int64Array) -> None:
        """Prepare a pass of these rows that writes these blocks. Raises StaleSlot if an adapter left its slot."""
        rows = self._rows
        self.arena.check_all(rows.slot[step_rows], rows.slot_generation[step_rows])
        for member in rows.adapters.members_of(step_rows):
            self.arena.check(member.slot, member.generation)
        if self._host_blocks is not None:
            self._host_blocks.before_writing(written_blocks)

    def _sample_ready(
        self, sampled: Int64Array, logits: torch.Tensor, masks: Masks | None, index_there: torch.Tensor | None = None
    ) -> PassOutput:
        """A token for each row that samples, except for rows whose masks are not ready: they sample in a later step."""
        if masks is None or not masks.waiting:
            return self._sample(sampled, logits, masks, index_there)
        waiting = sampled[masks.waiting]
        self._rows.sit_out(waiting)
        there = upload(np.delete(np.arange(len(sampled)), masks.waiting), logits.device)
        # Less than half of the time of indexing on a CPU: 131,072 tokens of 16 rows take milliseconds there.
        ready = logits.index_select(0, there)
        index_there = None if index_there is None else index_there.index_select(0, there)
        output = self._sample(np.delete(sampled, masks.waiting), ready, masks, index_there)
        return replace(output, waiting_rows=waiting.astype(np.int32))

    def _sample(
        self, sampled: Int64Array, logits: torch.Tensor, masks: Masks | None, index_there: torch.Tensor | None = None
    ) -> PassOutput:
        """A token for each row that samples. `index_there`: see Decoded.completion_index."""
        rows = self._rows
        if len(sampled) == 0:
            return PassOutput()
        tokens, finite, returned = self._draws.draw(logits, sampled, masks, index_there)
        self._last_tokens[upload(sampled, tokens.device)] = tokens
        # Worker and control plane count a token for a row that is not finite, so that they agree on what decodes. The
        # token itself is not returned.
        number = rows.note_sampled(sampled)
        on_host, is_finite = self._copies.start(tokens, finite).read()
        if self._speculation is not None:
            self._speculation.note(sampled, on_host)
        rows.note_results(number, sampled, is_finite)
        numbers, failed = sampled.astype(np.int32), np.zeros(len(sampled), dtype=np.bool_)
        if masks is not None:
            self._constraints.advance(masks, sampled, on_host)
            failed[masks.failed] = is_finite[masks.failed]
            is_finite = is_finite & ~failed
        logprobs = self._draws.sampled_logprobs(returned, sampled, on_host, is_finite)
        return PassOutput(
            numbers[is_finite],
            on_host[is_finite],
            numbers[~is_finite],
            logprobs,
            unconstrained_rows=numbers[failed],
        )

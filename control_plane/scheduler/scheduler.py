"""The scheduler of one worker: requests and results in, plans and slot commands out.

Pure and deterministic: no I/O, and the time is an argument. The fleet calls it from one task. Each step takes decodes
first, then unfinished prefills, then waiting requests in order of arrival. Plans may be made ahead of results; whoever
leaves (ended, cancelled, preempted) keeps row, blocks and slot until the last unanswered plan that names it is
answered, so nothing that a worker may still touch is ever given away.
"""

# Every entry takes the time, whether its rules need it today or not: callers need not know.
# ruff: noqa: ARG002

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import replace
from operator import attrgetter

from control_plane.scheduler.adapter_slots import AdapterSlots
from control_plane.scheduler.block_pool import BlockPool
from control_plane.scheduler.deadlines import Deadlines
from control_plane.scheduler.errors import AdapterNeverFits, ContextNeverFits, RequestNeverFits, ResultMismatch
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.plan_draft import Flight, PlanDraft
from control_plane.scheduler.preemption import choose_paused, choose_victim
from control_plane.scheduler.prefix_cache import PrefixCache, chain_root
from control_plane.scheduler.row_pool import RowPool
from control_plane.scheduler.sequence import Sequence, SequenceState
from control_plane.scheduler.stats import SchedulerStats
from control_plane.scheduler.types import (
    FinishReason,
    NewRow,
    Request,
    RequestId,
    RequestOutput,
    ScheduledRow,
    SlotCommand,
    StepPlan,
    StepResult,
    WorkerLimits,
)
from control_plane.scheduler.waiting_queue import WaitingQueue

# Blocks that an admission leaves free while others run, as a share of the pool: their next decodes need them, and an
# admission that is preempted at once is wasted work.
WATERMARK = 0.01

_order = attrgetter("order")


class Scheduler:
    """Decides what one worker computes."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool, limits.block_size)
        self.slots = AdapterSlots(limits.num_slots, limits.arena_bytes)
        self.waiting = WaitingQueue(self.slots.is_admissible)
        self.rows = RowPool(limits.max_rows)
        self.running: list[Sequence] = []  # those that hold a row, DRAINING ones included, in order of arrival
        self.sequences: dict[RequestId, Sequence] = {}  # live requests; ended ones leave it at once
        self.flights: deque[Flight] = deque()  # unanswered plans, oldest first
        self._deadlines = Deadlines()
        self._outputs: list[RequestOutput] = []  # ends that came up where none could be returned
        self._decode_rows = [ScheduledRow(row, 1, True) for row in range(limits.max_rows)]
        self._num_draining = 0
        self._next_step_id = 1
        self._next_serial = 0
        self._watermark = max(1, round(limits.num_blocks * WATERMARK))
        self._purged: set[str] = set()  # digests whose blocks are kept out of the cache until nothing of them is left
        self._prefix_query_tokens = self._prefix_hit_tokens = 0
        self._num_preemptions = self._num_tokens_sampled = 0
        self._is_dead = False

    # ---- requests ----

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request; its adapter is asked for at once.

        Raises RequestNeverFits (or its subclasses for context and adapter) if it could not run here even alone.
        """
        assert not self._is_dead, "a request is added to a scheduler whose requests were taken away"
        assert request.request_id not in self.sequences, f"request {request.request_id} is added twice"
        sequence = self._new_sequence(request)
        self.sequences[request.request_id] = sequence
        if request.adapter is not None and request.adapter.digest in self._purged:
            self._purged.discard(request.adapter.digest)
            self.slots.unretire(request.adapter.digest)
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, request.request_id)
            if len(self._deadlines) > 64 + 2 * len(self.sequences):
                self._deadlines.keep_only(set(self.sequences))
        self._queue(sequence)

    def cancel(self, request_id: RequestId, now_s: float) -> None:
        """End a request without a word; unknown and ended ones are fine."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)
        elif self._outputs:
            self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def pause(self, request_id: RequestId) -> None:
        """Stop scheduling a request whose reader is slow. It gives way first when anything is short."""
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.is_paused:
            return
        sequence.is_paused = True
        if sequence.state is SequenceState.WAITING:
            self._unqueue(sequence)
            sequence.state = SequenceState.HELD

    def unpause(self, request_id: RequestId) -> None:
        """Schedule a paused request again."""
        sequence = self.sequences.get(request_id)
        if sequence is None or not sequence.is_paused:
            return
        sequence.is_paused = False
        if sequence.state is SequenceState.HELD:
            self._queue(sequence)

    def expire(self, now_s: float) -> list[RequestOutput]:
        """End requests whose deadline is reached, wherever they are."""
        self._end_expired(now_s)
        return self._take_outputs()

    def drain_requests(self) -> list[Request]:
        """Everything live with its accepted tokens, in order of arrival, to go on elsewhere. It is dead after this."""
        self._is_dead = True
        live = sorted(self.sequences.values(), key=_order)
        return [replace(sequence.request, generated_token_ids=tuple(sequence.generated)) for sequence in live]

    # ---- adapter slots ----

    def slot_ready(self, slot: int, generation: int) -> None:
        """The worker loaded a slot. Raises SlotReportMismatch if it was not told to."""
        self.slots.ready(slot, generation)
        self._offer_adapters()

    def slot_empty(self, slot: int, generation: int) -> None:
        """The worker emptied a slot. Raises SlotReportMismatch if it was not told to."""
        self.slots.empty(slot, generation)
        self._close_purges()

    def slot_failed(
        self, slot: int, generation: int, reason: str, *, is_retryable: bool, now_s: float
    ) -> list[RequestOutput]:
        """A load failed: tried again a few times if that may help, else the requests that wait for it end."""
        digest = self.slots.failed(slot, generation, is_retryable=is_retryable)
        if digest is not None:
            self._give_up_adapter(digest, reason)
        return self._take_outputs()

    def slot_commands(self) -> list[SlotCommand]:
        """Loads and evictions to send, each once; call it after add, plan, apply and slot reports."""
        while True:
            for digest, reason in self.slots.place():
                self._give_up_adapter(digest, reason)
            if not self.slots.is_blocked or self._num_draining > 0:
                break
            victim = choose_paused(self.running, has_adapter=True)
            if victim is None:
                break
            self._preempt(victim)
        self._offer_adapters()
        return self.slots.drain_commands()

    def pin(self, digest: str) -> None:
        """Keep an adapter in its slot, if it lies in one."""
        self.slots.set_pinned(digest, is_pinned=True)
        self._offer_adapters()

    def unpin(self, digest: str) -> None:
        """Allow the eviction of an adapter again."""
        self.slots.set_pinned(digest, is_pinned=False)
        self._offer_adapters()

    def purge_digest(self, digest: str) -> None:
        """Forget the adapter's cached blocks, cache none of its live requests', and evict its slot once unused.

        A later request with the adapter ends this.
        """
        self.cache.purge(digest)
        self.slots.retire(digest)
        self._purged.add(digest)
        self._close_purges()

    def has_digest(self, digest: str) -> bool:
        """Whether a live or leaving request, a slot or a cached block has this adapter."""
        return self._is_in_use(digest) or self.cache.has_digest(digest)

    def resident_digests(self) -> set[str]:
        """Adapters that plans may use at once."""
        return self.slots.ready_digests()

    # ---- plans and results ----

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute or enough plans are unanswered."""
        assert not self._is_dead, "a plan is asked of a scheduler whose requests were taken away"
        if len(self.flights) >= self.limits.plan_depth:
            return None
        self._end_expired(now_s)
        draft = PlanDraft(self.limits.max_step_tokens)
        is_starved = self._plan_running(draft)
        if not is_starved:
            self._admit(draft, now_s)
        if draft.is_empty:
            return None
        plan, flight = draft.finish(self._next_step_id, self.rows.tell_freed())
        self._next_step_id += 1
        self.flights.append(flight)
        return plan

    def apply(self, result: StepResult, now_s: float) -> list[RequestOutput]:
        """Take the answer to the oldest unanswered plan. Raises ResultMismatch if it is not that."""
        self._check_result(result)
        flight = self.flights.popleft()
        failed_rows = set(result.failed_rows)
        tokens = iter(result.token_ids)
        outputs = self._take_outputs()
        for sequence in flight.decodes:
            self._answer(sequence, 1, None if sequence.row in failed_rows else next(tokens), outputs)
        for sequence, num_tokens, samples in flight.prefills:
            if samples:
                self._answer(sequence, num_tokens, None if sequence.row in failed_rows else next(tokens), outputs)
            else:
                self._answer_chunk(sequence, num_tokens)
        return outputs

    # ---- numbers ----

    @property
    def num_unfinished(self) -> int:
        """Live requests."""
        return len(self.sequences)

    def stats(self) -> SchedulerStats:
        """Counts of this moment."""
        num_live_running = sum(not sequence.is_ended for sequence in self.running)
        return SchedulerStats(
            num_waiting=len(self.sequences) - num_live_running,
            num_running=len(self.running),
            num_paused=sum(sequence.is_paused for sequence in self.sequences.values()),
            num_blocks=self.pool.num_blocks,
            num_blocks_held=self.pool.num_held,
            num_blocks_cached=len(self.pool.evictable),
            num_plans_in_flight=len(self.flights),
            arena_used_bytes=self.slots.used_bytes,
            num_adapters_loaded=len(self.slots.ready_digests()),
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            num_preemptions=self._num_preemptions,
            num_tokens_sampled=self._num_tokens_sampled,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError with a sentence if any book does not balance. Looks at everything: for tests."""
        assert self._num_draining == sum(s.state is SequenceState.DRAINING for s in self.running), "draining count"
        check_scheduler(self)

    # ---- verbs: admission ----

    def _new_sequence(self, request: Request) -> Sequence:
        """A sequence for the request, or RequestNeverFits."""
        limits = self.limits
        num_prompt = len(request.prompt_token_ids)
        num_known = num_prompt + len(request.generated_token_ids)
        assert num_prompt > 0, f"request {request.request_id} has no prompt"
        assert len(request.generated_token_ids) < request.max_tokens, f"request {request.request_id} is finished"
        max_generated = min(request.max_tokens, limits.max_model_len - num_prompt)
        num_blocks = -(-max(num_known, num_prompt + max_generated - 1) // limits.block_size)
        if num_known >= limits.max_model_len:
            raise ContextNeverFits(
                num_blocks,
                limits.num_blocks,
                f"{num_known} tokens leave no room to generate in a context of {limits.max_model_len}; "
                "shorten the prompt",
            )
        if num_blocks > limits.num_blocks:
            raise RequestNeverFits(num_blocks, limits.num_blocks)
        adapter = request.adapter
        if adapter is not None and (adapter.arena_bytes > limits.arena_bytes or limits.num_slots == 0):
            raise AdapterNeverFits(
                num_blocks,
                limits.num_blocks,
                f"the adapter takes {adapter.arena_bytes} bytes, the worker's arena has {limits.arena_bytes} in "
                f"{limits.num_slots} slots; raise arena_bytes or lower the adapter's rank",
            )
        sequence = Sequence(
            request=request,
            order=(request.arrival_s, self._next_serial),
            cache_root=chain_root(None if adapter is None else adapter.digest, request.cache_salt),
            max_generated=max_generated,
            max_planned=num_prompt + max_generated - 1,
            stop_token_ids=request.stop_token_ids,
            generated=list(request.generated_token_ids),
        )
        self._next_serial += 1
        return sequence

    def _queue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        if sequence.request.adapter is not None:
            self.slots.want(sequence.request.adapter)
        self.waiting.add(sequence)

    def _unqueue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        if sequence.request.adapter is not None:
            self.slots.unwant(sequence.request.adapter.digest)

    def _offer_adapters(self) -> None:
        for digest in self.slots.drain_admissible_again():
            self.waiting.offer(digest)

    def _admit(self, draft: PlanDraft, now_s: float) -> None:
        """Start waiting requests while budget, rows and blocks last, in order of arrival.

        One whose adapter is not ready is skipped; one that lacks blocks is not, or large requests would starve.
        """
        while draft.budget > 0:
            sequence = self.waiting.peek()
            if sequence is None:
                return
            num_hits = self._fitting_hits(sequence) if self.rows.num_free else None
            if num_hits is not None:
                self._start(sequence, num_hits, draft, now_s)
                continue
            # Short of rows or blocks: who is paused gives way; what is not free at once is free after some result.
            victim = choose_paused(self.running) if self._num_draining == 0 else None
            if victim is None:
                return
            self._preempt(victim)

    def _fitting_hits(self, sequence: Sequence) -> int | None:
        """Cached blocks the sequence can start from, or None if the pool cannot give the others of its prefill."""
        size = self.limits.block_size
        num_known = sequence.num_known
        # At least one token must be computed, or there would be nothing to sample from.
        max_hits = (num_known - 1) // size
        self.cache.extend_hashes(sequence, max_hits)
        num_hits, num_unheld = self.cache.count_hits(sequence, max_hits)
        num_needed = -(-num_known // size) - num_hits
        num_spare = self.pool.num_available - num_unheld - num_needed
        return num_hits if num_spare >= (self._watermark if self.running else 0) else None

    def _start(self, sequence: Sequence, num_hits: int, draft: PlanDraft, now_s: float) -> None:
        """Give a waiting sequence a row, all blocks of its prefill and a lease, and plan its first chunk.

        All blocks at once, so that an unfinished prefill never waits for blocks and every admission gains a token.
        """
        self._unqueue(sequence)
        size = self.limits.block_size
        num_cached = num_hits * size
        token_ids = sequence.known_tokens()
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
            sequence.num_cached_tokens = min(num_cached, len(sequence.request.prompt_token_ids))
            self._prefix_query_tokens += len(token_ids)
            self._prefix_hit_tokens += num_cached
        sequence.block_ids = self.cache.take_hits(sequence, num_hits)
        sequence.block_ids += self.pool.take(-(-len(token_ids) // size) - num_hits)
        sequence.row = self.rows.take()
        sequence.decode_row = self._decode_rows[sequence.row]
        sequence.prefill_end = len(token_ids)
        sequence.num_planned = sequence.num_computed = num_cached
        sequence.num_registered = num_hits
        sequence.register_at = num_cached + size
        slot = None if sequence.request.adapter is None else self.slots.lease(sequence.request.adapter.digest)
        sequence.slot_idx = None if slot is None else slot.slot_idx
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_order)
        draft.new_rows.append(
            NewRow(
                row=sequence.row,
                request_id=sequence.request.request_id,
                token_ids=token_ids,
                num_prompt_tokens=len(sequence.request.prompt_token_ids),
                num_computed_tokens=num_cached,
                block_ids=list(sequence.block_ids),
                slot=sequence.slot_idx,
                slot_generation=0 if slot is None else slot.generation,
                sampling=sequence.request.sampling,
            )
        )
        draft.prefill(sequence)

    # ---- verbs: running ----

    def _plan_running(self, draft: PlanDraft) -> bool:
        """Plan decodes, then unfinished prefills, in order of arrival; True if one of them lacked a block or budget."""
        size = self.limits.block_size
        prefills: list[Sequence] = []
        is_starved = False
        for sequence in list(self.running):
            if sequence.is_paused or sequence.state is not SequenceState.RUNNING:
                continue
            if not sequence.is_decoding:
                prefills.append(sequence)
                continue
            position = sequence.num_planned
            if position >= sequence.max_planned:
                continue  # all its tokens are planned
            if draft.budget == 0:
                return True
            if position == len(sequence.block_ids) * size:
                block_id = self._block_for(sequence)
                if block_id is None:
                    is_starved = True
                    continue
                sequence.block_ids.append(block_id)
                draft.appended_blocks.append((sequence.row, block_id))
            sequence.num_planned = position + 1
            sequence.num_in_flight += 1
            draft.budget -= 1
            draft.decodes.append(sequence)
        for sequence in prefills:
            if draft.budget == 0:
                return True
            if sequence.state is SequenceState.RUNNING:
                draft.prefill(sequence)
        return is_starved

    def _block_for(self, sequence: Sequence) -> int | None:
        """A block for a decode, by preemption if need be, or None if it has to wait for some result."""
        while True:
            block_id = self.pool.take_one()
            # Blocks of those who are leaving come with the next results: preempt nobody for that.
            if block_id is not None or self._num_draining > 0:
                return block_id
            victim = choose_victim(self.running, sequence)
            if victim is None:
                return None
            self._preempt(victim)

    def _answer(self, sequence: Sequence, num_tokens: int, token_id: int | None, outputs: list[RequestOutput]) -> None:
        """Book the answer for a row that sampled; None: its logits were not finite."""
        sequence.num_in_flight -= 1
        if not sequence.is_ended:
            if token_id is None:
                # What it computed may not be finite either: nobody else may start from it.
                self.cache.forget(sequence.block_ids)
                outputs.append(self._output(sequence, [], FinishReason.NOT_FINITE))
                self._end(sequence)
                return
            sequence.num_computed += num_tokens
            reason = sequence.accept(token_id)
            self._num_tokens_sampled += 1
            outputs.append(
                RequestOutput(
                    sequence.request.request_id,
                    [token_id],
                    reason,
                    sequence.num_cached_tokens,
                    sequence.first_scheduled_s,
                )
            )
            if sequence.num_computed >= sequence.register_at:
                self._register(sequence)
            if reason is not None:
                self._end(sequence)
                return
        if sequence.state is SequenceState.DRAINING and sequence.num_in_flight == 0:
            self._leave(sequence)

    def _answer_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Book the answer for a prefill chunk that sampled nothing."""
        sequence.num_in_flight -= 1
        if not sequence.is_ended:
            sequence.num_computed += num_tokens
            self._register(sequence)
        if sequence.state is SequenceState.DRAINING and sequence.num_in_flight == 0:
            self._leave(sequence)

    def _register(self, sequence: Sequence) -> None:
        self.cache.register(sequence, keep=sequence.digest not in self._purged)
        sequence.register_at = (sequence.num_registered + 1) * self.limits.block_size

    def _check_result(self, result: StepResult) -> None:
        if not self.flights:
            raise ResultMismatch(f"a result for step {result.step_id} came, but no plan is unanswered")
        flight = self.flights[0]
        if result.step_id != flight.step_id:
            raise ResultMismatch(
                f"a result for step {result.step_id} came, step {flight.step_id} is the oldest unanswered"
            )
        expected = flight.sampled_rows
        if result.failed_rows:
            failed = set(result.failed_rows)
            if not failed <= set(expected):
                raise ResultMismatch(
                    f"step {result.step_id}: failed rows {sorted(failed)} are not all rows that sample"
                )
            expected = [row for row in expected if row not in failed]
        if result.rows != expected or len(result.token_ids) != len(expected):
            raise ResultMismatch(
                f"step {result.step_id}: {len(result.token_ids)} tokens for rows {result.rows}, expected are {expected}"
            )

    # ---- verbs: leaving ----

    def _preempt(self, sequence: Sequence) -> None:
        """Take the row away; the sequence waits again once its unanswered plans are answered."""
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._drain(sequence)

    def _end(self, sequence: Sequence) -> None:
        """The request is over: forget it, and give back what it holds as soon as no unanswered plan names it."""
        del self.sequences[sequence.request.request_id]
        sequence.is_ended = True
        if sequence.state is SequenceState.WAITING:
            self._unqueue(sequence)
        if sequence.state is SequenceState.RUNNING:
            self._drain(sequence)
        elif sequence.state is SequenceState.DRAINING:
            if sequence.num_in_flight == 0:
                self._leave(sequence)
        else:
            sequence.state = SequenceState.GONE
        self._close_purges()

    def _drain(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.DRAINING
        self._num_draining += 1
        if sequence.num_in_flight == 0:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Give back row, blocks and lease; whoever has not ended waits again."""
        self.running.remove(sequence)
        self._num_draining -= 1
        self.pool.release(sequence.block_ids)
        self.rows.give_back(sequence.row)
        if sequence.slot_idx is not None:
            self.slots.release(sequence.slot_idx)
        sequence.leave_row()
        if sequence.is_ended:
            sequence.state = SequenceState.GONE
        elif sequence.is_paused:
            sequence.state = SequenceState.HELD
        else:
            self._queue(sequence)
        self._close_purges()

    def _close_purges(self) -> None:
        """Forget that an adapter is being purged once nothing of it is left."""
        for digest in [digest for digest in self._purged if not self._is_in_use(digest)]:
            self._purged.discard(digest)
            self.slots.unretire(digest)

    def _is_in_use(self, digest: str) -> bool:
        return (
            self.slots.has_digest(digest)
            or any(sequence.digest == digest for sequence in self.running)
            or any(sequence.digest == digest for sequence in self.sequences.values())
        )

    def _end_expired(self, now_s: float) -> None:
        for request_id in self._deadlines.pop_due(now_s):
            sequence = self.sequences.get(request_id)
            if sequence is not None:
                self._outputs.append(self._output(sequence, [], FinishReason.DEADLINE))
                self._end(sequence)

    def _give_up_adapter(self, digest: str, reason: str) -> None:
        """End the requests that wait for an adapter which cannot be had."""
        for sequence in self.waiting.of_digest(digest):
            self._outputs.append(self._output(sequence, [], FinishReason.ADAPTER_FAILED, reason))
            self._end(sequence)

    def _output(
        self, sequence: Sequence, token_ids: list[int], reason: FinishReason | None, message: str = ""
    ) -> RequestOutput:
        return RequestOutput(
            sequence.request.request_id,
            token_ids,
            reason,
            sequence.num_cached_tokens,
            sequence.first_scheduled_s,
            message,
        )

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

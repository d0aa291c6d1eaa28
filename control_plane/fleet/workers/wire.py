"""The control plane's end of the plan stream's encoding: scheduler data to protobuf and back.

The scheduler lists every scheduled row of a step. A message carries only the difference to what the worker knows, so
the encoder keeps a mirror of the worker's rows, and of the rows that each in-flight step must return. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from motet.v1 import types_pb2

from contract import sampling as sampling_params
from contract.v1 import plan_pb2
from control_plane.fleet.workers.errors import GarbageResult
from control_plane.fleet.workers.returned_logprobs import ReturnedLogprobs, num_logprobs
from control_plane.fleet.workers.returned_vectors import ReturnedVectors
from control_plane.scheduler.types import (
    LoadSlot,
    NewRow,
    PoolingKind,
    Sampling,
    SlotCommand,
    StepPlan,
    StepResult,
    WorkerLimits,
)

_INT32 = np.dtype("<i4")
_UINT32 = np.dtype("<u4")
_FLOAT32 = np.dtype("<f4")
_POOLING = {
    PoolingKind.LAST: plan_pb2.POOLING_LAST,
    PoolingKind.MEAN: plan_pb2.POOLING_MEAN,
    PoolingKind.FIRST: plan_pb2.POOLING_FIRST,
}


class PlanEncoder:
    """Turns the plans of one session into differences, and checks the results against them."""

    def __init__(self, epoch: int, vocab_size: int, hidden_width: int = 0) -> None:
        """`hidden_width`: values of a pooled hidden state."""
        self._epoch = epoch
        self._vocab_size = vocab_size
        self._own_vocab_sizes: dict[int, int] = {}  # of rows whose adapters have other tokens than the base model
        self._vectors = ReturnedVectors(hidden_width)
        # Invariant: a row the worker knows is in exactly one of these five.
        self._tokens_left: dict[int, int] = {}  # row in prefill -> known tokens not yet computed
        self._decoding: set[int] = set()
        self._paused: set[int] = set()
        self._host_fed_decoding: set[int] = set()  # past its prefill, and decodes only where it is fed
        self._idle: set[int] = set()  # rows with `pooling` past their prefill
        self._host_fed: set[int] = set()  # rows that were begun so, those in prefill included
        self._constrained: set[int] = set()  # rows that begin with a constraint
        self._logprobs = ReturnedLogprobs()
        # The decoding rows of the latest plan, as they are and packed, while the worker decodes just those: most plans
        # name the same.
        self._steady: tuple[list[int], bytes] | None = None
        # Per in-flight step: rows that sample, in order, as they are and packed.
        self._expected: deque[tuple[list[int], bytes]] = deque()
        self._num_finished = 0  # steps; they count up from 1, so this is also the id of the last finished step

    def encode(self, plan: StepPlan) -> plan_pb2.AttachResponse:
        """The message that carries `plan`, which must follow the plans encoded before."""
        next_step_id = self._num_finished + len(self._expected) + 1
        assert plan.step_id == next_step_id, f"step {plan.step_id} where {next_step_id} is next"
        for row in plan.freed_rows:
            self._forget(row)
        for new in plan.new_rows:
            assert not self._is_known(new.row), f"row {new.row} begins and was not freed"
            self._tokens_left[new.row] = new.num_tokens - new.num_computed_tokens
            if new.is_host_fed:
                self._host_fed.add(new.row)
            if new.constraint is not None:
                self._constrained.add(new.row)
            vocab_size = self._vocab_size
            if new.vocab_size is not None:
                vocab_size = self._own_vocab_sizes[new.row] = new.vocab_size
            num_known = self._tokens_left[new.row] + new.num_computed_tokens
            self._vectors.begin(new.row, new.pooling)
            self._logprobs.begin(new.row, new.sampling, num_known, vocab_size)

        paused, resumed, packed_rows = self._decode(plan)
        ended = self._prefill(plan)
        self._expected.append((plan.decode_rows + ended, packed_rows + _packed(ended)))
        if plan.num_steps > 1:
            is_repeatable = not plan.fed_tokens and not self._tokens_left
            assert is_repeatable, f"step {plan.step_id} cannot be repeated: rows are fed or in prefill"
            rows = sorted(self._decoding)
            self._expected.extend([(rows, _packed(rows))] * (plan.num_steps - 1))
        prompts = _shared_prompts(plan.new_rows)
        return plan_pb2.AttachResponse(
            step_plan=plan_pb2.StepPlan(
                step_id=plan.step_id,
                epoch=self._epoch,
                freed_rows=_packed(plan.freed_rows),
                prompts=[_packed(prompt) for prompt in prompts.values()],
                new_rows=[
                    _encode_new_row(row, row.vocab_size or self._vocab_size, list(prompts)) for row in plan.new_rows
                ],
                appended_blocks=_packed_pairs(plan.appended_blocks),
                paused_rows=_packed(paused),
                resumed_rows=_packed(resumed),
                prefills=_packed_pairs(plan.prefills),
                block_copies=_packed_pairs(plan.block_copies),
                fed_tokens=_packed_pairs(plan.fed_tokens),
                swap_outs=_packed_pairs(plan.swap_outs),
                swap_ins=_packed_pairs(plan.swap_ins),
                num_steps=plan.num_steps if plan.num_steps > 1 else 0,
            )
        )

    def _decode(self, plan: StepPlan) -> tuple[list[int], list[int], bytes]:
        """Follow the plan's decoding rows; those that the worker is to pause and to resume, and all of them packed."""
        if self._steady is not None and self._steady[0] == plan.decode_rows and not plan.fed_tokens:
            return [], [], self._steady[1]
        fed = {row for row, _ in plan.fed_tokens}
        assert fed <= self._host_fed_decoding, f"step {plan.step_id} feeds rows {sorted(fed - self._host_fed_decoding)}"
        scheduled = set(plan.decode_rows) - fed
        paused = sorted(self._decoding - scheduled)
        resumed = sorted(scheduled & self._paused)
        unknown = scheduled - self._decoding - self._paused
        assert not unknown, f"step {plan.step_id} decodes rows {sorted(unknown)}, which have not finished their prefill"
        self._paused.update(paused)
        self._paused.difference_update(resumed)
        self._decoding = scheduled
        packed = _packed(plan.decode_rows)
        self._steady = None if fed else (plan.decode_rows, packed)
        return paused, resumed, packed

    def _prefill(self, plan: StepPlan) -> list[int]:
        """Follow the plan's prefills; the rows where one ends: they sample, then decode, or pool."""
        ended: list[int] = []
        for row, num_tokens in plan.prefills:
            left = self._tokens_left[row] - num_tokens
            assert left >= 0, f"step {plan.step_id} prefills {-left} tokens too many of row {row}"
            self._tokens_left[row] = left
            if left == 0:
                del self._tokens_left[row]
                if self._vectors.is_pooling(row):
                    self._idle.add(row)
                else:
                    (self._host_fed_decoding if row in self._host_fed else self._decoding).add(row)
                ended.append(row)
        if ended:
            self._steady = None
        return ended

    def decode_result(self, message: plan_pb2.StepResult) -> StepResult | None:
        """The result of the oldest in-flight step. None if it is of another epoch, or if that step is finished already.

        Raises GarbageResult if the result is of a step that was not sent, has rows other than those that sample, or
        names a token outside the vocabulary.
        """
        if message.epoch != self._epoch or message.step_id <= self._num_finished:
            return None
        if not self._expected or message.step_id != self._num_finished + 1:
            raise GarbageResult(f"result of step {message.step_id} after that of step {self._num_finished}")
        rows = message.rows
        if len(message.token_ids) != len(rows) or len(rows) % 4 or len(message.failed_rows) % 4:
            raise GarbageResult(
                f"step {message.step_id}: {len(rows)} bytes of rows, {len(message.token_ids)} of tokens, "
                f"{len(message.failed_rows)} of failed rows"
            )
        failed_rows = np.frombuffer(message.failed_rows, dtype=_INT32).tolist()
        row_ids, packed_rows = self._expected[0]
        waiting_rows = self._waiting(message)
        if failed_rows or waiting_rows:
            row_ids = _without(row_ids, [*failed_rows, *waiting_rows])
            packed_rows = _packed(row_ids)
        if rows != packed_rows:
            raise GarbageResult(f"step {message.step_id}: rows other than those that sample in it")
        tokens = np.frombuffer(message.token_ids, dtype=_UINT32)  # a token below zero is above every vocabulary
        if self._own_vocab_sizes:
            sizes = np.array([self._own_vocab_sizes.get(row, self._vocab_size) for row in row_ids], dtype=_UINT32)
            is_unknown = tokens >= sizes if len(tokens) == len(sizes) else np.ones(1, dtype=np.bool_)
            if is_unknown.any():
                raise GarbageResult(f"step {message.step_id}: token outside the vocabulary of its row")
        elif len(tokens) and tokens.max() >= self._vocab_size:
            raise GarbageResult(f"step {message.step_id}: token outside 0..{self._vocab_size - 1}")
        result = StepResult(
            message.step_id,
            row_ids,
            tokens.tolist(),
            failed_rows,
            message.step_time_us,
            num_moved_blocks=message.num_moved_blocks,
            move_time_us=message.move_time_us,
            unconstrained_rows=_unconstrained(message, failed_rows),
            waiting_rows=frozenset(waiting_rows),
        )
        sampled = dict(zip(row_ids, result.token_ids, strict=True)) if message.sampled_logprobs else {}
        for entry in message.sampled_logprobs:
            logprobs = self._logprobs.sampled(
                message.step_id, entry, sampled.get(entry.row), is_sorted=entry.row in self._host_fed
            )
            result.logprobs[entry.row] = logprobs[0]
        for entry in message.prompt_logprobs:
            result.prompt_logprobs[entry.row] = self._logprobs.of_prompt(message.step_id, entry)
        result.pooled.update(self._vectors.returned(message, row_ids))
        self._expected.popleft()
        self._num_finished += 1
        return result

    def encode_command(self, command: SlotCommand) -> plan_pb2.AttachResponse:
        """The message that carries a slot command."""
        if isinstance(command, LoadSlot):
            load = plan_pb2.LoadAdapter(
                slot=command.slot_idx, generation=command.generation, digest=command.digest, epoch=self._epoch
            )
            return plan_pb2.AttachResponse(load_adapter=load)
        evict = plan_pb2.EvictAdapter(slot=command.slot_idx, generation=command.generation, epoch=self._epoch)
        return plan_pb2.AttachResponse(evict_adapter=evict)

    def _waiting(self, message: plan_pb2.StepResult) -> list[int]:
        """The rows that sat out the step, which must have a constraint."""
        if not message.waiting_rows:
            return []
        if len(message.waiting_rows) % 4:
            raise GarbageResult(f"step {message.step_id}: {len(message.waiting_rows)} bytes of waiting rows")
        rows: list[int] = np.frombuffer(message.waiting_rows, dtype=_INT32).tolist()
        for row in rows:
            if row not in self._constrained:
                raise GarbageResult(f"step {message.step_id}: row {row} waits and has no constraint")
        return rows

    def _is_known(self, row: int) -> bool:
        known = (self._tokens_left, self._decoding, self._paused, self._host_fed_decoding, self._idle)
        return any(row in rows for rows in known)

    def _forget(self, row: int) -> None:
        assert self._is_known(row), f"row {row} is freed and was not in use"
        self._steady = None
        self._tokens_left.pop(row, None)
        self._decoding.discard(row)
        self._paused.discard(row)
        self._host_fed_decoding.discard(row)
        self._host_fed.discard(row)
        self._own_vocab_sizes.pop(row, None)
        self._constrained.discard(row)
        self._idle.discard(row)
        self._vectors.forget(row)
        self._logprobs.forget(row)


def limits_of(hello: plan_pb2.Hello, plan_depth: int) -> WorkerLimits:
    """What the scheduler of a session may use."""
    return WorkerLimits(
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_rows=hello.max_rows,
        max_step_tokens=hello.max_step_tokens,
        num_slots=hello.num_slots,
        arena_bytes=hello.arena_bytes,
        max_model_len=hello.max_model_len,
        plan_depth=plan_depth,
        num_host_blocks=hello.num_host_blocks,
        max_adapter_model_len=hello.max_adapter_model_len,
        hidden_width=hello.hidden_width,
    )


def _shared_prompts(rows: list[NewRow]) -> dict[int, tuple[int, ...]]:
    """The prompts that several of the rows have in common, by id: rows of one request have one object."""
    if len(rows) < 2:
        return {}
    counts = Counter(id(row.prompt_token_ids) for row in rows)
    prompts = {id(row.prompt_token_ids): row.prompt_token_ids for row in rows}
    return {key: prompt for key, prompt in prompts.items() if counts[key] > 1}


def _encode_new_row(row: NewRow, vocab_size: int, shared_prompts: list[int]) -> plan_pb2.NewRow:
    sampling, prompt = row.sampling, id(row.prompt_token_ids)
    is_shared = prompt in shared_prompts
    return plan_pb2.NewRow(
        row=row.row,
        prompt=shared_prompts.index(prompt) if is_shared else None,
        token_ids=_packed(row.generated_token_ids if is_shared else row.token_ids),
        num_prompt_tokens=len(row.prompt_token_ids),
        num_computed_tokens=row.num_computed_tokens,
        block_ids=_packed(row.block_ids),
        slot=row.slot_idx,
        slot_generation=row.slot_generation,
        biased_token_ids=_packed([token_id for token_id, _ in sampling.logit_bias]),
        biases=np.array([bias for _, bias in sampling.logit_bias], dtype=_FLOAT32).tobytes(),
        min_tokens=sampling.min_tokens,
        banned_token_ids=_packed(list(row.banned_token_ids)),
        is_host_fed=row.is_host_fed,
        sampling=_encode_sampling(sampling, vocab_size),
        adapters=_encode_adapters(row) if row.adapters else None,
        active_from=row.active_from,
        pooling=None if row.pooling is None else _POOLING[row.pooling.kind],
        num_labels=0 if row.pooling is None else row.pooling.num_labels,
        grammar="" if row.constraint is None else row.constraint.digest,
        request_id=row.log_ids.request_id,
        trace_id=row.log_ids.trace_id,
    )


def _encode_adapters(row: NewRow) -> plan_pb2.RowAdapters:
    return plan_pb2.RowAdapters(
        members=[
            plan_pb2.RowAdapter(slot=use.slot_idx, slot_generation=use.generation, scale=use.scale)
            for use in row.adapters
        ],
        is_linear=row.is_linear,
    )


def _encode_sampling(sampling: Sampling, vocab_size: int) -> types_pb2.SamplingParams:
    message = sampling_params.to_message(sampling)
    num_top = num_logprobs(sampling, vocab_size)
    if num_top is not None:
        message.logprobs = num_top
    return message


def _packed(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=_INT32).tobytes() if values else b""


def _packed_pairs(pairs: Iterable[tuple[int, int]]) -> bytes:
    return _packed(list(chain.from_iterable(pairs)))


def _unconstrained(message: plan_pb2.StepResult, failed_rows: list[int]) -> frozenset[int]:
    """The rows whose constraint failed, which must be among the failed ones."""
    if not message.unconstrained_rows:
        return frozenset()
    if len(message.unconstrained_rows) % 4:
        raise GarbageResult(f"step {message.step_id}: {len(message.unconstrained_rows)} bytes of unconstrained rows")
    rows = frozenset(np.frombuffer(message.unconstrained_rows, dtype=_INT32).tolist())
    if not rows <= set(failed_rows):
        raise GarbageResult(f"step {message.step_id}: rows {sorted(rows - set(failed_rows))} did not fail")
    return rows


def _without(rows: list[int], failed_rows: list[int]) -> list[int]:
    """`rows` without those that failed or wait, which must be among them, each once."""
    remaining = list(rows)
    for row in failed_rows:
        if row not in remaining:
            raise GarbageResult(f"row {row} failed or waits, and was not to sample")
        remaining.remove(row)
    return remaining

"""The worker's end of the plan stream's encoding: protobuf messages to data_plane.plan and back.

Arrays are views into the received bytes (numpy.frombuffer). New rows are decoded one by one; nothing here loops over
tokens or over the rows of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from contract import OLDEST_PROTOCOL, PROTOCOL, sampling as sampling_params
from contract.hello_bounds import MAX_REASON_BYTES
from contract.v1 import plan_pb2
from data_plane.errors import PlanRefused
from data_plane.plan import (
    MAX_ROW_ADAPTERS,
    Capacities,
    Float32Array,
    Int32Array,
    NewRow,
    PooledRow,
    PoolingKind,
    RowAdapter,
    RowAdapters,
    RowConstraint,
    RowLogprobs,
    RowSampling,
    StepOutput,
    StepPlan,
    TargetKind,
    TargetModule,
)

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_KINDS = {
    TargetKind.LINEAR: plan_pb2.TargetModules.KIND_LINEAR,
    TargetKind.HEAD: plan_pb2.TargetModules.KIND_HEAD,
    TargetKind.EMBEDDING: plan_pb2.TargetModules.KIND_EMBEDDING,
    TargetKind.EXPERT: plan_pb2.TargetModules.KIND_EXPERT,
    TargetKind.ROUTER: plan_pb2.TargetModules.KIND_ROUTER,
}
_POOLING = {
    plan_pb2.POOLING_UNSPECIFIED: None,
    plan_pb2.POOLING_LAST: PoolingKind.LAST,
    plan_pb2.POOLING_MEAN: PoolingKind.MEAN,
    plan_pb2.POOLING_FIRST: PoolingKind.FIRST,
}
_MAX_STEPS = 64  # of one plan: a worker does not listen before they are done


ConstraintOf = Callable[[str], RowConstraint | None]  # by the digest that a new row names; empty: None


def _no_constraint(digest: str) -> None:
    if digest:
        raise PlanRefused(f"a new row names the grammar {digest[:12]}: not sent")


def decode_steps(message: plan_pb2.StepPlan, constraint_of: ConstraintOf = _no_constraint) -> list[StepPlan]:
    """The steps that a plan stands for: itself, then steps that only decode on. Raises PlanRefused on torn arrays."""
    first = decode_plan(message, constraint_of)
    if message.num_steps > _MAX_STEPS:
        raise PlanRefused(f"num_steps: {message.num_steps} is above {_MAX_STEPS}")
    if message.num_steps > 1 and len(first.fed_tokens):
        raise PlanRefused(f"fed_tokens and num_steps {message.num_steps}: a fed row cannot decode on by itself")
    if message.num_steps <= 1:
        return [first]
    last = message.num_steps - 1
    more = [StepPlan(first.step_id + index, num_more=last - index) for index in range(1, message.num_steps)]
    return [replace(first, num_more=last), *more]


def decode_plan(message: plan_pb2.StepPlan, constraint_of: ConstraintOf = _no_constraint) -> StepPlan:
    """The first step of a plan as an engine takes it; its arrays are read-only. Raises PlanRefused on torn arrays."""
    return StepPlan(
        step_id=message.step_id,
        freed_rows=_ints(message.freed_rows, "freed_rows"),
        new_rows=_decode_new_rows(message, constraint_of),
        appended_blocks=_pairs(message.appended_blocks, "appended_blocks"),
        paused_rows=_ints(message.paused_rows, "paused_rows"),
        resumed_rows=_ints(message.resumed_rows, "resumed_rows"),
        prefills=_pairs(message.prefills, "prefills"),
        block_copies=_pairs(message.block_copies, "block_copies"),
        fed_tokens=_pairs(message.fed_tokens, "fed_tokens"),
        swap_outs=_pairs(message.swap_outs, "swap_outs"),
        swap_ins=_pairs(message.swap_ins, "swap_ins"),
    )


def encode_output(output: StepOutput, epoch: int) -> plan_pb2.AttachRequest:
    """The step result for a plan of that epoch."""
    return plan_pb2.AttachRequest(
        step_result=plan_pb2.StepResult(
            step_id=output.step_id,
            epoch=epoch,
            rows=_packed(output.rows),
            token_ids=_packed(output.token_ids),
            failed_rows=_packed(output.failed_rows),
            step_time_us=output.step_time_us,
            sampled_logprobs=[_encode_logprobs(logprobs) for logprobs in output.sampled_logprobs],
            prompt_logprobs=[_encode_logprobs(logprobs) for logprobs in output.prompt_logprobs],
            num_moved_blocks=output.num_moved_blocks,
            move_time_us=output.move_time_us,
            pooled=[_encode_pooled(pooled) for pooled in output.pooled],
            unconstrained_rows=_packed(output.unconstrained_rows),
            waiting_rows=_packed(output.waiting_rows),
        )
    )


def encode_hello(capacities: Capacities, worker_id: str, last_epoch: int = 0) -> plan_pb2.AttachRequest:
    """The first message of a session; `last_epoch` is that of the session before, 0 where there is none."""
    return plan_pb2.AttachRequest(
        hello=plan_pb2.Hello(
            protocol_min=OLDEST_PROTOCOL,
            protocol_max=PROTOCOL,
            worker_id=worker_id,
            model_fingerprint=capacities.model_fingerprint,
            dtype=capacities.dtype,
            quantization=capacities.quantization,
            device=capacities.device,
            num_blocks=capacities.num_blocks,
            block_size=capacities.block_size,
            max_rows=capacities.max_rows,
            max_step_tokens=capacities.max_step_tokens,
            arena_bytes=capacities.arena_bytes,
            num_slots=capacities.num_slots,
            max_model_len=capacities.max_model_len,
            max_adapter_model_len=capacities.max_adapter_model_len,
            vocab_size=capacities.vocab_size,
            parallel=plan_pb2.ParallelLayout(tensor=1, pipeline=1),
            num_host_blocks=capacities.num_host_blocks,
            last_epoch=last_epoch,
            target_modules=encode_targets(capacities.target_modules),
            hidden_width=capacities.hidden_width,
            memory=plan_pb2.MemoryUse(**asdict(capacities.memory)),
        )
    )


def encode_targets(modules: Sequence[TargetModule]) -> list[plan_pb2.TargetModules]:
    """Modules that differ in their layer's index alone as one entry, in the order of the first of them.

    model.layers.0.mlp.up_proj and model.layers.1.mlp.up_proj become model.layers.*.mlp.up_proj of the layers 0 and 1.
    """
    layers: dict[TargetModule, list[int]] = {}
    for module in modules:
        parts = module.name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        path = module.name if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
        found = layers.setdefault(replace(module, name=path), [])
        found += [] if at is None else [int(parts[at])]
    return [
        plan_pb2.TargetModules(
            path=module.name,
            layers=_packed(np.array(sorted(indices))),
            kind=_KINDS[module.kind],
            in_features=module.in_features,
            out_features=module.out_features,
            reason=module.reason.encode("ascii", "replace").decode("ascii")[:MAX_REASON_BYTES],
            num_experts=module.num_experts,
            is_interleaved=module.is_interleaved,
        )
        for module, indices in layers.items()
    ]


def _decode_new_rows(message: plan_pb2.StepPlan, constraint_of: ConstraintOf) -> list[NewRow]:
    prompts = [_ints(prompt, "prompts") for prompt in message.prompts]
    return [_decode_new_row(row, prompts, constraint_of) for row in message.new_rows]


def _decode_new_row(message: plan_pb2.NewRow, prompts: list[Int32Array], constraint_of: ConstraintOf) -> NewRow:
    token_ids = _ints(message.token_ids, "token_ids")
    if message.HasField("prompt"):
        if message.prompt >= len(prompts):
            raise PlanRefused(f"new row {message.row} names prompt {message.prompt} of {len(prompts)}")
        prompt = prompts[message.prompt]
        token_ids = np.concatenate([prompt, token_ids]) if len(token_ids) else prompt
    if message.pooling not in _POOLING:
        raise PlanRefused(f"new row {message.row} has the pooling {message.pooling}, which this worker does not know")
    return NewRow(
        row=message.row,
        token_ids=token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=_ints(message.block_ids, "block_ids"),
        slot=message.slot if message.HasField("slot") else None,
        slot_generation=message.slot_generation,
        sampling=_decode_sampling(message),
        is_host_fed=message.is_host_fed,
        adapters=_decode_adapters(message) if message.HasField("adapters") else None,
        active_from=message.active_from,
        pooling=_POOLING[message.pooling],
        num_labels=message.num_labels,
        constraint=constraint_of(message.grammar),
        request_id=message.request_id,
        trace_id=message.trace_id,
    )


def _decode_adapters(message: plan_pb2.NewRow) -> RowAdapters:
    members = tuple(RowAdapter(each.slot, each.slot_generation, each.scale) for each in message.adapters.members)
    slots = [member.slot for member in members]
    if not 1 <= len(members) <= MAX_ROW_ADAPTERS or len(set(slots)) != len(slots):
        raise PlanRefused(f"new row {message.row} combines the slots {slots}; 1 to {MAX_ROW_ADAPTERS}, each once")
    if not message.HasField("slot") or message.slot != slots[0]:
        raise PlanRefused(f"new row {message.row} combines the slots {slots}, its own slot is not the first of them")
    if not all(math.isfinite(member.scale) for member in members):
        raise PlanRefused(f"new row {message.row} has a scale that is not finite")
    return RowAdapters(members, message.adapters.is_linear)


def _decode_sampling(message: plan_pb2.NewRow) -> RowSampling:
    biased, biases = _ints(message.biased_token_ids, "biased_token_ids"), _floats(message.biases, "biases")
    if len(biased) != len(biases):
        raise PlanRefused(f"new row {message.row} has {len(biased)} biased_token_ids and {len(biases)} biases")
    return RowSampling(
        **sampling_params.from_message(message.sampling),
        biased_token_ids=biased if len(biased) else None,
        biases=biases if len(biases) else None,
        min_tokens=message.min_tokens,
        banned_token_ids=_ints(message.banned_token_ids, "banned_token_ids") if message.banned_token_ids else None,
    )


def _encode_logprobs(logprobs: RowLogprobs) -> plan_pb2.RowLogprobs:
    return plan_pb2.RowLogprobs(
        row=logprobs.row,
        first_position=logprobs.first_position,
        token_ids=_packed(logprobs.token_ids),
        logprobs=logprobs.logprobs.astype(_FLOAT32, copy=False).tobytes(),
        ranks=_packed(logprobs.ranks),
        num_top=logprobs.top_token_ids.shape[1],
        top_token_ids=_packed(logprobs.top_token_ids),
        top_logprobs=logprobs.top_logprobs.astype(_FLOAT32, copy=False).tobytes(),
    )


def _encode_pooled(pooled: PooledRow) -> plan_pb2.PooledRow:
    return plan_pb2.PooledRow(row=pooled.row, values=pooled.values.astype(_FLOAT32, copy=False).tobytes())


def _ints(data: bytes, name: str) -> Int32Array:
    if len(data) % 4:
        raise PlanRefused(f"{name}: {len(data)} bytes are not a whole number of int32")
    return np.frombuffer(data, dtype=_INT32)


def _floats(data: bytes, name: str) -> Float32Array:
    if len(data) % 4:
        raise PlanRefused(f"{name}: {len(data)} bytes are not a whole number of float32")
    return np.frombuffer(data, dtype=_FLOAT32)


def _pairs(data: bytes, name: str) -> Int32Array:
    if len(data) % 8:
        raise PlanRefused(f"{name}: {len(data)} bytes are not a whole number of int32 pairs")
    return np.frombuffer(data, dtype=_INT32).reshape(-1, 2)


def _packed(array: Int32Array) -> bytes:
    return array.astype(_INT32, copy=False).tobytes()

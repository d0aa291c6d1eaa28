"""Both ends of the plan stream's encoding against each other: what the scheduler meant is what the worker gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contract.v1 import plan_pb2
from control_plane.fleet.workers.errors import GarbageResult
from control_plane.fleet.workers.wire import PlanEncoder
from control_plane.scheduler.types import (
    EvictSlot,
    LoadSlot,
    NewRow,
    RequestId,
    Sampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from data_plane.errors import PlanRefused
from data_plane.plan import RowLogprobs, StepOutput
from data_plane.wire import decode_plan, decode_steps, encode_output

EPOCH = (3 << 32) | 1
VOCAB_SIZE = 1000
STEP_TIME_US = 5
MAX_STEADY_BYTES = 200
MAX_BYTES_PER_CHANGED_ROW = 8

int32s = st.integers(0, 2**31 - 1)


def new_row(row: int, num_tokens: int, *, num_computed: int = 0) -> NewRow:
    return NewRow(row, RequestId(row), tuple(range(num_tokens)), [], num_computed, [row], None, 0, Sampling())


def steady(num_rows: int) -> PlanEncoder:
    """An encoder after a step in which so many rows ended their prefill."""
    encoder = PlanEncoder(EPOCH, VOCAB_SIZE)
    rows = range(num_rows)
    encoder.encode(StepPlan(1, [], [(row, 2) for row in rows], [new_row(row, 2) for row in rows]))
    return encoder


def result(step_id: int, rows: list[int], tokens: list[int], failed: list[int] | None = None) -> plan_pb2.StepResult:
    sampled, chosen, not_finite = (np.array(values, dtype=np.int32) for values in (rows, tokens, failed or []))
    return encode_output(StepOutput(step_id, sampled, chosen, not_finite, STEP_TIME_US), EPOCH).step_result


@given(
    tokens=st.lists(int32s, min_size=1, max_size=50),
    blocks=st.lists(int32s, max_size=20),
    row=int32s,
    slot=st.none() | st.integers(0, 2**31 - 1),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 10, width=32),
        top_k=st.integers(0, 2**31),
        top_p=st.floats(0.0078125, 1, width=32),
        seed=st.integers(0, 2**64 - 1),
    ),
    pairs=st.lists(st.tuples(int32s, int32s), max_size=20),
)
@settings(max_examples=150)
def test_everything_of_a_plan_survives_the_wire(
    tokens: list[int],
    blocks: list[int],
    row: int,
    slot: int | None,
    sampling: Sampling,
    pairs: list[tuple[int, int]],
) -> None:
    generation = 0 if slot is None else 7
    new = NewRow(row, RequestId(1), tuple(tokens), [], 0, blocks, slot, generation, sampling)
    plan = StepPlan(1, [], [(row, len(tokens))], [new], appended_blocks=pairs, block_copies=pairs)
    message = PlanEncoder(EPOCH, VOCAB_SIZE).encode(plan)
    decoded = decode_plan(plan_pb2.AttachResponse.FromString(message.SerializeToString()).step_plan)
    assert decoded.step_id == 1
    assert decoded.prefills.tolist() == [[row, len(tokens)]]
    assert decoded.appended_blocks.tolist() == decoded.block_copies.tolist() == [list(pair) for pair in pairs]
    [arrived] = decoded.new_rows
    assert (arrived.row, arrived.token_ids.tolist(), arrived.block_ids.tolist()) == (row, tokens, blocks)
    assert (arrived.slot, arrived.slot_generation) == (slot, generation)
    assert (arrived.num_prompt_tokens, arrived.num_computed_tokens) == (len(tokens), 0)
    assert (arrived.sampling.temperature, arrived.sampling.top_p) == (sampling.temperature, sampling.top_p)
    assert (arrived.sampling.top_k, arrived.sampling.seed) == (sampling.top_k, sampling.seed)


@given(
    steps=st.lists(st.tuples(st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15), max_size=3)), max_size=30),
)
@settings(max_examples=150)
def test_the_worker_decodes_exactly_the_scheduled_rows(steps: list[tuple[set[int], set[int]]]) -> None:
    """A worker that only follows the differences knows each step's decoding rows, whatever pauses and ends."""
    encoder = steady(16)
    live, decoding, paused = set(range(16)), set(range(16)), set[int]()
    for step_id, (wanted, freed) in enumerate(steps, start=2):
        freed &= live
        live -= freed
        scheduled = sorted(wanted & live)
        plan = StepPlan(step_id, scheduled, freed_rows=sorted(freed))
        message = decode_plan(encoder.encode(plan).step_plan)
        for gone in message.freed_rows.tolist():
            decoding.discard(gone)
            paused.discard(gone)
        stopped, resumed = set(message.paused_rows.tolist()), set(message.resumed_rows.tolist())
        assert stopped <= decoding
        assert resumed <= paused
        decoding, paused = (decoding - stopped) | resumed, (paused | stopped) - resumed
        assert decoding == set(scheduled)


@pytest.mark.parametrize("num_rows", [1, 256, 4096])
def test_a_steady_decode_plan_is_small_whatever_the_number_of_rows(num_rows: int) -> None:
    encoder = steady(num_rows)
    plan = StepPlan(2, list(range(num_rows)))
    assert encoder.encode(plan).ByteSize() < MAX_STEADY_BYTES
    changed = list(range(0, num_rows, 16))
    grown = StepPlan(3, list(range(num_rows)), appended_blocks=[(row, 2**31 - 1) for row in changed])
    assert encoder.encode(grown).ByteSize() < MAX_STEADY_BYTES + MAX_BYTES_PER_CHANGED_ROW * len(changed)
    remaining = sorted(set(range(num_rows)) - set(changed))
    smaller = StepPlan(4, remaining, freed_rows=changed)
    assert encoder.encode(smaller).ByteSize() < MAX_STEADY_BYTES + MAX_BYTES_PER_CHANGED_ROW * len(changed)


def test_results_come_back_as_the_scheduler_takes_them() -> None:
    encoder = steady(3)
    decoded = encoder.decode_result(result(1, [0, 2], [5, 6], failed=[1]))
    assert decoded == StepResult(1, [0, 2], [5, 6], [1], STEP_TIME_US)


def test_chunked_prefill_samples_with_its_last_chunk_only() -> None:
    encoder = PlanEncoder(EPOCH, VOCAB_SIZE)
    encoder.encode(StepPlan(1, [], [(4, 3)], [new_row(4, 9, num_computed=4)]))
    encoder.encode(StepPlan(2, [], [(4, 2)]))
    assert encoder.decode_result(result(1, [], [])) == StepResult(1, [], [], [], STEP_TIME_US)
    assert encoder.decode_result(result(2, [4], [8])) == StepResult(2, [4], [8], [], STEP_TIME_US)


def test_duplicate_and_foreign_results_are_dropped() -> None:
    encoder = steady(1)
    encoder.encode(StepPlan(2, [0]))
    assert encoder.decode_result(result(1, [0], [5])) is not None
    assert encoder.decode_result(result(1, [0], [5])) is None
    foreign = result(2, [0], [5])
    foreign.epoch = EPOCH - 1
    assert encoder.decode_result(foreign) is None
    assert encoder.decode_result(result(2, [0], [5])) is not None


@pytest.mark.parametrize(
    "garbage",
    [
        result(2, [0, 1], [5, 5]),  # a step that was not sent
        result(0, [0, 1], [5, 5]),
        result(1, [0], [5]),  # a row left out
        result(1, [0, 1, 2], [5, 5, 5]),  # a row made up
        result(1, [1, 0], [5, 5]),  # another order
        result(1, [0, 1], [5]),
        result(1, [0, 1], [5, VOCAB_SIZE]),
        result(1, [0, 1], [5, -1]),
        result(1, [0, 1], [5, 5], failed=[1]),  # failed and sampled
        result(1, [0], [5], failed=[3]),
    ],
)
def test_garbage_is_distinguished_from_stale_results(garbage: plan_pb2.StepResult) -> None:
    encoder = steady(2)
    if garbage.step_id == 0:
        assert encoder.decode_result(garbage) is None  # before the first step: stale
        return
    with pytest.raises(GarbageResult):
        encoder.decode_result(garbage)


def test_torn_arrays_are_refused_by_either_end() -> None:
    with pytest.raises(PlanRefused, match="freed_rows"):
        decode_plan(plan_pb2.StepPlan(step_id=1, freed_rows=b"123"))
    with pytest.raises(PlanRefused, match="prefills"):
        decode_plan(plan_pb2.StepPlan(step_id=1, prefills=b"1234"))
    for field in ("biases", "biased_token_ids", "banned_token_ids"):
        torn = plan_pb2.NewRow(row=1)
        setattr(torn, field, b"123")
        with pytest.raises(PlanRefused, match=f"{field}: 3 bytes"):
            decode_plan(plan_pb2.StepPlan(step_id=1, new_rows=[torn]))
    with pytest.raises(PlanRefused, match="new row 1 has 1 biased_token_ids and 0 biases"):
        decode_plan(plan_pb2.StepPlan(step_id=1, new_rows=[plan_pb2.NewRow(row=1, biased_token_ids=b"1234")]))
    with pytest.raises(GarbageResult):
        steady(1).decode_result(plan_pb2.StepResult(step_id=1, epoch=EPOCH, rows=b"123", token_ids=b"123"))


def test_every_option_of_a_row_arrives() -> None:
    sampling = Sampling(
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=((3, -2.5), (9, 1.0)),
        min_tokens=4,
        num_logprobs=0,
        num_prompt_logprobs=5,
    )
    new = NewRow(2, RequestId(1), (1, 2), [], 0, [0], None, 0, sampling, banned_token_ids=(7, 8), is_host_fed=True)
    [arrived] = decode_plan(PlanEncoder(EPOCH, VOCAB_SIZE).encode(StepPlan(1, [], [], [new])).step_plan).new_rows
    there = arrived.sampling
    assert arrived.is_host_fed
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"):
        assert getattr(there, name) == getattr(sampling, name), name
    assert (there.num_logprobs, there.num_prompt_logprobs) == (0, 5)
    assert there.biased_token_ids is not None and there.biased_token_ids.tolist() == [3, 9]
    assert there.biases is not None and there.biases.tolist() == [-2.5, 1.0]
    assert there.banned_token_ids is not None and there.banned_token_ids.tolist() == [7, 8]


def test_a_row_without_options_has_none() -> None:
    message = PlanEncoder(EPOCH, VOCAB_SIZE).encode(StepPlan(1, [], [], [new_row(0, 2)]))
    [arrived] = decode_plan(message.step_plan).new_rows
    sampling = arrived.sampling
    assert (sampling.repetition_penalty, sampling.num_logprobs, sampling.num_prompt_logprobs) == (1.0, None, None)
    assert sampling.biased_token_ids is None and sampling.biases is None and sampling.banned_token_ids is None
    assert not arrived.is_host_fed


def test_a_row_that_requests_more_logprobs_than_tokens_gets_all_of_them() -> None:
    new = replace(new_row(0, 2), sampling=Sampling(num_logprobs=VOCAB_SIZE + 3))
    [arrived] = decode_plan(PlanEncoder(EPOCH, VOCAB_SIZE).encode(StepPlan(1, [], [], [new])).step_plan).new_rows
    assert arrived.sampling.num_logprobs == VOCAB_SIZE


def test_fed_tokens_and_swaps_arrive() -> None:
    encoder = PlanEncoder(EPOCH, VOCAB_SIZE)
    host_fed = NewRow(3, RequestId(3), (1, 2), [], 0, [0], None, 0, Sampling(), is_host_fed=True)
    encoder.encode(StepPlan(1, [], [(3, 2)], [host_fed]))
    plan = StepPlan(2, [3], fed_tokens=[(3, 5)], swap_outs=[(4, 1), (5, 0)], swap_ins=[(2, 6)])
    [step] = decode_steps(encoder.encode(plan).step_plan)
    assert step.fed_tokens.tolist() == [[3, 5]]
    assert (step.swap_outs.tolist(), step.swap_ins.tolist()) == ([[4, 1], [5, 0]], [[2, 6]])
    assert len(step.paused_rows) == len(step.resumed_rows) == 0


def test_a_plan_of_several_steps_stands_for_steps_that_only_decode_on() -> None:
    encoder = steady(2)
    message = encoder.encode(StepPlan(2, [0, 1], appended_blocks=[(0, 9)], num_steps=3)).step_plan
    steps = decode_steps(message)
    assert [step.step_id for step in steps] == [2, 3, 4]
    assert [len(step.appended_blocks) for step in steps] == [1, 0, 0]
    encoder.decode_result(result(1, [0, 1], [5, 5]))
    for step in steps:
        assert encoder.decode_result(result(step.step_id, [0, 1], [6, 7])) is not None
    message.fed_tokens = np.array([0, 1], dtype="<i4").tobytes()
    with pytest.raises(PlanRefused, match="fed_tokens and num_steps 3"):
        decode_steps(message)
    with pytest.raises(PlanRefused, match="num_steps: 65 is above 64"):
        decode_steps(plan_pb2.StepPlan(step_id=1, num_steps=65))


def requesting(*samplings: Sampling) -> PlanEncoder:
    """An encoder after a step in which rows with these ended their prefill."""
    encoder = PlanEncoder(EPOCH, VOCAB_SIZE)
    rows = [replace(new_row(row, 2), sampling=sampling) for row, sampling in enumerate(samplings)]
    encoder.encode(StepPlan(1, [], [(new.row, 2) for new in rows], rows))
    return encoder


def logprobs_of(
    row: int, token_ids: list[int], top: list[list[int]], logprob: float = -0.5, position: int = 2, rank: int = 2
) -> RowLogprobs:
    """Of the token that a row samples behind its two known ones, unless another position is given."""
    num_tokens, num_top = len(token_ids), len(top[0])
    return RowLogprobs(
        row,
        position,
        np.array(token_ids, dtype=np.int32),
        np.full(num_tokens, logprob, dtype=np.float32),
        np.full(num_tokens, rank, dtype=np.int32),
        np.array(top, dtype=np.int32).reshape(num_tokens, num_top),
        np.full((num_tokens, num_top), logprob, dtype=np.float32),
    )


def result_with(sampled: list[RowLogprobs], prompt: list[RowLogprobs]) -> plan_pb2.StepResult:
    """A result of rows 0 and 1 with these."""
    rows = np.array([0, 1], dtype=np.int32)
    return encode_output(StepOutput(1, rows, rows + 5, rows[:0], 5, sampled, prompt), EPOCH).step_result


REQUESTED = (Sampling(num_prompt_logprobs=0), Sampling(num_logprobs=2))  # of rows 0 and 1


def test_times_come_back_as_the_scheduler_takes_them() -> None:
    rows = np.array([0], dtype=np.int32)
    output = StepOutput(1, rows, rows, rows[:0], 5, num_moved_blocks=7, move_time_us=1 << 40)
    arrived = steady(1).decode_result(encode_output(output, EPOCH).step_result)
    assert arrived is not None
    assert (arrived.step_time_us, arrived.num_moved_blocks, arrived.move_time_us) == (5, 7, 1 << 40)


def test_logprobs_come_back_as_the_scheduler_takes_them() -> None:
    message = result_with([logprobs_of(1, [6], [[4, 6]])], [logprobs_of(0, [8, 9], [[], []], logprob=-1.0, position=1)])
    arrived = requesting(*REQUESTED).decode_result(message)
    assert arrived is not None
    assert arrived.logprobs == {1: TokenLogprobs(6, -0.5, 2, ((4, -0.5), (6, -0.5)))}
    assert arrived.prompt_logprobs == {0: [TokenLogprobs(8, -1.0, 2, ()), TokenLogprobs(9, -1.0, 2, ())]}


def test_all_tokens_are_returned_where_more_candidates_are_requested_than_there_are() -> None:
    encoder = requesting(Sampling(num_logprobs=VOCAB_SIZE + 3), Sampling())
    arrived = encoder.decode_result(result_with([logprobs_of(0, [5], [list(range(VOCAB_SIZE))])], []))
    assert arrived is not None and len(arrived.logprobs[0].top) == VOCAB_SIZE


@pytest.mark.parametrize(
    ("sampled", "prompt", "says"),
    {
        "fewer candidates": ([logprobs_of(1, [6], [[4]])], [], "1 candidates each; it requested 2"),
        "more candidates": ([logprobs_of(1, [6], [[4, 5, 6]])], [], "3 candidates each; it requested 2"),
        "more tokens": ([logprobs_of(1, [6, 7], [[4, 6], [4, 6]])], [], "2 tokens .* of one token"),
        "not requested": ([logprobs_of(0, [6], [[]])], [], "row 0 .* requested None candidates of one token"),
        "prompt not requested": (
            [],
            [logprobs_of(1, [6], [[4, 6]])],
            "requested None candidates of its prompt",
        ),
        "unknown row": ([logprobs_of(7, [6], [[4, 6]])], [], "row 7"),
        "not finite": ([logprobs_of(1, [6], [[4, 6]], logprob=-np.inf)], [], "row 1 .* not finite"),
        "rank 0": ([logprobs_of(1, [6], [[4, 6]], rank=0)], [], rf"row 1 .* ranks outside 1\.\.{VOCAB_SIZE}"),
        "a rank below zero": ([logprobs_of(1, [6], [[4, 6]], rank=-1)], [], "row 1 .* ranks outside"),
        "a rank above all": ([logprobs_of(1, [6], [[4, 6]], rank=VOCAB_SIZE + 1)], [], "row 1 .* ranks outside"),
        "a rank of the prompt": ([], [logprobs_of(0, [8], [[]], position=1, rank=-1)], "row 0 .* ranks outside"),
        "of another token": ([logprobs_of(1, [7], [[4, 6]])], [], "token 7 at 2; it sampled token 6 at 2"),
        "at another place": ([logprobs_of(1, [6], [[4, 6]], position=3)], [], "token 6 at 3; it sampled token 6 at 2"),
        "twice": ([logprobs_of(1, [6], [[4, 6]])] * 2, [], "token 6 at 2; it sampled token 6 at 3"),
        "of the prompt, twice": (
            [],
            [logprobs_of(0, [8], [[]], position=1)] * 2,
            "prompt at 1, after it returned it up to 1",
        ),
        "of the prompt's first": (
            [],
            [logprobs_of(0, [8], [[]], position=0)],
            "prompt at 0, after it returned it up to 0",
        ),
    }.values(),
)
def test_logprobs_other_than_those_requested_are_garbage(
    sampled: list[RowLogprobs], prompt: list[RowLogprobs], says: str
) -> None:
    with pytest.raises(GarbageResult, match=says):
        requesting(*REQUESTED).decode_result(result_with(sampled, prompt))


@pytest.mark.parametrize("is_host_fed", [True, False])
def test_candidates_of_a_beam_come_most_likely_first_or_are_garbage(is_host_fed: bool) -> None:
    encoder = PlanEncoder(EPOCH, VOCAB_SIZE)
    new = replace(new_row(0, 2), sampling=Sampling(num_logprobs=3), is_host_fed=is_host_fed)
    encoder.encode(StepPlan(1, [], [(0, 2)], [new]))
    sampled = logprobs_of(0, [6], [[4, 6, 5]])
    sampled.top_logprobs[0, 2] += 0.25
    row = np.array([0], dtype=np.int32)
    message = encode_output(StepOutput(1, row, row + 6, row[:0], 5, [sampled]), EPOCH).step_result
    if is_host_fed:
        with pytest.raises(GarbageResult, match=r"row 0 .* out of order"):
            encoder.decode_result(message)
    else:
        assert encoder.decode_result(message) is not None


def test_a_row_that_another_request_took_does_not_owe_the_logprobs_of_the_first_one() -> None:
    encoder = requesting(*REQUESTED)
    encoder.decode_result(result_with([logprobs_of(1, [6], [[4, 6]])], []))
    encoder.encode(StepPlan(2, [], [(1, 2)], [new_row(1, 2)], freed_rows=[0, 1]))
    rows = np.array([1], dtype=np.int32)
    output = StepOutput(2, rows, rows, rows[:0], 5, [logprobs_of(1, [6], [[4, 6]])])
    with pytest.raises(GarbageResult, match="requested None"):
        encoder.decode_result(encode_output(output, EPOCH).step_result)


def test_slot_commands_carry_epoch_and_generation() -> None:
    encoder = PlanEncoder(EPOCH, VOCAB_SIZE)
    load = encoder.encode_command(LoadSlot(2, 5, "ab" * 32)).load_adapter
    assert (load.slot, load.generation, load.digest, load.epoch) == (2, 5, "ab" * 32, EPOCH)
    evict = encoder.encode_command(EvictSlot(2, 5, "ab" * 32)).evict_adapter
    assert (evict.slot, evict.generation, evict.epoch) == (2, 5, EPOCH)


def test_plans_that_contradict_the_mirror_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="not finished their prefill"):
        steady(1).encode(StepPlan(2, [0, 1]))
    with pytest.raises(AssertionError, match="was not in use"):
        steady(1).encode(StepPlan(2, [], freed_rows=[1]))
    with pytest.raises(AssertionError, match="was not freed"):
        steady(1).encode(StepPlan(2, [0], [], [new_row(0, 3)]))
    with pytest.raises(AssertionError, match="is next"):
        steady(1).encode(StepPlan(3, [0]))

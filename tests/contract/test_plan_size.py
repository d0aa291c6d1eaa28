"""Plans stay far below what a message may have, whatever the requests: their size as encoded, and what arrives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from contract.hello_bounds import MAX_HOST_BLOCKS, MAX_ROWS
from contract.v1 import plan_pb2
from control_plane.api.rpc.listeners import WORKER_MESSAGE_BYTES
from control_plane.fleet.workers.wire import PlanEncoder
from control_plane.scheduler.admission import make_group
from control_plane.scheduler.errors import PlanNeverFits
from control_plane.scheduler.memory.block_pool import BlockPool
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.probe import SchedulerProbe
from control_plane.scheduler.requests.sequence import Row, Sequence
from control_plane.scheduler.requests.states import SequenceState
from control_plane.scheduler.requests.transitions import take_row
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.step.new_rows import MAX_ROW_BYTES, PLAN_BYTES, begin_row, row_bytes
from control_plane.scheduler.step.swap_space import SwapSpace
from control_plane.scheduler.step_costs import StepCosts
from control_plane.scheduler.types import (
    BeamSearch,
    Completion,
    LogIds,
    NewRow,
    Request,
    RequestId,
    Sampling,
    StepPlan,
    StepResult,
    WorkerLimits,
)
from data_plane.errors import PlanRefused
from data_plane.stream import plan_client
from data_plane.wire import decode_plan

VOCAB_SIZE = 128_256
LIMITS = WorkerLimits(
    num_blocks=60_000,
    block_size=16,
    max_rows=256,
    max_step_tokens=8192,
    num_slots=1,
    arena_bytes=0,
    max_model_len=131_072,
    num_host_blocks=60_000,
)
# Of a plan beside its new rows: tags, decoded and prefilled rows, appended blocks, copies.
OTHER_BYTES = 64 << 10


class Peers:
    """A scheduler, its encoder, and a worker that returns for every row the same token."""

    def __init__(self, limits: WorkerLimits = LIMITS, settings: SchedulerSettings | None = None) -> None:
        self.scheduler = Scheduler(limits, settings or SchedulerSettings(swap_us_per_block=0.0))
        self._encoder = PlanEncoder(1, VOCAB_SIZE)

    def plans(self) -> Iterator[plan_pb2.StepPlan]:
        """Every plan as encoded, until nothing is left to do; the result of each comes before the next one is made."""
        while (plan := self.scheduler.plan(0.0)) is not None:
            yield self._encoder.encode(plan).step_plan
            rows = SchedulerProbe(self.scheduler).sampled_rows()
            list(self.scheduler.apply(StepResult(plan.step_id, rows, [5] * len(rows))))


def begin(sequence: Sequence, row_idx: int = 0, slot_idx: int | None = None) -> Row:
    """Give the sequence a row."""
    row = Row(sequence, row_idx, slot_idx, SequenceState.RUNNING)
    take_row(sequence, row)
    return row


def make_request(request_id: int, num_prompt: int, max_tokens: int = 2, **fields: object) -> Request:
    prompt = tuple((request_id * 7 + position) % VOCAB_SIZE for position in range(num_prompt))
    return replace(Request(RequestId(request_id), prompt, max_tokens), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_samples", [64, 256])
def test_forks_of_a_long_prompt_carry_it_once_in_each_plan(num_samples: int) -> None:
    peers = Peers()
    request = make_request(1, 70_000, num_samples=num_samples)
    peers.scheduler.add(request)
    prompt = np.array(request.prompt_token_ids)
    num_begun = num_bytes = 0
    for message in peers.plans():
        assert message.ByteSize() <= PLAN_BYTES + OTHER_BYTES
        num_bytes += message.ByteSize()
        for row in decode_plan(message).new_rows:
            assert row.num_prompt_tokens == len(prompt)
            assert np.array_equal(row.token_ids[: len(prompt)], prompt)
            num_begun += 1
    assert (num_begun, len(peers.scheduler.request_ids)) == (num_samples, 0)
    assert num_bytes < 4 * num_samples * len(prompt) / 8, "far less than one prompt for each"


def test_requests_that_share_a_cached_prompt_begin_in_as_many_plans_as_their_tokens_take() -> None:
    peers = Peers()
    first = make_request(1, 50_000)
    peers.scheduler.add(first)
    for _ in peers.plans():
        pass
    for number in range(2, 42):
        own = (*first.prompt_token_ids,)  # equal, and not the same object
        peers.scheduler.add(replace(first, request_id=RequestId(number), prompt_token_ids=own))
    begun: list[int] = []
    for message in peers.plans():
        assert message.ByteSize() <= PLAN_BYTES + OTHER_BYTES
        begun.append(len(message.new_rows))
        assert all(row.num_computed_tokens > 49_900 for row in decode_plan(message).new_rows)
    assert sum(begun) == 40
    assert begun[:4] == [9, 9, 9, 9], "200 000 bytes of tokens and 12 500 of block ids each"


def test_completions_that_go_on_begin_in_as_many_plans_as_their_own_tokens_take() -> None:
    peers = Peers()
    completions = (Completion((7,) * 30_000),) * 30
    request = make_request(1, 1000, 30_001, num_samples=30, completions=completions)
    peers.scheduler.add(request)
    lengths = []
    for message in peers.plans():
        assert message.ByteSize() <= PLAN_BYTES + OTHER_BYTES
        lengths += [len(row.token_ids) for row in decode_plan(message).new_rows]
    assert lengths == [31_000] * 30


def test_a_row_that_takes_more_than_a_plans_share_begins_alone() -> None:
    limits = replace(LIMITS, max_model_len=1_000_000, max_step_tokens=600_000)
    peers = Peers(limits)
    peers.scheduler.add(make_request(1, 600_000))
    peers.scheduler.add(make_request(2, 10))
    sizes = [(len(message.new_rows), message.ByteSize()) for message in peers.plans()]
    assert sizes[0][0] == 1 and PLAN_BYTES < sizes[0][1] < MAX_ROW_BYTES
    assert sum(num_rows for num_rows, _ in sizes) == 2


def test_a_request_that_no_plan_can_carry_is_refused_with_the_numbers() -> None:
    limits = replace(LIMITS, max_model_len=10_000_000, num_blocks=600_000)
    scheduler = Scheduler(limits)
    with pytest.raises(PlanNeverFits, match=r"4000000 tokens .* take 17000000 bytes of a plan") as caught:
        scheduler.add(make_request(1, 10, 3_999_990))
    assert str(MAX_ROW_BYTES) in str(caught.value)
    scheduler.add(make_request(2, 10, 3_000_000))


def test_a_search_whose_rows_one_plan_cannot_carry_is_not_swapped_out() -> None:
    """They would have to return together."""
    limits = replace(LIMITS, block_size=1, num_blocks=3_000_000, num_host_blocks=3_000_000, max_model_len=200_000)
    settings, pool = SchedulerSettings(), BlockPool(limits.num_blocks)
    swap = SwapSpace(limits, settings.policy, StepCosts(settings), pool, PrefixCache(pool, limits.block_size))
    group = make_group(make_request(1, 66_000, beam=BeamSearch(64)), limits, 0)
    for member in group.members:
        row = begin(member)
        row.start_at(0)
        row.plan_prefill(row.prefill_end)
    group.note_progress()
    assert not swap.is_better(group), "64 block tables of 66 000 entries"
    del group.members[16:]
    assert swap.is_better(group)


@pytest.mark.parametrize("is_banned", [True, False])
def test_the_bytes_that_a_row_is_counted_for_are_no_fewer_than_it_takes(is_banned: bool) -> None:
    sampling = Sampling(
        temperature=0.7,
        top_k=2**31,
        top_p=0.3,
        seed=2**64 - 1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=tuple((token, 1.5) for token in range(300)),
        min_tokens=2**20 if is_banned else 0,
        num_logprobs=20,
        num_prompt_logprobs=20,
    )
    request = make_request(
        1, 3000, 5000, sampling=sampling, stop_token_ids=frozenset(range(256)), generated_token_ids=(1,) * 1000
    )
    request = replace(request, log_ids=LogIds("x" * 128, "f" * 32))
    (sequence,) = make_group(request, LIMITS, 0).members
    row = begin(sequence, row_idx=2**16, slot_idx=2**16)
    row.block_ids = [LIMITS.num_blocks] * 250
    plan = StepPlan(1, [], [], [begin_row(row, 2**32 - 1)])
    size = PlanEncoder(1, VOCAB_SIZE).encode(plan).step_plan.new_rows[0].ByteSize()
    assert size <= 4 * 3000 + row_bytes(sequence, LIMITS.block_size) < size + 1300


def test_the_largest_plan_of_the_largest_worker_fits_in_a_message() -> None:
    """One row of the greatest size, every host block moved out and in, and something said of every row."""
    bytes_per_row = 8 + 8 + 8 + 8 + 4 + 4 + 4  # prefill, appended block, block copy, fed token, freed, paused, resumed
    size = MAX_ROW_BYTES + 2 * 8 * MAX_HOST_BLOCKS + MAX_ROWS * bytes_per_row
    assert size + OTHER_BYTES < min(WORKER_MESSAGE_BYTES, plan_client.MAX_MESSAGE_BYTES)


def test_a_row_that_names_a_prompt_which_is_not_there_is_refused() -> None:
    row = plan_pb2.NewRow(row=3, prompt=1)
    with pytest.raises(PlanRefused, match="new row 3 names prompt 1 of 1"):
        decode_plan(plan_pb2.StepPlan(step_id=1, prompts=[b"1234"], new_rows=[row]))
    with pytest.raises(PlanRefused, match="prompts: 3 bytes"):
        decode_plan(plan_pb2.StepPlan(step_id=1, prompts=[b"123"]))


def test_rows_of_different_prompts_carry_their_own() -> None:
    first, second = (1, 2, 3), (4, 5)
    rows = [
        NewRow(0, RequestId(1), first, [], 0, [0], None, 0, Sampling()),
        NewRow(1, RequestId(1), first, [9], 0, [1], None, 0, Sampling()),
        NewRow(2, RequestId(2), second, [8], 0, [2], None, 0, Sampling()),
    ]
    message = PlanEncoder(1, VOCAB_SIZE).encode(StepPlan(1, [], [], rows)).step_plan
    assert [row.HasField("prompt") for row in message.new_rows] == [True, True, False]
    decoded = decode_plan(message).new_rows
    assert [row.token_ids.tolist() for row in decoded] == [[1, 2, 3], [1, 2, 3, 9], [4, 5, 8]]
    assert [row.num_prompt_tokens for row in decoded] == [3, 3, 2]

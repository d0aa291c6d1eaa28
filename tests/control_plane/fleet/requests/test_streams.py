"""The stream of one request: events by index, ends, and what is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from control_plane.errors import NotFinite
from control_plane.fleet.requests.streams import MAX_UNREAD_TOKENS, Collecting, JobEvent, JobStream
from control_plane.scheduler.types import Completion, FinishReason, Request, RequestId, RequestOutput, TokenLogprobs

LENGTH = FinishReason.LENGTH


class Rig:
    """A stream of three completions; `calls` lists what it called in the fleet."""

    def __init__(self, num_indices: int = 3) -> None:
        self.calls: list[object] = []
        self.stream = JobStream(
            lambda: self.calls.append("read"),
            lambda: self.calls.append("cancel"),
            self.calls.append,
            num_indices=num_indices,
        )

    def push(self, index: int, token_ids: list[int], reason: FinishReason | None = None, **fields: object) -> None:
        output = RequestOutput(RequestId(1), token_ids, reason, index=index, **fields)  # type: ignore[arg-type]
        self.stream.push(output, reason)

    async def rest(self) -> list[tuple[int, list[int], FinishReason | None]]:
        return [(event.index, event.token_ids, event.finish_reason) async for event in self.stream]


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, ())


async def test_events_coalesce_by_index_and_the_last_end_is_the_streams() -> None:
    rig = Rig()
    rig.push(1, [4])
    rig.push(0, [7], logprobs=[logprob(7)], prompt_logprobs=[logprob(3)])
    rig.push(1, [5], LENGTH)
    rig.push(0, [8], logprobs=[logprob(8)])
    assert rig.stream.num_unread_tokens == 4
    first, second = await anext(rig.stream), await anext(rig.stream)
    assert (first.index, first.token_ids, first.finish_reason) == (1, [4, 5], LENGTH)
    assert (second.index, second.token_ids, second.logprobs) == (0, [7, 8], [logprob(7), logprob(8)])
    assert second.prompt_logprobs == [logprob(3)]
    assert not rig.stream.has_ended and rig.stream.num_unread_tokens == 0
    rig.push(0, [9], LENGTH)
    rig.push(2, [], LENGTH, score=-0.5)
    assert rig.stream.has_ended
    assert await anext(rig.stream) == JobEvent([9], LENGTH, 0, 0.0)
    assert (await anext(rig.stream)).score == -0.5
    assert await rig.rest() == []


async def test_bare_tokens_join_the_event_of_the_first_completion() -> None:
    rig = Rig(2)
    assert not rig.stream.push_token(7)
    rig.push(0, [8])
    assert not rig.stream.push_token(9)
    assert (await anext(rig.stream)) == JobEvent([7, 8, 9], None, 0, 0.0)
    rig.push(1, [1] * (2 * MAX_UNREAD_TOKENS - 2))
    assert [rig.stream.push_token(1) for _ in range(3)] == [False, True, True]
    rig.stream.cancel_index(0)
    assert not rig.stream.push_token(1) and rig.stream.num_unread_tokens == 2 * MAX_UNREAD_TOKENS - 2


async def test_one_cancelled_completion_leaves_the_others() -> None:
    rig = Rig()
    rig.push(0, [1, 2])
    rig.push(1, [3])
    rig.stream.cancel_index(0)
    rig.stream.cancel_index(0)
    assert rig.calls == [0] and not rig.stream.is_live(0) and rig.stream.num_unread_tokens == 1
    rig.push(1, [4], LENGTH)
    rig.stream.cancel_index(1)  # ended already: its unread tokens are dropped, and the fleet is not called
    assert rig.calls == [0]
    rig.push(2, [5], LENGTH)
    assert await rig.rest() == [(2, [5], LENGTH)]


async def test_the_last_cancelled_completion_cancels_the_request() -> None:
    rig = Rig(2)
    rig.push(1, [3], LENGTH)
    rig.stream.cancel_index(0)
    assert rig.calls == ["cancel"] and rig.stream.has_ended
    assert await rig.rest() == [(1, [3], LENGTH)]


async def test_a_failure_comes_behind_the_tokens_of_every_index() -> None:
    rig = Rig()
    rig.push(2, [5])
    rig.stream.fail(NotFinite("not finite"))
    assert (await anext(rig.stream)).token_ids == [5]
    with pytest.raises(NotFinite):
        await anext(rig.stream)
    assert await rig.rest() == []


def test_an_ended_completion_lends_its_room_to_no_other() -> None:
    rig = Rig(2)
    rig.push(0, [1] * (2 * MAX_UNREAD_TOKENS - 1))
    assert not rig.stream.is_full
    rig.push(1, [2], LENGTH)
    assert rig.stream.is_full
    rig.push(0, [1], LENGTH)
    assert rig.stream.has_ended


async def test_cancel_wakes_a_reader_that_waits() -> None:
    rig = Rig()
    reader = asyncio.create_task(rig.rest())
    await asyncio.sleep(0)
    rig.push(0, [1])
    rig.stream.cancel()
    assert await reader == [] and rig.calls == ["cancel"]


def test_a_completion_cancelled_before_the_request_goes_on_is_not_run_again() -> None:
    request = Request(RequestId(1), (1, 2), 8, num_samples=3)
    ended = request.without_index(1)
    assert [completion.is_ended for completion in ended.completions] == [False, True, False]
    moved = Request(RequestId(1), (1, 2), 8, num_samples=2, completions=(Completion((5,)), Completion((6,))))
    assert moved.without_index(0).completions == (Completion((5,), is_ended=True), Completion((6,)))


class Timers:
    """The loop's timers, as far as a stream sets them."""

    def __init__(self) -> None:
        self.running: list[Timer] = []
        self.delays: list[float] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        self.delays.append(delay_s)
        timer = Timer(self, call)
        self.running.append(timer)
        return timer

    def fire(self) -> None:
        (timer,) = self.running
        timer.call()


@dataclass(eq=False)
class Timer:
    timers: Timers
    call: Callable[[], None]

    def cancel(self) -> None:
        self.timers.running.remove(self)


def collecting(num_tokens: int = 4, num_indices: int = 1) -> tuple[Rig, Timers]:
    rig, timers = Rig(num_indices), Timers()
    rig.stream.collect(Collecting(num_tokens, 0.25), timers.call_later)
    return rig, timers


async def parked(rig: Rig) -> asyncio.Task[JobEvent]:
    """A reader that waits for the next event."""

    async def read() -> JobEvent:
        return await anext(rig.stream)

    reader = asyncio.create_task(read())
    await turns()
    return reader


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_tokens_wait_until_there_are_enough_but_the_first_ones_do_not() -> None:
    rig, timers = collecting(4)
    rig.stream.push_token(1)
    assert (await anext(rig.stream)).token_ids == [1] and timers.delays == []
    reader = await parked(rig)
    for token_id in (2, 3, 4):
        rig.stream.push_token(token_id)
        await turns()
    assert not reader.done() and timers.delays == [0.25], "one timer for all that waits"
    rig.push(0, [5], logprobs=[logprob(5)])
    assert (await reader).token_ids == [2, 3, 4, 5] and timers.running == []
    rig.stream.push_token(6)
    reader = await parked(rig)
    assert not reader.done(), "what was read makes room for the next wait"
    reader.cancel()


async def test_a_token_waits_no_longer_than_it_may() -> None:
    rig, timers = collecting(4)
    rig.stream.push_token(1)
    assert (await anext(rig.stream)).token_ids == [1]
    rig.stream.push_token(2)
    rig.stream.push_token(3)
    reader = await parked(rig)
    assert not reader.done()
    timers.fire()
    assert (await reader).token_ids == [2, 3] and timers.running == []


@pytest.mark.parametrize("end", ["last token", "error", "cancel"])
async def test_an_end_does_not_wait(end: str) -> None:
    rig, timers = collecting(4)
    rig.stream.push_token(1)
    await anext(rig.stream)
    reader = await parked(rig)
    rig.stream.push_token(2)
    if end == "last token":
        rig.push(0, [3], LENGTH)
        assert (await reader).token_ids == [2, 3]
    elif end == "error":
        rig.stream.fail(NotFinite("logits are not finite"))
        assert (await reader).token_ids == [2], "the tokens before an error are read first"
        with pytest.raises(NotFinite):
            await anext(rig.stream)
    else:
        rig.stream.cancel()
        with pytest.raises(StopAsyncIteration):
            await reader
    assert timers.running == []


async def test_completions_wait_together_and_the_end_of_one_lets_all_go() -> None:
    rig, _timers = collecting(2, num_indices=2)
    rig.push(0, [1])
    assert (await anext(rig.stream)).token_ids == [1]
    reader = await parked(rig)
    rig.push(1, [1])
    rig.push(0, [2])
    rig.push(1, [2])
    await turns()
    assert not reader.done(), "three tokens of two completions"
    rig.push(0, [3])
    assert (await reader).token_ids == [1, 2]
    assert (await anext(rig.stream)).token_ids == [2, 3]
    reader = await parked(rig)
    rig.push(0, [4])
    rig.push(1, [3], LENGTH)
    assert (await reader).token_ids == [4]
    assert (await anext(rig.stream)).finish_reason is LENGTH
    rig.stream.push_token(5)
    rig.stream.push_token(6)
    assert (await anext(rig.stream)).token_ids == [5, 6], "enough for the one completion that is left"


async def test_log_probabilities_that_wait_are_those_of_their_tokens() -> None:
    rig, _timers = collecting(3)
    first = [logprob(1)]
    rig.push(0, [1], logprobs=first)
    assert (await anext(rig.stream)).logprobs == [logprob(1)]
    given = [[logprob(token_id)] for token_id in (2, 3, 4)]
    for logprobs in given:
        rig.push(0, [logprobs[0].token_id], logprobs=logprobs)
    event = await anext(rig.stream)
    assert event.token_ids == [2, 3, 4] and event.logprobs == [logprob(2), logprob(3), logprob(4)]
    assert [len(logprobs) for logprobs in given] == [1, 1, 1], "the scheduler's lists stay as they are"


async def test_a_stream_is_full_at_the_same_number_of_tokens_when_they_may_wait() -> None:
    rig, _timers = collecting(128)
    assert [rig.stream.push_token(1) for _ in range(MAX_UNREAD_TOKENS)].count(True) == 1
    assert len((await anext(rig.stream)).token_ids) == MAX_UNREAD_TOKENS
    assert rig.calls == ["read"]

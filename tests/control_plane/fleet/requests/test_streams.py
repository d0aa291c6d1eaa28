"""The stream of one request: events by index, ends, and what is given up."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.errors import NotFinite
from control_plane.fleet.requests.streams import MAX_UNREAD_TOKENS, JobEvent, JobStream
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

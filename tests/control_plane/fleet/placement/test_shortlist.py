"""Which of many workers are priced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from control_plane.fleet.placement.shortlist import MAX_HINTS, MAX_KEYS, MAX_PRICED, NUM_IN_TURN, Shortlist
from control_plane.fleet.settings import PlacementCosts
from control_plane.scheduler.types import AdapterRef, Request, RequestId
from tests.fakes.fleet_rig import CAPACITIES, FakeClock, LoopbackWorker, make_fleet, make_request

ADAPTER = AdapterRef("a" * 64, arena_bytes=1024)
REQUEST = Request(RequestId(1), tuple(range(100)), 10)


@dataclass(frozen=True)
class Named:
    """A session as far as the shortlist looks."""

    worker_id: str


def make_sessions(count: int) -> dict[str, Named]:
    return {f"w{i:04d}": Named(f"w{i:04d}") for i in range(count)}


def choose(shortlist: Shortlist, sessions: dict[str, Any], request: Request = REQUEST) -> list[str]:
    return [session.worker_id for session in shortlist.choose(sessions, request)]


def test_few_workers_are_all_priced() -> None:
    sessions = make_sessions(MAX_PRICED)
    assert choose(Shortlist(), sessions) == list(sessions)


def test_of_many_workers_everyone_has_its_turn() -> None:
    shortlist, sessions = Shortlist(), make_sessions(1000)
    seen: set[str] = set()
    for _ in range(-(-1000 // NUM_IN_TURN)):
        chosen = choose(shortlist, sessions)
        assert len(set(chosen)) == len(chosen) == NUM_IN_TURN
        seen.update(chosen)
    assert seen == set(sessions)


def test_workers_that_got_the_adapter_or_the_beginning_are_priced() -> None:
    shortlist, sessions = Shortlist(), make_sessions(200)
    shortlist.placed(replace(REQUEST, adapter=ADAPTER), "w0150")
    shortlist.placed(REQUEST, "w0160")
    shortlist.placed(REQUEST, "gone")
    same_beginning = replace(REQUEST, prompt_token_ids=(*range(64), 7, 7))
    assert choose(shortlist, sessions, same_beginning)[0] == "w0160"
    same_adapter = replace(REQUEST, prompt_token_ids=(5, 6), adapter=ADAPTER)
    assert choose(shortlist, sessions, same_adapter)[0] == "w0150"
    for stranger in (
        replace(REQUEST, prompt_token_ids=(5, 6)),
        replace(REQUEST, cache_salt=b"another partition"),
        replace(REQUEST, tenant="other"),
        replace(REQUEST, prompt_token_ids=(5, 6), adapter=AdapterRef("b" * 64, 1024)),
    ):
        assert not {"w0150", "w0160"} & set(choose(shortlist, sessions, stranger))


def test_what_is_remembered_is_bounded() -> None:
    shortlist, sessions = Shortlist(), make_sessions(1000)
    for i in range(2 * MAX_HINTS):
        shortlist.placed(REQUEST, f"w{500 + i:04d}")
    for i in range(MAX_KEYS - 1):
        shortlist.placed(replace(REQUEST, prompt_token_ids=(i,)), "w0001")
    assert shortlist.num_keys == MAX_KEYS
    remembered = [f"w{500 + i:04d}" for i in range(MAX_HINTS, 2 * MAX_HINTS)]
    assert choose(shortlist, sessions)[:-NUM_IN_TURN] == remembered
    shortlist.placed(replace(REQUEST, prompt_token_ids=(-1,)), "w0001")
    assert shortlist.num_keys == MAX_KEYS and len(choose(shortlist, sessions)) == NUM_IN_TURN


async def test_among_many_workers_a_request_finds_the_one_with_its_adapter_and_one_that_it_fits() -> None:
    fleet = make_fleet(FakeClock(), placement=PlacementCosts(load_ms=1000.0))
    tiny = replace(CAPACITIES, num_blocks=4, max_rows=2)
    workers = {f"w{i:02d}": LoopbackWorker(fleet, f"w{i:02d}", capacities=tiny) for i in range(MAX_PRICED + 8)}
    adapter = fleet.weights.add("a")
    placed = []
    for i in range(2):
        request = make_request(fleet, [i], 5, adapter)
        stream = fleet.submit(request)
        [holder] = [worker for worker in workers.values() if len(worker.session.scheduler.request_ids)]
        await holder.run(lambda stream=stream: stream.has_ended)  # type: ignore[misc]  # bound at once
        placed.append(holder.session.worker_id)
    assert placed[0] == placed[1]
    large = LoopbackWorker(fleet, "w99")
    request = make_request(fleet, list(range(100)), 5)  # 27 blocks
    fleet.submit(request)
    assert len(large.session.scheduler.request_ids) == 1

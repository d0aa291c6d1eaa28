"""Workers of the release before and of the release after: they serve, or are refused by both ranges of versions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

import contract
from contract.v1 import plan_pb2
from control_plane.fleet.gate import hello
from control_plane.fleet.workers.endings import EndCause
from data_plane import wire
from data_plane.stream import plan_client
from tests.contract.next_release import as_sent_by_next_release
from tests.fakes.fleet_rig import (
    FakeClock,
    GrpcRig,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)

Range = tuple[int, int]  # oldest and newest version of the plan stream


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Callable[[Range, Range], None]:
    """Sets what the control plane and the workers of this process speak."""

    def use(control_plane: Range, worker: Range) -> None:
        spoken = {contract: control_plane, hello: control_plane, wire: worker, plan_client: worker}
        for module, (oldest, newest) in spoken.items():
            monkeypatch.setattr(module, "OLDEST_PROTOCOL", oldest)
            monkeypatch.setattr(module, "PROTOCOL", newest)

    return use


@pytest.mark.parametrize(
    ("control_plane", "worker"),
    [
        pytest.param((8, 9), (7, 8), id="an older worker"),
        pytest.param((7, 8), (8, 9), id="a newer worker"),
        pytest.param((8, 8), (8, 9), id="releases without a new version between them"),
    ],
)
async def test_neighbouring_releases_serve_with_the_version_that_both_speak(
    releases: Callable[[Range, Range], None], control_plane: Range, worker: Range, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    releases(control_plane, worker)
    async with GrpcRig() as rig:
        attached = await rig.add_worker("w0")
        requests = [make_request(rig.fleet, [3, 5], 12, adapter) for adapter in (None, rig.weights.add("a"))]
        async with asyncio.timeout(30):
            tokens = await asyncio.gather(*[read_all(rig.fleet.submit(request)) for request in requests])
        assert tokens == [expected(request) for request in requests]
        assert attached.client.num_sessions == 1
    assert "protocol" not in caplog.text, "nothing is wrong with this pair"


@pytest.mark.parametrize(("control_plane", "worker"), [((8, 9), (6, 7)), ((6, 7), (8, 9))])
async def test_releases_that_are_no_neighbours_are_refused_with_both_ranges(
    releases: Callable[[Range, Range], None], control_plane: Range, worker: Range, caplog: pytest.LogCaptureFixture
) -> None:
    releases(control_plane, worker)
    async with GrpcRig() as rig:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await rig.add_worker("w0")
        await rig.workers[-1].join()
        assert rig.workers[-1].exit_code == 1, "another attempt of this process cannot succeed"
        assert rig.fleet.num_workers == 0
    ranges = "the worker speaks protocol {} to {}, the control plane {} to {}".format(*worker, *control_plane)
    assert f"{ranges}; run both from the same version, or from neighbouring releases" in caplog.text


REPORTS = {
    "heartbeat": plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat(resident_bytes=5)),
    "pong": plan_pb2.AttachRequest(pong=plan_pb2.Pong(sequence=1)),
}


@pytest.mark.parametrize("kind", REPORTS)
async def test_what_a_newer_worker_adds_to_reports_about_itself_is_left_out(clock: FakeClock, kind: str) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    worker.session.receive(as_sent_by_next_release(REPORTS[kind], kind))
    assert not worker.session.ended.is_set()


async def test_what_a_newer_worker_adds_to_its_hello_is_left_out(clock: FakeClock) -> None:
    """The worker sends it before both have agreed on a version."""
    fleet = make_fleet(clock)
    session = fleet.attach(as_sent_by_next_release(LoopbackWorker(make_fleet(clock)).hello))
    assert fleet.num_workers == 1 and not session.ended.is_set()


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("step_result",), "field 900 of StepResult"),
        (("step_result", "sampled_logprobs", 0), "field 900 of RowLogprobs"),
        (("slot_state",), "field 900 of SlotState"),
    ],
)
async def test_results_with_a_field_of_another_release_end_the_session_by_its_name(
    clock: FakeClock, path: tuple[str, ...], named: str
) -> None:
    """Nobody can say what such a result means without the field."""
    results = {
        "step_result": plan_pb2.AttachRequest(
            step_result=plan_pb2.StepResult(step_id=1, sampled_logprobs=[plan_pb2.RowLogprobs()])
        ),
        "slot_state": plan_pb2.AttachRequest(slot_state=plan_pb2.SlotState()),
    }
    worker = LoopbackWorker(make_fleet(clock))
    worker.session.receive(as_sent_by_next_release(results[path[0]], *path))
    assert worker.session.end_cause is EndCause.GARBAGE
    assert f"{named} is not known to this release of the control plane" in worker.session.end_reason


async def test_an_event_of_another_release_ends_the_session_by_its_name(clock: FakeClock) -> None:
    worker = LoopbackWorker(make_fleet(clock))
    worker.session.receive(as_sent_by_next_release(plan_pb2.AttachRequest(), event=True))
    assert "field 901 of AttachRequest is not known" in worker.session.end_reason

"""A worker and a control plane of another release."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from contract import OLDEST_PROTOCOL, PROTOCOL
from contract.v1 import plan_pb2
from tests.contract.next_release import as_sent_by_next_release
from tests.data_plane.stream.test_plan_client import DIGEST, Peer, one_row, plan, play


async def test_a_control_plane_that_chooses_a_version_this_worker_does_not_speak_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def too_new(peer: Peer) -> None:
        await peer.welcome(9, protocol=PROTOCOL + 1)
        with contextlib.suppress(asyncio.CancelledError):  # the worker may be gone before the plan is written
            await peer.send(step_plan=plan(1, 9, **one_row()))

    async def right(peer: Peer) -> None:
        hello = await peer.welcome(10)
        assert (hello.protocol_min, hello.protocol_max) == (OLDEST_PROTOCOL, PROTOCOL)
        await peer.receive("heartbeat")

    worker = await play(too_new, right)
    assert worker.client.num_sessions == 1
    text = f"the control plane chose protocol {PROTOCOL + 1}, and this worker speaks {OLDEST_PROTOCOL} to {PROTOCOL}"
    assert text in caplog.text


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("step_plan",), "field 900 of StepPlan"),
        (("step_plan", "new_rows", 0), "field 900 of NewRow"),
        (("step_plan", "new_rows", 0, "adapters"), "field 900 of RowAdapters"),
        (("load_adapter",), "field 900 of LoadAdapter"),
    ],
)
async def test_an_order_with_a_field_of_another_release_is_refused_by_its_name(
    path: tuple[str | int, ...], named: str
) -> None:
    """Without the field the worker might compute something else than was planned."""
    orders = {
        "step_plan": plan_pb2.AttachResponse(step_plan=plan(1, 9, **one_row())),
        "load_adapter": plan_pb2.AttachResponse(
            load_adapter=plan_pb2.LoadAdapter(slot=0, generation=1, digest=DIGEST, epoch=9)
        ),
    }

    async def newer(peer: Peer) -> None:
        await peer.welcome(9)
        await peer.write(as_sent_by_next_release(orders[str(path[0])], *path))
        fault = (await peer.receive("fault")).fault
        assert fault.reason == f"PlanRefused: {named} is not known to this release of the worker"

    await play(newer)


async def test_an_event_of_another_release_is_refused_by_its_number() -> None:
    async def newer(peer: Peer) -> None:
        await peer.welcome(9)
        await peer.write(as_sent_by_next_release(plan_pb2.AttachResponse(), event=True))
        assert "field 901 of AttachResponse is not known" in (await peer.receive("fault")).fault.reason

    await play(newer)


async def test_a_welcome_with_a_field_of_another_release_begins_no_session(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def newer(peer: Peer) -> None:
        await peer.receive("hello")
        welcome = plan_pb2.Welcome(protocol=PROTOCOL, epoch=9, heartbeat_interval_ms=500, leave_after_ms=30_000)
        await peer.write(as_sent_by_next_release(plan_pb2.AttachResponse(welcome=welcome), "welcome"))

    async def right(peer: Peer) -> None:
        await peer.welcome(10)
        await peer.receive("heartbeat")

    worker = await play(newer, right)
    assert worker.client.num_sessions == 1
    assert f"field 900 of Welcome, of protocol {PROTOCOL}, is not known to this release" in caplog.text

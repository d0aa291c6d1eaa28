"""A worker and a control plane of another release."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from contract import OLDEST_PROTOCOL, PROTOCOL
from tests.data_plane.stream.test_plan_client import Peer, one_row, plan, play


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

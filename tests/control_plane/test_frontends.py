"""A whole control plane whose clients' port is in front ends: everything is as without them, and one may die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from motet import AsyncClient

from tests.control_plane import test_authentication, test_delta_size, test_server
from tests.control_plane.audit import test_served_log
from tests.control_plane.server_processes import control_plane, hash_worker
from tests.e2e import test_mutual_tls

NUM_TOKENS = 120
OPTIONS: Any = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 5}


Test = Callable[[Path], Awaitable[None]]
ALL_THE_SAME: list[Test] = [
    test_server.test_whole_control_plane_serves_a_worker_and_shuts_down,
    test_authentication.test_every_method_wants_a_valid_key_of_the_right_role,
    test_authentication.test_a_revoked_key_is_refused_and_its_stream_goes_on,
    test_authentication.test_tokens_and_certificates_over_tls,
    test_served_log.test_standard_output_has_the_ready_line_first_and_then_the_log,
    test_delta_size.test_larger_deltas_make_the_same_stream,
    test_mutual_tls.test_no_stream_fails_while_every_certificate_is_rotated,
    test_mutual_tls.test_a_denied_client_is_refused_at_once,
    test_mutual_tls.test_a_denied_clients_running_stream_ends_and_another_goes_on_through_half_written_files,
]


@pytest.mark.parametrize("test", ALL_THE_SAME, ids=lambda test: test.__name__.removeprefix("test_"))
async def test_behind_front_ends(test: Test, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_FRONTENDS", "2")  # for the servers that it starts
    await test(tmp_path)


def front_ends(pid: int) -> list[psutil.Process]:
    """The front ends of a control plane."""
    children = psutil.Process(pid).children()
    return [child for child in children if "control_plane.frontends.process" in child.cmdline()]


async def test_streams_go_on_when_their_front_end_is_killed(tmp_path: Path) -> None:
    async with (
        control_plane(tmp_path, "--host-cache", "memory", "--frontends", "2") as (process, clients, workers),
        AsyncClient(clients) as client,
        hash_worker(tmp_path, workers, "--step-time-ms", "10"),
    ):
        prompts = [[5, 6, number] for number in range(7, 15)]
        whole = await asyncio.gather(*(client.generate(prompt, **OPTIONS).result() for prompt in prompts))
        before = front_ends(process.pid)
        assert len(before) == 2

        async def tokens_of(prompt: list[int], *, kills: bool) -> list[int]:
            tokens: list[int] = []
            async with client.generate(prompt, **OPTIONS, delta_tokens=4) as stream:
                async for chunk in stream:
                    assert chunk.token_offset == len(tokens)
                    tokens += chunk.token_ids
                    if kills and len(tokens) >= 20:
                        kills = False
                        for child in before:
                            if any(found.status == psutil.CONN_ESTABLISHED for found in child.net_connections("tcp")):
                                child.kill()
            return tokens

        got = await asyncio.gather(*(tokens_of(prompt, kills=prompt is prompts[0]) for prompt in prompts))
        assert got == [list(one.token_ids) for one in whole], "no token twice, none missed"
        assert {child.pid for child in front_ends(process.pid)} != {child.pid for child in before}
        async with asyncio.timeout(60):
            while (await client.status()).queues.num_running:
                await asyncio.sleep(0.05)
        process.terminate()
        assert await process.wait() == 0
        async with asyncio.timeout(60):
            while any(child.is_running() for child in before):
                await asyncio.sleep(0.05)


async def test_front_ends_end_with_a_control_plane_that_is_killed(tmp_path: Path) -> None:
    async with control_plane(tmp_path, "--host-cache", "memory", "--frontends", "2") as (process, _, _):
        children = front_ends(process.pid)
        process.kill()
        await process.wait()
        async with asyncio.timeout(60):
            while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
                await asyncio.sleep(0.05)

"""The log of running processes as JSON, and the line of each request with the trace that its client named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import motet
from motet.connection.trace import TRACEPARENT

from tests.control_plane.server_processes import STEP_S, control_plane, hash_worker

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_request_can_be_followed_from_the_client_to_the_worker(tmp_path: Path) -> None:
    flags = ("--host-cache", "memory", "--log-format", "json")
    async with (
        control_plane(tmp_path, *flags) as (server, clients, workers),
        hash_worker(tmp_path, workers, "--log-level", "info") as worker,
    ):
        token = TRACEPARENT.set(f"00-{TRACE}-b7ad6b7169203331-01")
        try:
            async with motet.AsyncClient(clients, tenant="acme") as client:
                result = await client.generate("hello", max_tokens=3, request_id="mine", ignore_eos=True).result()
        finally:
            TRACEPARENT.reset(token)
        assert len(result.token_ids) == 3
        server.terminate()
        _, err = await asyncio.wait_for(server.communicate(), STEP_S)
        worker.terminate()
        _, of_worker = await asyncio.wait_for(worker.communicate(), STEP_S)
    (begun,) = [line for line in of_worker.decode().splitlines() if "request begins" in line]
    (left,) = [line for line in of_worker.decode().splitlines() if "request leaves" in line]
    assert "request_id=mine" in left and f"trace_id={TRACE}" in left and "reason=" in left
    assert "request_id=mine" in begun and f"trace_id={TRACE}" in begun and "prompt_tokens=" in begun
    lines: list[dict[str, Any]] = [json.loads(line) for line in err.decode().splitlines()]
    (ended,) = [line for line in lines if line["event"] == "request ended"]
    assert ended["trace_id"] == TRACE
    assert ended["fields"]["request_id"] == "mine" and ended["fields"]["worker"] == "hash"
    assert ended["fields"]["generated_tokens"] == 3 and ended["fields"]["reason"] == "length"
    assert {line["process"] for line in lines} == {"control plane"}

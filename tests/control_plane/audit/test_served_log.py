"""The audit log of a whole control plane, over restarts and a kill, in a file and on standard output."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from motet.audit.chain import GENESIS, TORN_ACTION, check
from motet.cli.main import main
from motet.v1 import adapters_pb2, adapters_pb2_grpc, status_pb2, status_pb2_grpc

from tests.control_plane.audit.sinks import lines_of
from tests.control_plane.server_processes import STEP_S, adapter_files, control_plane, generate, hash_worker, upload


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.raw) for line in lines_of(path.read_bytes())]


async def test_a_server_writes_one_chain_over_a_restart_and_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.jsonl"
    flags = ("--host-cache", "memory", "--audit-log", str(path))
    async with control_plane(tmp_path, *flags) as (process, clients, workers):
        async with grpc.aio.insecure_channel(clients) as channel, hash_worker(tmp_path, workers, "--worker-id", "w0"):
            digest = await upload(channel, "poet", adapter_files(0))
            assert events(path)[-1]["data"]["action"] == "adapter.upload"  # before the client had its response
            await generate(channel, adapter="poet", request_id="mine")
            stub: Any = status_pb2_grpc.StatusServiceStub(channel)
            status = (await stub.GetStatus(status_pb2.GetStatusRequest())).audit
            assert (status.is_on, status.error, status.num_lost) == (True, "", 0)
            assert status.num_lines >= 3  # the generation's may wait for others
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0
    data = [event["data"] for event in events(path)]
    assert [(line["action"], line["resource"]) for line in data] == [
        ("server.start", "server"),
        ("worker.attach", "workers/w0"),
        ("adapter.upload", "adapters/poet"),
        ("generate", "adapters/poet"),
        ("worker.end", "workers/w0"),
        ("server.stop", "server"),
    ]
    generation = data[3]
    assert (generation["digest"], generation["request_id"], generation["generated_tokens"]) == (digest, "mine", 12)
    [worker] = generation["workers"]
    assert (worker["worker_id"], worker["slot"], worker["slot_generation"]) == ("w0", 0, 1)
    assert b"hello" not in path.read_bytes()
    async with control_plane(tmp_path, *flags) as (process, clients, _):
        async with grpc.aio.insecure_channel(clients) as channel:
            adapters: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
            await adapters.PinAdapter(adapters_pb2.PinAdapterRequest(name="adapters/poet"))
        process.kill()
        await process.wait()
    with path.open("ab") as opened:
        opened.write(b'{"specversion":"1.0","id":"cut o')  # as a power failure leaves a line
    async with control_plane(tmp_path, *flags) as (process, _, _):
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0
    assert TORN_ACTION in path.read_text()
    assert main(["audit", "verify", "--json", str(path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["is_from_beginning"] and summary["num_torn_lines"] == 1


async def test_standard_output_has_the_ready_line_first_and_then_the_log(tmp_path: Path) -> None:
    async with control_plane(tmp_path, "--host-cache", "memory", "--audit-log", "-") as (process, clients, _):
        async with grpc.aio.insecure_channel(clients) as channel:
            await upload(channel, "poet", adapter_files(0))
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        rest = await asyncio.wait_for(process.stdout.read(), STEP_S)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0
    verdict = check(lines_of(rest))
    assert verdict.finding is None and verdict.begins_after == GENESIS
    actions = [json.loads(line)["data"]["action"] for line in rest.splitlines()]
    assert actions == ["server.start", "adapter.upload", "server.stop"]

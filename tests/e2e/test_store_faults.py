"""Whole control planes over a store that is damaged, moved away, or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from motet.v1 import adapters_pb2, adapters_pb2_grpc

from tests.control_plane.server_processes import (
    STEP_S,
    adapter_files,
    checkpoint,
    control_plane,
    generate,
    hash_worker,
    start,
    tokens_of,
    upload,
)

FLAGS = ("--host-cache", "memory", "--store-timeout-s", "5")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def adapters(channel: grpc.aio.Channel) -> Any:
    return adapters_pb2_grpc.AdapterServiceStub(channel)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason and message of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailers: Any = caught.value.trailing_metadata()
    status = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return caught.value.code(), info.reason, caught.value.details() or ""


def update(name: str, display_name: str) -> adapters_pb2.UpdateAdapterRequest:
    adapter = adapters_pb2.Adapter(name=f"adapters/{name}", display_name=display_name)
    return adapters_pb2.UpdateAdapterRequest(adapter=adapter, update_mask={"paths": ["display_name"]})


async def test_a_flipped_byte_is_reported_at_once_and_repaired_by_registering_again(tmp_path: Path) -> None:
    async with (
        control_plane(tmp_path, *FLAGS) as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        hash_worker(tmp_path, workers),
    ):
        digest = await upload(channel, "a", adapter_files(0))
        (chunk,) = (tmp_path / "data" / "store" / "blobs" / digest).glob("00000.*")
        good = chunk.read_bytes()
        chunk.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        async with asyncio.timeout(STEP_S):
            code, reason, message = await refusal(generate(channel, adapter="a"))
        assert (code, reason) == (grpc.StatusCode.DATA_LOSS, "ADAPTER_DAMAGED")
        assert "register the same adapter files again" in message and digest in message
        assert await upload(channel, "a", adapter_files(0)) == digest
        assert chunk.read_bytes() == good
        assert len(tokens_of(await generate(channel, adapter="a"))) == 12


async def test_a_store_that_was_away_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    store, away = tmp_path / "data" / "store", tmp_path / "away"
    async with control_plane(tmp_path, *FLAGS) as (process, clients, _):
        async with grpc.aio.insecure_channel(clients) as channel:
            await upload(channel, "a", adapter_files(0))
            store.rename(away)
            code, reason, message = await refusal(upload(channel, "b", adapter_files(1)))
            assert (code, reason) == (UNAVAILABLE, "STORE_DOWN") and "must bring it back" in message
            assert not store.exists()
            away.rename(store)
            await upload(channel, "b", adapter_files(1))
        process.kill()
        await process.wait()
    async with control_plane(tmp_path, *FLAGS) as (_, clients, _), grpc.aio.insecure_channel(clients) as channel:
        listed = (await adapters(channel).ListAdapters(adapters_pb2.ListAdaptersRequest())).adapters
        assert [adapter.name for adapter in listed] == ["adapters/a", "adapters/b"]


async def test_a_start_that_waits_for_a_store_can_be_stopped(tmp_path: Path) -> None:
    store = tmp_path / "data" / "store"
    store.mkdir(parents=True)
    os.mkfifo(store / "incarnation.json")
    model = checkpoint(tmp_path / "model")
    flags = ("--model", str(model), "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    process = await start("control_plane", *flags, "--worker-listen", "127.0.0.1:0", *FLAGS, cwd=tmp_path)
    assert process.stderr is not None
    async with asyncio.timeout(STEP_S):
        while b"base model name" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    assert process.returncode == 0 and b"stopped before it was ready" in err and b"Traceback" not in err


async def test_a_store_that_hangs_holds_up_one_name_and_no_shutdown(tmp_path: Path) -> None:
    """A named pipe in the place of a record: opening it blocks, as a file on a dead mount does."""
    async with control_plane(tmp_path, *FLAGS) as (process, clients, workers):
        async with hash_worker(tmp_path, workers), grpc.aio.insecure_channel(clients) as channel:
            for seed, name in enumerate("ab"):
                await upload(channel, name, adapter_files(seed))
            record = tmp_path / "data" / "store" / "adapters" / "a.json"
            record.unlink()
            os.mkfifo(record)
            stub = adapters(channel)
            async with asyncio.timeout(STEP_S):
                code, reason, message = await refusal(stub.UpdateAdapter(update("a", "first")))
                assert (code, reason) == (UNAVAILABLE, "STORE_DOWN") and "may still be made" in message
                code, _, message = await refusal(stub.PinAdapter(adapters_pb2.PinAdapterRequest(name="adapters/a")))
                assert code == UNAVAILABLE and "an earlier change waits" in message
                assert (await stub.UpdateAdapter(update("b", "B"))).adapter.display_name == "B"
                assert (await stub.PinAdapter(adapters_pb2.PinAdapterRequest(name="adapters/b"))).adapter.pinned
                await upload(channel, "c", adapter_files(2))
                for name in ("a", "b", "c"):
                    assert len(tokens_of(await generate(channel, adapter=name))) == 12
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0

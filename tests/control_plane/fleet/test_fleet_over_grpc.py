"""A fleet behind a real port with plan clients in threads: tokens are exact whatever happens to the workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from contract.v1 import plan_pb2, plan_pb2_grpc
from control_plane.fleet.service import PIECE_BYTES
from control_plane.scheduler.types import AdapterRef, Request
from data_plane.wire import encode_hello
from tests.fakes.fleet_rig import CAPACITIES, FINGERPRINT, GrpcRig, expected, make_request, read_all
from tests.fakes.hash_engine import HashEngineFaults
from tests.fakes.tcp_proxy import TcpProxy


def mixed_requests(
    rig: GrpcRig, adapters: list[AdapterRef | None], num_requests: int, num_tokens: int
) -> list[Request]:
    return [
        make_request(rig.fleet, [7 + i, 3, i], num_tokens + i, adapters[i % len(adapters)]) for i in range(num_requests)
    ]


async def run(rig: GrpcRig, requests: list[Request]) -> list[list[int]]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*[read_all(rig.fleet.submit(request)) for request in requests])


async def test_mixed_adapters_on_two_workers_give_the_oracles_tokens() -> None:
    async with GrpcRig() as rig:
        await rig.add_worker("w0")
        await rig.add_worker("w1")
        adapters = [None, *(rig.weights.add(f"a{i}") for i in range(6))]
        requests = mixed_requests(rig, adapters, 28, 30)
        assert await run(rig, requests) == [expected(request) for request in requests]
        assert all(snapshot.num_tokens_sampled > 0 for snapshot in rig.fleet.worker_snapshots())
        assert rig.fleet.queue_snapshot().num_migrated == 0


async def test_worker_cut_off_mid_stream_loses_and_repeats_no_token() -> None:
    async with GrpcRig() as rig, TcpProxy(rig.port) as proxy:
        faults = HashEngineFaults(step_time_s=0.002)
        await rig.add_worker("w0", port=proxy.port, faults=faults)
        await rig.add_worker("w1", faults=faults)
        requests = mixed_requests(rig, [None, rig.weights.add("a")], 12, 60)
        streams = [rig.fleet.submit(request) for request in requests]
        begun = [(await anext(stream)).token_ids for stream in streams]
        proxy.cut()
        async with asyncio.timeout(30):
            rest = await asyncio.gather(*[read_all(stream) for stream in streams])
        assert [head + tail for head, tail in zip(begun, rest, strict=True)] == [
            expected(request) for request in requests
        ]
        assert rig.fleet.queue_snapshot().num_migrated > 0


async def test_both_workers_cut_off_and_both_come_back() -> None:
    async with GrpcRig() as rig, TcpProxy(rig.port) as proxy:
        faults = HashEngineFaults(step_time_s=0.002)
        workers = [await rig.add_worker(f"w{i}", port=proxy.port, faults=faults) for i in range(2)]
        requests = mixed_requests(rig, [None, rig.weights.add("a")], 12, 60)
        streams = [rig.fleet.submit(request) for request in requests]
        begun = [(await anext(stream)).token_ids for stream in streams]
        proxy.cut()
        async with asyncio.timeout(30):
            rest = await asyncio.gather(*[read_all(stream) for stream in streams])
        assert [head + tail for head, tail in zip(begun, rest, strict=True)] == [
            expected(request) for request in requests
        ]
        await rig.until(lambda: rig.fleet.num_workers == 2)
        assert all(worker.engine.num_resets == 1 for worker in workers)


async def test_frozen_worker_is_fenced_by_heartbeats_and_attaches_again() -> None:
    async with GrpcRig(heartbeat_interval_ms=50, dead_after_ms=200) as rig, TcpProxy(rig.port) as proxy:
        faults = HashEngineFaults(step_time_s=0.002)
        frozen = await rig.add_worker("w0", port=proxy.port, faults=faults)
        [before] = rig.fleet.worker_snapshots()
        await rig.add_worker("w1", faults=faults)
        requests = mixed_requests(rig, [None], 12, 80)
        streams = [rig.fleet.submit(request) for request in requests]
        begun = [(await anext(stream)).token_ids for stream in streams]
        proxy.freeze()
        async with asyncio.timeout(30):
            rest = await asyncio.gather(*[read_all(stream) for stream in streams])
        assert [head + tail for head, tail in zip(begun, rest, strict=True)] == [
            expected(request) for request in requests
        ]
        proxy.thaw()
        await rig.until(lambda: rig.fleet.num_workers == 2)
        assert rig.fleet.worker_snapshots()[0].epoch > before.epoch
        assert frozen.engine.num_resets > 0


async def test_crash_in_the_engine_ends_the_session_and_not_the_worker() -> None:
    async with GrpcRig() as rig:
        worker = await rig.add_worker("w0", faults=HashEngineFaults(crash_token=200))
        poison = rig.fleet.submit(make_request(rig.fleet, [200], 5))
        async with asyncio.timeout(30):
            with pytest.raises(Exception, match="3 workers died"):
                await read_all(poison)
        await rig.until(lambda: rig.fleet.num_workers == 1)
        request = next(
            request for request in (make_request(rig.fleet, [i], 8) for i in range(100)) if 200 not in expected(request)
        )
        assert await run(rig, [request]) == [expected(request)]
        assert worker.client.num_sessions == 4


async def test_worker_with_another_checkpoint_is_refused_and_gives_up() -> None:
    async with GrpcRig() as rig:
        await rig.add_worker("w0")
        other = replace(CAPACITIES, model_fingerprint=FINGERPRINT[::-1])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await rig.add_worker("w1", capacities=other)
        refused = rig.workers[-1]
        await refused.join()
        assert refused.exit_code == 1
        assert rig.fleet.num_workers == 1


async def test_stopped_worker_leaves_and_its_requests_go_on_elsewhere() -> None:
    async with GrpcRig() as rig:
        faults = HashEngineFaults(step_time_s=0.002)
        leaving = await rig.add_worker("w0", faults=faults)
        await rig.add_worker("w1", faults=faults)
        requests = mixed_requests(rig, [None], 8, 60)
        tokens = asyncio.gather(*[read_all(rig.fleet.submit(request)) for request in requests])
        await rig.until(lambda: rig.fleet.num_workers == 2)
        await leaving.stop()
        assert leaving.exit_code == 0
        assert await tokens == [expected(request) for request in requests]


async def test_a_session_that_ends_while_its_welcome_leaves_is_ended_for_the_worker_too() -> None:
    async with GrpcRig() as rig, grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        stub = plan_pb2_grpc.WorkerServiceStub(channel)
        leave = plan_pb2.AttachRequest(leave=plan_pb2.Leave(reason="at once"))
        for number in range(40):
            call = stub.Attach(iter([encode_hello(CAPACITIES, f"w{number}"), leave]), timeout=20)
            async for _ in call:
                pass
            assert await call.code() is grpc.StatusCode.OK


async def test_fetch_adapter_streams_the_manifest_and_pieces_of_at_most_one_mebibyte() -> None:
    async with GrpcRig() as rig:
        adapter = rig.weights.add("big", chunk_bytes=5 * PIECE_BYTES // 2)
        packed = rig.weights.packed[adapter.digest]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
            stub = plan_pb2_grpc.WorkerServiceStub(channel)
            parts = [part async for part in stub.FetchAdapter(plan_pb2.FetchAdapterRequest(digest=adapter.digest))]
            assert parts[0].manifest == packed.manifest
            assert [len(part.data) for part in parts[1:]] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES // 2]
            assert b"".join(part.data for part in parts[1:]) == packed.chunk_bytes[0]
            for digest, code in (
                ("0" * 64, grpc.StatusCode.UNAVAILABLE),
                ("../" * 21 + "x", grpc.StatusCode.INVALID_ARGUMENT),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.FetchAdapter(plan_pb2.FetchAdapterRequest(digest=digest)):
                        pass
                assert caught.value.code() is code


async def test_reader_of_an_adapter_that_stops_reading_holds_nothing() -> None:
    async with GrpcRig(write_timeout_s=0.2) as rig:
        adapter = rig.weights.add("big", chunk_bytes=64 * PIECE_BYTES)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
            stub = plan_pb2_grpc.WorkerServiceStub(channel)
            call = stub.FetchAdapter(plan_pb2.FetchAdapterRequest(digest=adapter.digest))
            assert (await call.read()).manifest
            async with asyncio.timeout(30):
                await rig.weights.packed[adapter.digest].left.wait()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                    pass
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_stream_that_does_not_begin_with_a_hello_is_refused() -> None:
    async with GrpcRig() as rig, grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        stub = plan_pb2_grpc.WorkerServiceStub(channel)
        call = stub.Attach(iter([plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat())]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

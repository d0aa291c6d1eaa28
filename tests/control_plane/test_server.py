"""A whole control plane process: builds, serves clients and a fake worker, shuts down on a signal, exits 0."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from motet.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc, status_pb2, status_pb2_grpc

from control_plane.config import ServerConfig, add_arguments, from_args
from control_plane.server import build
from tests.control_plane.api.tokenizers import byte_level_tokenizer
from tests.control_plane.server_processes import (
    STEP_S,
    adapter_files,
    checkpoint,
    control_plane,
    generate,
    hash_worker,
    ready_line,
    tokens_of,
    upload,
)


async def test_whole_control_plane_serves_a_worker_and_shuts_down(tmp_path: Path) -> None:
    async with control_plane(tmp_path) as (process, clients, workers), grpc.aio.insecure_channel(clients) as channel:
        async with hash_worker(tmp_path, workers, "--worker-id", "w0", "--step-time-ms", "5"):
            digests = {name: await upload(channel, name, adapter_files(seed)) for seed, name in enumerate(["a", "b"])}
            assert len(set(digests.values())) == 2
            responses = await asyncio.gather(*[generate(channel, adapter=name) for name in ("", "a", "b", "a")])
            base, first, second, again = [tokens_of(response) for response in responses]
            assert len(base) == 12 and first == again
            assert len({tuple(base), tuple(first), tuple(second)}) == 3  # the chain holds the adapter's digest
            assert responses[1][0].started.adapter_digest == digests["a"]
            text = "".join(response.delta.text for response in responses[1])
            assert text == byte_level_tokenizer().decode(first, skip_special_tokens=True)
            # A resumed stream goes on with the same tokens.
            resumed = await generate(channel, adapter="a", resume_from={"ids": first[:5]})
            assert first[:5] + tokens_of(resumed) == first
            await _check_admin(channel, digests["a"])
            await _check_shutdown(process, channel)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0


async def _check_admin(channel: grpc.aio.Channel, digest: str) -> None:
    adapters: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
    named = {"name": "adapters/a"}
    assert (await adapters.PinAdapter(adapters_pb2.PinAdapterRequest(**named))).adapter.pinned
    got = (await adapters.GetAdapter(adapters_pb2.GetAdapterRequest(**named))).adapter
    assert {place.tier for place in got.placements} == {1, 2, 3} and got.active_version.digest == digest
    status: Any = status_pb2_grpc.StatusServiceStub(channel)
    state = await status.GetStatus(status_pb2.GetStatusRequest())
    assert [worker.worker_id for worker in state.workers] == ["w0"]
    assert state.adapters.num_registered == 2 and state.adapters.host_cache_available
    assert state.queues.num_accepted == state.queues.num_finished == 5
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", "motet.v1.GenerationService", "motet.v1.AdapterService"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in reflection.ServerReflectionInfo(iter([request])):
        names = {service.name for service in response.list_services_response.service}
    assert {"motet.v1.GenerationService", "google.longrunning.Operations"} <= names
    assert "motet.worker.v1.WorkerService" not in names
    operation = await adapters.DeleteAdapter(adapters_pb2.DeleteAdapterRequest(**named))
    operations = operations_pb2_grpc.OperationsStub(channel)
    done = await operations.WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name), timeout=30)
    assert done.WhichOneof("result") == "response"
    state = await status.GetStatus(status_pb2.GetStatusRequest())
    assert (state.adapters.num_registered, state.adapters.num_stored, state.adapters.num_host_cached) == (1, 1, 1)


async def _check_shutdown(process: Process, channel: grpc.aio.Channel) -> None:
    """A stream that runs at SIGTERM ends whole; a new one is refused meanwhile."""
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(text="hello", stopping={"max_tokens": 200, "ignore_eos": True})
    responses = aiter(stub.Generate(request, timeout=30))
    assert (await anext(responses)).WhichOneof("event") == "started"
    health: Any = health_pb2_grpc.HealthStub(channel)
    changes = aiter(health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=30))
    assert (await anext(changes)).status == health_pb2.HealthCheckResponse.SERVING
    process.send_signal(signal.SIGTERM)
    assert (await anext(changes)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(channel)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE and "shutting down" in str(caught.value.details())
    rest = [response async for response in responses]
    assert rest[-1].finished.usage.completion_tokens == 200


async def test_registrations_and_pins_survive_a_restart(tmp_path: Path) -> None:
    flags = ("--host-cache", "memory")
    async with control_plane(tmp_path, *flags) as (process, clients, _):
        async with grpc.aio.insecure_channel(clients) as channel:
            digest = await upload(channel, "a", adapter_files(0))
            adapters: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
            await adapters.PinAdapter(adapters_pb2.PinAdapterRequest(name="adapters/a"))
        process.kill()
        await process.wait()
    async with control_plane(tmp_path, *flags) as (process, clients, workers):
        async with hash_worker(tmp_path, workers), grpc.aio.insecure_channel(clients) as channel:
            response = await generate(channel, adapter="a")
            assert response[0].started.adapter_digest == digest and len(tokens_of(response)) == 12
            adapters = adapters_pb2_grpc.AdapterServiceStub(channel)
            got = (await adapters.GetAdapter(adapters_pb2.GetAdapterRequest(name="adapters/a"))).adapter
            assert got.pinned
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0


async def test_what_workers_serve_decides_registration_and_is_known_after_a_restart(tmp_path: Path) -> None:
    """Before any worker the checkpoint decides; then the workers' word, while none is attached too."""
    flags = ("--host-cache", "memory", "--worker-grace-s", "60")
    unserved = ("--unserved", "q_proj", "--max-model-len", "40")
    async with control_plane(tmp_path, *flags) as (process, clients, workers):
        async with grpc.aio.insecure_channel(clients) as channel:
            await upload(channel, "early", adapter_files(0))
            assert await _context(channel) == 256
            async with hash_worker(tmp_path, workers, *unserved):
                await _check_unserved(channel)
            await _check_unserved(channel)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0
    async with (
        control_plane(tmp_path, *flags) as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
    ):
        await _check_unserved(channel)
        async with hash_worker(tmp_path, workers):
            assert await _context(channel) == 256
            assert len(tokens_of(await generate(channel, adapter="early"))) == 12
            await upload(channel, "late", adapter_files(1))


async def _context(channel: grpc.aio.Channel) -> int:
    stub: Any = status_pb2_grpc.StatusServiceStub(channel)
    return int((await stub.GetStatus(status_pb2.GetStatusRequest())).model.max_model_len)


async def _check_unserved(channel: grpc.aio.Channel) -> None:
    """Where q_proj takes no adapters and the context is 40."""
    reason = "model.layers.0.self_attn.q_proj, which takes no adapters: it sees only some of the tokens"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(channel, adapter="early")
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION and reason in (caught.value.details() or "")
    stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
    got = (await stub.GetAdapter(adapters_pb2.GetAdapterRequest(name="adapters/early"))).adapter
    assert got.state == adapters_pb2.ADAPTER_STATE_FAILED and reason in got.state_reason
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await upload(channel, "late", adapter_files(1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "takes no adapters: it sees only some of the tokens" in (caught.value.details() or "")
    assert await _context(channel) == 40
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(channel, stopping={"max_tokens": 40})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "context of 40" in (caught.value.details() or "")


async def test_worker_hears_why_and_outlives_a_control_plane_that_fails(tmp_path: Path) -> None:
    """Whatever ends the process, the fleet ends its streams before the ports close, and the worker reconnects."""
    model = checkpoint(tmp_path / "model")
    flags = ["--model", str(model), "--data-dir", str(tmp_path / "data"), "--host-cache", "memory"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def config(worker_port: int) -> ServerConfig:
        addresses = ["--listen", "127.0.0.1:0", "--worker-listen", f"127.0.0.1:{worker_port}"]
        return from_args(parser.parse_args([*flags, *addresses]))

    async with contextlib.AsyncExitStack() as worker_stack:
        with pytest.raises(RuntimeError, match="a failure after the start"):
            async with contextlib.AsyncExitStack() as stack:
                plane = await build(config(0), stack)
                worker = await worker_stack.enter_async_context(
                    hash_worker(tmp_path, plane.worker_address, "--worker-id", "w0", "--log-level", "info")
                )
                raise RuntimeError("a failure after the start")
        assert worker.stderr is not None and worker.stdout is not None
        async with asyncio.timeout(STEP_S):
            while b"session ended" not in (said := await worker.stderr.readline()):
                assert said, "the worker ended without a word of its session"
        assert said.endswith(b"session ended worker_id=w0: UNAVAILABLE: the control plane is shutting down\n")
        async with contextlib.AsyncExitStack() as stack:
            await build(config(int(plane.worker_address.rpartition(":")[2])), stack)
            await ready_line(worker, r"^motet worker ready worker_id=w0 epoch=\d+$")
        assert worker.returncode is None


async def test_chat_template_that_never_ends_holds_up_neither_others_nor_the_end(tmp_path: Path) -> None:
    loops = "{% for i in range(90000) %}" * 3 + "{% endfor %}" * 3
    template = "{% if messages[0].content == 'loop' %}" + loops + "{% endif %}{{ messages[0].content }}"
    (checkpoint(tmp_path / "model") / "chat_template.jinja").write_text(template)
    flags = ("--host-cache", "memory")

    def chat(content: str) -> dict[str, Any]:
        return {"text": None, "chat": {"messages": [{"role": "user", "content": content}]}}

    async with (
        control_plane(tmp_path, *flags) as (process, clients, workers),
        hash_worker(tmp_path, workers),
        grpc.aio.insecure_channel(clients) as channel,
    ):
        looping = asyncio.create_task(generate(channel, **chat("loop")))
        assert len(tokens_of(await generate(channel))) == 12
        with pytest.raises(grpc.aio.AioRpcError, match="more than 2 s of CPU time") as caught:
            await looping
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len(tokens_of(await generate(channel, **chat("hello")))) == 12
        looping = asyncio.create_task(generate(channel, **chat("loop")))
        await asyncio.sleep(0.1)  # it runs
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0
        await asyncio.gather(looping, return_exceptions=True)

"""A whole control plane process: builds, serves clients and a fake worker, drains on a signal, exits 0."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import motet
import numpy as np
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from motet.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc, status_pb2, status_pb2_grpc
from safetensors.numpy import save, save_file

from control_plane.config import ConfigError, ServerConfig, add_arguments, from_args
from control_plane.registry.store.store_files import StoreLocked
from control_plane.server import build
from tests.control_plane.api.fakes import byte_level_tokenizer

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, LAYERS, VOCAB = 16, 2, 512
STEP_S = 60.0  # a loaded machine may take long to start a process


def checkpoint(directory: Path) -> Path:
    """A tiny Llama that only its shapes matter of."""
    directory.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)  # type: ignore[assignment]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = (2 * HIDDEN, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (HIDDEN,)  # type: ignore[assignment]
    generator = np.random.default_rng(1)
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def adapter_files(seed: int) -> dict[str, bytes]:
    generator = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = generator.standard_normal((4, HIDDEN)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = generator.standard_normal((HIDDEN, 4)).astype(np.float32)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


async def start(module: str, *argv: str, cwd: Path) -> Process:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *argv, cwd=cwd, env=environment, stdout=PIPE, stderr=PIPE
    )


async def ready_line(process: Process, pattern: str) -> re.Match[str]:
    assert process.stdout is not None and process.stderr is not None
    line = (await asyncio.wait_for(process.stdout.readline(), STEP_S)).decode()
    match = re.search(pattern, line)
    if match is None:
        process.kill()
        raise AssertionError(f"{line!r}\n{(await process.stderr.read()).decode()[-3000:]}")
    return match


@contextlib.asynccontextmanager
async def control_plane(directory: Path, *flags: str) -> AsyncIterator[tuple[Process, str, str]]:
    model = directory / "model"
    if not model.exists():
        checkpoint(model)
    process = await start(
        "control_plane",
        *("--model", str(model), "--data-dir", str(directory / "data"), "--listen", "127.0.0.1:0"),
        *("--worker-listen", "127.0.0.1:0", *flags),
        cwd=directory,
    )
    try:
        match = await ready_line(process, r"^motet control-plane ready clients=(\S+) workers=(\S+)$")
        yield process, match[1], match[2]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def hash_worker(directory: Path, address: str, *flags: str) -> AsyncIterator[Process]:
    process = await start(
        "tests.fakes.hash_worker",
        "--control-plane",
        address,
        "--model",
        str(directory / "model"),
        *flags,
        cwd=directory,
    )
    try:
        await ready_line(process, r"^motet worker ready worker_id=\S+ epoch=\d+$")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def upload(channel: grpc.aio.Channel, adapter_id: str, files: dict[str, bytes]) -> str:
    parts = [
        adapters_pb2.UploadAdapterRequest(
            header={
                "adapter_id": adapter_id,
                "files": [
                    {"name": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                    for name, data in files.items()
                ],
            }
        )
    ]
    parts += [
        adapters_pb2.UploadAdapterRequest(chunk={"file_index": index, "offset": 0, "data": data})
        for index, data in enumerate(files.values())
    ]
    stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
    return str((await stub.UploadAdapter(iter(parts), timeout=30)).adapter.active_version.digest)


async def generate(channel: grpc.aio.Channel, **fields: Any) -> list[generation_pb2.GenerateResponse]:
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    fields = {"text": "hello", "stopping": {"max_tokens": 12, "ignore_eos": True}, **fields}
    return [response async for response in stub.Generate(generation_pb2.GenerateRequest(**fields), timeout=30)]


def tokens_of(responses: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.delta.token_ids]


async def test_whole_control_plane_serves_a_worker_and_drains(tmp_path: Path) -> None:
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
            await _check_drain(process, channel)
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


async def _check_drain(process: Process, channel: grpc.aio.Channel) -> None:
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


async def test_broken_tokenizer_file_ends_the_start_with_a_line_that_names_it(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"template": "x"}]}))
    process = await start("control_plane", "--model", str(model), "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    _, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 2
    last = err.decode().splitlines()[-1]
    assert 'tokenizer_config.json: chat_template[0] has no string "name"' in last and b"Traceback" not in err


async def test_second_server_on_a_directory_touches_nothing_of_the_first(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--model", str(model), "--data-dir", str(tmp_path / "data"), "--host-cache", "memory"]
    config = from_args(parser.parse_args([*flags, "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]))
    under_way = [tmp_path / "data" / name / "under-way" for name in ("uploads", "scratch")]
    async with contextlib.AsyncExitStack() as stack:
        await build(config, stack)
        for file in under_way:
            file.write_bytes(b"half")
        # Whatever the second one has for a store: the directory itself is the first one's.
        for other in (config, replace(config, store=str(tmp_path / "other")), replace(config, store="memory://other")):
            with pytest.raises(ConfigError, match=r"--data-dir: .* in use by another control plane"):
                async with contextlib.AsyncExitStack() as second:
                    await build(other, second)
        elsewhere = replace(config, data_dir=tmp_path / "elsewhere", store=str(tmp_path / "data" / "store"))
        with pytest.raises(StoreLocked):
            async with contextlib.AsyncExitStack() as second:
                await build(elsewhere, second)
        assert all(file.read_bytes() == b"half" for file in under_way)
    async with contextlib.AsyncExitStack() as stack:
        await build(config, stack)
        assert not any(file.exists() for file in under_way)  # what a killed server left goes


async def test_second_server_on_a_directory_spares_the_redis_of_the_first(tmp_path: Path) -> None:
    """It was taken for the leftover of a killed server, and killed."""
    async with control_plane(tmp_path) as (first, _, _):
        pid = int((tmp_path / "data" / "redis" / "redis.pid").read_text())
        second = await start(
            "control_plane",
            *("--model", str(tmp_path / "model"), "--data-dir", str(tmp_path / "data")),
            *("--store", str(tmp_path / "other"), "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
            cwd=tmp_path,
        )
        out, err = await asyncio.wait_for(second.communicate(), STEP_S)
        assert second.returncode == 2 and not out
        assert b"--data-dir: " in err and b"in use by another control plane" in err and b"Traceback" not in err
        os.kill(pid, 0)
        assert first.returncode is None


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        (
            "--data-dir",
            "/proc/nope",
            "--data-dir: /proc/nope cannot be made or locked: No such file or directory; give a",
        ),
        ("--store", "s3://bucket/path", "--store: s3://: needs a Python package that is not installed (Install s3fs"),
        (
            "--redis-url",
            "redis://:pw@h?ssl_verify=no",
            "--redis-url: has an option that redis-py does not know: ssl_ver",
        ),
        ("--worker-redis-url", "unix:///s?a=b", "--worker-redis-url: has an option that redis-py does not know: a"),
    ],
)
async def test_a_place_that_cannot_be_used_is_named_with_its_flag(
    tmp_path: Path, flag: str, value: str, words: str
) -> None:
    model = checkpoint(tmp_path / "model")
    flags = ("--model", str(model), "--data-dir", str(tmp_path / "data"), flag, value)
    process = await start("control_plane", *flags, cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    last = err.decode().strip().splitlines()[-1]
    assert process.returncode == 2 and not out
    assert last.startswith("motet control-plane: ") and words in last and "Traceback" not in err.decode()


async def test_start_shows_people_what_is_served_and_what_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--model", str(model), "--data-dir", str(tmp_path / "data"), "--host-cache", "memory"]
    config = from_args(parser.parse_args([*flags, "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]))
    with caplog.at_level(logging.INFO):
        async with contextlib.AsyncExitStack() as stack:
            await build(config, stack)
    shown = [vars(record).get("shown") for record in caplog.records]
    assert f"Motet {motet.__version__} serves {model}" in shown
    assert "base model model: llama, 2 layers, float32, context 256 tokens" in shown
    assert f"0 adapters registered in {tmp_path / 'data' / 'store'}" in shown
    assert "host cache for adapters: this process's memory, up to 2.0 GiB" in shown
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("text is off, token ids work: the checkpoint has no tokenizer")
    assert warnings[0].endswith(f"; put a tokenizer.json into {model}")


async def test_wrong_setting_ends_with_a_line_that_names_it(tmp_path: Path) -> None:
    process = await start("control_plane", "--model", str(tmp_path), cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 2 and not out
    assert err.startswith(b"motet control-plane: --model: ") and err.count(b"\n") == 1 and b"config.json" in err


async def test_too_low_a_limit_of_open_files_ends_the_start_before_anything_is_touched(tmp_path: Path) -> None:
    model, data_dir = checkpoint(tmp_path / "model"), tmp_path / "data"
    program = 'ulimit -n 300 && exec "$0" -m control_plane "$@"'
    flags = ("--model", str(model), "--data-dir", str(data_dir))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", program, sys.executable, *flags), cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 2 and not out and not data_dir.exists()
    assert b"--max-connections: " in err.splitlines()[-1] and b"ulimit -Hn" in err.splitlines()[-1]


async def test_checkpoint_that_cannot_be_served_ends_as_a_wrong_setting_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    process = await start("control_plane", "--model", str(tmp_path), "--host-cache", "memory", cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 2 and not out
    assert b"motet control-plane: " in err.splitlines()[-1] and b"quantised checkpoints are not served" in err

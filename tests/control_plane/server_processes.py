"""Starts control planes and hash workers as processes of their own, and calls them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from motet.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc
from safetensors.numpy import save, save_file

from tests.control_plane.api.tokenizers import byte_level_tokenizer
from tests.secret_scan import ENVIRONMENT, METADATA, SCAN, plant_redis_passwords

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
    """A process whose output is searched for planted secrets when it is read by `communicate`."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *argv, cwd=cwd, env=environment, stdout=PIPE, stderr=PIPE
    )
    communicate = process.communicate

    async def communicate_and_look(input: Any = None) -> tuple[bytes, bytes]:
        out, err = await communicate(input)
        SCAN.look(f"the output of {module}", out + err)
        return out, err

    process.communicate = communicate_and_look  # type: ignore[method-assign]
    return process


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
        plant_redis_passwords(directory / "data")
        SCAN.look_at_arguments(process.pid)
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
        SCAN.look_at_arguments(process.pid)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def upload(channel: grpc.aio.Channel, adapter_id: str, files: dict[str, bytes], metadata: Any = METADATA) -> str:
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
    return str((await stub.UploadAdapter(iter(parts), timeout=30, metadata=metadata)).adapter.active_version.digest)


async def generate(channel: grpc.aio.Channel, **fields: Any) -> list[generation_pb2.GenerateResponse]:
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    fields = {"text": "hello", "stopping": {"max_tokens": 12, "ignore_eos": True}, **fields}
    request = generation_pb2.GenerateRequest(**fields)
    return [response async for response in stub.Generate(request, timeout=30, metadata=METADATA)]


def tokens_of(responses: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.delta.token_ids]

"""LoRA tasks through a whole control plane with hash workers, where every digest gives tokens of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import motet
import pytest
from google.rpc import error_details_pb2, status_pb2
from motet.v1 import adapters_pb2, generation_pb2, generation_pb2_grpc

from tests.control_plane.server_processes import STEP_S, adapter_files, control_plane, hash_worker, upload

PROMPT = [7, 8, 9]
Request = generation_pb2.GenerateWithTaskRequest


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        **{"token_ids": {"ids": PROMPT}, "stopping": {"max_tokens": 6, "ignore_eos": True}, **fields}
    )


def with_weights(files: dict[str, bytes], **fields: Any) -> Iterator[generation_pb2.GenerateWithTaskRequest]:
    listed = [
        adapters_pb2.UploadFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]
    yield Request(header=generation_pb2.GenerateWithTaskHeader(request=request(**fields), files=listed))
    for index, data in enumerate(files.values()):
        yield Request(chunk=adapters_pb2.UploadChunk(file_index=index, data=data))


@dataclass(frozen=True)
class Refusal:
    code: grpc.StatusCode
    reason: str
    message: str


@dataclass(frozen=True)
class Served:
    """A control plane with a hash worker."""

    channel: grpc.aio.Channel
    address: str

    async def generate(self, *, tenant: str = "acme", **fields: Any) -> tuple[Any, list[int]] | Refusal:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        call = stub.Generate(request(**fields), timeout=STEP_S, metadata=(("motet-tenant", tenant),))
        return await _outcome(call)

    async def send(self, seed: int, *, tenant: str = "acme", **fields: Any) -> tuple[Any, list[int]] | Refusal:
        # Blocking: where the server refuses early, grpc.aio reports the write that failed because of that.
        messages = with_weights(adapter_files(seed), **fields)

        def send() -> tuple[Any, list[int]] | Refusal:
            with grpc.insecure_channel(self.address) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                call = stub.GenerateWithTask(messages, timeout=STEP_S, metadata=(("motet-tenant", tenant),))
                try:
                    return _read([message.response for message in call])
                except grpc.RpcError as error:
                    return _refusal(error)

        return await asyncio.to_thread(send)


async def _outcome(call: Any) -> tuple[Any, list[int]] | Refusal:
    try:
        return _read([response async for response in call])
    except grpc.aio.AioRpcError as error:
        return _refusal(error)


def _read(responses: list[generation_pb2.GenerateResponse]) -> tuple[Any, list[int]]:
    started = [response.started for response in responses if response.HasField("started")]
    return started[0], [token for response in responses for token in response.delta.token_ids]


def _refusal(error: Any) -> Refusal:
    status, info = status_pb2.Status(), error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    for detail in status.details:
        detail.Unpack(info)
    return Refusal(error.code(), info.reason, str(error.details()))


@asynccontextmanager
async def served(tmp_path: Path, *flags: str) -> AsyncIterator[tuple[Served, str]]:
    async with (
        control_plane(tmp_path, "--host-cache", "memory", *flags) as (_, clients, workers),
        hash_worker(tmp_path, workers),
        grpc.aio.insecure_channel(clients) as channel,
    ):
        yield Served(channel, clients), clients


def outcome(got: tuple[Any, list[int]] | Refusal) -> tuple[Any, list[int]]:
    assert not isinstance(got, Refusal), got
    return got


async def test_later_requests_send_the_id_alone_and_only_their_tenant_has_it(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, _):
        base = outcome(await server.generate())[1]
        miss = await server.generate(lora_task_id=7)
        assert miss == Refusal(
            grpc.StatusCode.NOT_FOUND,
            "LORA_TASK_NOT_CACHED",
            "LoRA task 7 is not cached; send the weights again (GenerateWithTask, LoraTask(7, directory), "
            "motet generate --lora-task 7 --lora-weights DIR)",
        )
        started, tokens = outcome(await server.send(1, lora_task_id=7))
        assert len(tokens) == 6 and tokens != base
        assert (started.adapter, started.lora_task_id) == ("lora_tasks/7", 7) and len(started.adapter_digest) == 64
        again, same = outcome(await server.generate(lora_task_id=7, adapter_digest=started.adapter_digest))
        assert same == tokens and again.adapter_digest == started.adapter_digest
        assert await server.generate(lora_task_id=7, tenant="globex") == miss
        other = await server.generate(lora_task_id=7, adapter_digest="0" * 64)
        assert isinstance(other, Refusal) and other.reason == "LORA_TASK_NOT_CACHED"
        # Other weights under the same id: refused by name, and the first ones stay.
        taken = await server.send(2, lora_task_id=7)
        assert isinstance(taken, Refusal) and (taken.code, taken.reason) == (
            grpc.StatusCode.ALREADY_EXISTS,
            "LORA_TASK_TAKEN",
        )
        assert "use another id" in taken.message
        assert outcome(await server.generate(lora_task_id=7))[1] == tokens
        assert outcome(await server.send(1, lora_task_id=7))[1] == tokens
        theirs = outcome(await server.send(2, lora_task_id=7, tenant="globex"))[1]
        assert theirs not in (tokens, base)
        both = await server.generate(lora_task_id=7, adapter="poet")
        assert isinstance(both, Refusal) and both.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_evicted_task_is_sent_again_and_no_slot_or_cache_keeps_its_weights(tmp_path: Path) -> None:
    async with served(tmp_path, "--task-cache-bytes", "8KiB") as (server, _):
        first = outcome(await server.send(1, lora_task_id=1))[1]
        tokens = {}
        for task_id in range(2, 8):
            tokens[task_id] = outcome(await server.send(task_id, lora_task_id=task_id))[1]
        gone = await server.generate(lora_task_id=1)
        assert isinstance(gone, Refusal) and gone.reason == "LORA_TASK_NOT_CACHED"
        assert outcome(await server.generate(lora_task_id=7))[1] == tokens[7]
        # The id may get other weights now; what the slots and the prefix cache had of it is not used.
        assert outcome(await server.send(9, lora_task_id=1))[1] not in (first, *tokens.values())
        assert outcome(await server.send(1, lora_task_id=20))[1] == first


async def test_a_name_with_the_same_weights_stays_when_the_task_goes_and_the_other_way_round(tmp_path: Path) -> None:
    async with served(tmp_path, "--task-cache-bytes", "8KiB") as (server, address):
        tokens = outcome(await server.send(1, lora_task_id=1))[1]
        await upload(server.channel, "poet", adapter_files(1))
        for task_id in range(2, 8):
            await server.send(task_id, lora_task_id=task_id)
        assert isinstance(await server.generate(lora_task_id=1), Refusal)
        assert outcome(await server.generate(adapter="poet", tenant="default"))[1] == tokens
        outcome(await server.send(1, lora_task_id=1))

        def delete() -> None:
            with motet.Client(address) as client:
                client.adapters.delete("poet")

        await asyncio.to_thread(delete)
        assert outcome(await server.generate(lora_task_id=1))[1] == tokens


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--task-cache-bytes", "0"), "caches no LoRA tasks (--task-cache-bytes, --task-cache-memory-share)"),
        (("--task-cache-memory-share", "0"), "caches no LoRA tasks"),
        (("--task-cache-bytes", "1000"), "the server caches at most 1000 bytes of LoRA tasks (--task-cache-bytes"),
    ],
)
async def test_a_cache_that_is_off_or_too_small_says_so_with_its_flag(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    async with served(tmp_path, *flags) as (server, _):
        refused = await server.send(1, lora_task_id=1)
        assert isinstance(refused, Refusal) and refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in refused.message

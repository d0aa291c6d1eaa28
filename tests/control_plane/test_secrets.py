"""A whole control plane with a secret wherever it takes one: none comes out, under load, in faults and in errors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from motet.v1 import adapters_pb2, adapters_pb2_grpc, status_pb2, status_pb2_grpc

from tests.control_plane.host_cache.rig import RedisProcess
from tests.control_plane.host_cache.test_redis_client import documented_users
from tests.control_plane.server_processes import (
    STEP_S,
    adapter_files,
    control_plane,
    generate,
    hash_worker,
    tokens_of,
    upload,
)
from tests.fakes.tcp_proxy import TcpProxy
from tests.secret_scan import API_KEY, JWT, METADATA, SecretScan

# What clients send as a credential, right and wrong. Errors must not repeat it.
CREDENTIALS = (
    METADATA,
    (("authorization", f"Bearer {API_KEY}"),),
    (("authorization", f"Basic {JWT}"),),
    (("authorization", API_KEY),),
    (*METADATA, *METADATA),
)


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    (tmp_path / "r").mkdir()
    process = RedisProcess(tmp_path / "r")
    yield process
    process.kill()


@pytest.fixture
def passwords(redis_process: RedisProcess, planted_secrets: SecretScan) -> dict[str, str]:
    """Of the two users of docs/security.md, who exist then."""
    made = {}
    for command in documented_users():
        user = command[2]
        made[user] = planted_secrets.plant(f"Redis password of {user}")
        redis_process.client.execute_command(*(f">{made[user]}" if word.startswith(">") else word for word in command))
    return made


@contextlib.asynccontextmanager
async def system(
    directory: Path, address_of: dict[str, str], environment: pytest.MonkeyPatch, *worker_flags: str
) -> AsyncIterator[tuple[Any, str, list[bytes]]]:
    """A control plane with these variables, a worker behind a relay, and what passed the relay."""
    for name, value in address_of.items():
        environment.setenv(name, value)
    passed: list[bytes] = []
    flags = ("--exclusive-store", "--log-level", "debug")
    async with control_plane(directory, *flags) as (process, clients, workers):
        for name in address_of:
            environment.delenv(name)  # the worker's process has none of them
        async with (
            TcpProxy(int(workers.rpartition(":")[2]), on_bytes=passed.append) as relay,
            hash_worker(directory, f"127.0.0.1:{relay.port}", "--log-level", "debug", *worker_flags),
        ):
            yield process, clients, passed


def urls(redis_process: RedisProcess, passwords: dict[str, str], store: str) -> dict[str, str]:
    def url(user: str) -> str:
        return redis_process.url.replace("unix://", f"unix://{user}:{passwords[user]}@")

    return {
        "MOTET_REDIS_URL": url("motet-server"),
        "MOTET_WORKER_REDIS_URL": url("motet-worker"),
        "MOTET_STORE": f"memory://key:{store}@bucket/adapters",
    }


async def provoke(channel: grpc.aio.Channel) -> list[str]:
    """Every kind of call with every credential, right and wrong; the texts of all responses."""
    adapters: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
    status: Any = status_pb2_grpc.StatusServiceStub(channel)
    operations: Any = operations_pb2_grpc.OperationsStub(channel)
    texts = []
    for metadata in CREDENTIALS:
        for call in (
            status.GetStatus(status_pb2.GetStatusRequest(), metadata=metadata, timeout=30),
            adapters.GetAdapter(adapters_pb2.GetAdapterRequest(name="adapters/none"), metadata=metadata, timeout=30),
            adapters.ListAdapters(adapters_pb2.ListAdaptersRequest(page_token="no"), metadata=metadata, timeout=30),
            operations.GetOperation(
                operations_pb2.GetOperationRequest(name="operations/none"), metadata=metadata, timeout=30
            ),
        ):
            try:
                texts.append(str(await call))
            except grpc.aio.AioRpcError as error:
                texts += [str(error.details()), str(error.trailing_metadata())]
    return texts


async def test_no_secret_comes_out_of_a_system_that_works_and_breaks(
    tmp_path: Path,
    redis_process: RedisProcess,
    passwords: dict[str, str],
    planted_secrets: SecretScan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = planted_secrets.plant("credential in the store's URL")
    file = tmp_path / "worker.pw"
    file.write_text(passwords["motet-worker"] + "\n")
    variables = urls(redis_process, passwords, store)
    flags = ("--worker-redis-password-file", str(file))
    async with system(tmp_path, variables, monkeypatch, *flags) as (process, clients, passed):
        async with grpc.aio.insecure_channel(clients) as channel:
            await upload(channel, "a", adapter_files(0))
            assert len(tokens_of(await generate(channel, adapter="a"))) == 12
            texts = await provoke(channel)
            redis_process.client.execute_command("ACL", "SETUSER", "motet-server", "-get")
            await upload(channel, "b", adapter_files(1))
            assert len(tokens_of(await generate(channel, adapter="b"))) == 12
            redis_process.client.execute_command("ACL", "SETUSER", "motet-server", "resetpass", ">other")
            redis_process.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await upload(channel, "c", adapter_files(2))
            assert len(tokens_of(await generate(channel, adapter="c"))) == 12
            texts += await provoke(channel)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), STEP_S) == 0
    for text in texts:
        planted_secrets.look("what clients received", text)
    planted_secrets.look("the worker's stream, which is not encrypted", b"".join(passed))
    assert len(texts) > 40 and b"motet-worker@" in b"".join(passed)
    # What processes wrote was searched when they ended; none of it may be found at the end of this test.
    assert planted_secrets.take_leaks() == []


async def test_a_worker_without_the_password_is_sent_none_and_serves_all_the_same(
    tmp_path: Path,
    redis_process: RedisProcess,
    passwords: dict[str, str],
    planted_secrets: SecretScan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = urls(redis_process, passwords, planted_secrets.plant("credential in the store's URL"))
    async with (
        system(tmp_path, variables, monkeypatch) as (_, clients, passed),
        grpc.aio.insecure_channel(clients) as channel,
    ):
        await upload(channel, "a", adapter_files(0))
        assert len(tokens_of(await generate(channel, adapter="a"))) == 12
    sent = b"".join(passed)
    assert b"motet-worker@" in sent and b"FetchAdapter" in sent
    assert all(password.encode() not in sent for password in passwords.values())

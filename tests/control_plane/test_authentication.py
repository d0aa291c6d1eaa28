"""A control plane process that knows its users: every method with no credential, a wrong one, and the right one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc

from control_plane.access.authentication.grants import Grant
from control_plane.access.authentication.key_file import KeyEntry, change_keys, new_key
from control_plane.access.methods import REQUIREMENTS, Anyone
from control_plane.access.principal import Role
from tests.control_plane.access.authentication.tokens import AUDIENCE, ISSUER, jwk, jwks, private_key, token
from tests.control_plane.api.rpc.test_callers import CLIENT_METHODS
from tests.control_plane.server_processes import STEP_S, adapter_files, control_plane, hash_worker, upload
from tests.fakes.authority import LOCALHOST, Authority

REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def add_key(path: Path, *roles: Role, tenant: str = "acme") -> tuple[KeyEntry, str]:
    entry, key = new_key(set(), Grant(tenants=(tenant,), roles=roles))
    change_keys(path, lambda entries: (*entries, entry), may_create=True)
    return entry, key


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def code_of(channel: Any, method: str, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    """How a call without any request ends; a stream is left after its first response."""
    call = channel.stream_stream(method)(iter([]), timeout=STEP_S, metadata=metadata)
    try:
        async for _ in call:
            break
        else:
            return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


async def test_every_method_wants_a_valid_key_of_the_right_role(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {role: add_key(path, role)[1] for role in Role}
    admin = keys[Role.ADMIN]
    wrong = admin[:-1] + ("0" if admin[-1] != "0" else "1")
    flags = ("--host-cache", "memory", "--api-keys", str(path))
    async with (
        control_plane(tmp_path, *flags) as (_, clients, _workers),
        grpc.aio.insecure_channel(clients) as channel,
    ):
        for method in CLIENT_METHODS:
            requirement = REQUIREMENTS[method]
            without = {await code_of(channel, method, ()), await code_of(channel, method, bearer(wrong))}
            if requirement is Anyone.UNKNOWN:
                assert without.isdisjoint(REFUSALS), method
                continue
            assert without == {grpc.StatusCode.UNAUTHENTICATED}, method
            assert await code_of(channel, method, bearer(admin)) not in REFUSALS, method
            other = Role.ADAPTERS_READ if requirement is Role.INFER else Role.INFER
            code = await code_of(channel, method, bearer(keys[other]))
            assert (code == grpc.StatusCode.PERMISSION_DENIED) == isinstance(requirement, Role), method
            elsewhere = (*bearer(admin), ("motet-tenant", "labs"))
            assert await code_of(channel, method, elsewhere) == grpc.StatusCode.PERMISSION_DENIED, method


async def test_a_revoked_key_is_refused_and_its_stream_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    entry, key = add_key(path, Role.INFER)
    flags = ("--host-cache", "memory", "--api-keys", str(path))
    async with control_plane(tmp_path, *flags) as (process, clients, workers):
        async with (
            hash_worker(tmp_path, workers, "--step-time-ms", "20"),
            grpc.aio.insecure_channel(clients) as channel,
        ):
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            request = generation_pb2.GenerateRequest(text="hello", stopping={"max_tokens": 240, "ignore_eos": True})
            stream = aiter(stub.Generate(request, timeout=STEP_S, metadata=bearer(key)))
            assert (await anext(stream)).WhichOneof("event") == "started"
            change_keys(path, lambda entries: tuple(item for item in entries if item != entry))
            async with asyncio.timeout(STEP_S):
                while await code_of(channel, "/motet.v1.StatusService/GetStatus", bearer(key)) not in REFUSALS:
                    await asyncio.sleep(0.05)  # between two looks of the server at its files
            assert [response async for response in stream][-1].finished.usage.completion_tokens == 240
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [item async for item in stub.Generate(request, timeout=STEP_S, metadata=bearer(key))]
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), STEP_S)
    assert key not in log.decode() and entry.sha256 not in log.decode()
    assert "authentication on methods=API keys (1)" in log.decode() and "file read again what=API keys" in log.decode()


async def test_an_upload_that_began_before_its_key_was_revoked_ends_and_the_next_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    entry, key = add_key(path, Role.ADAPTERS_WRITE)
    flags = ("--host-cache", "memory", "--api-keys", str(path))
    async with (
        control_plane(tmp_path, *flags) as (_, clients, _workers),
        grpc.aio.insecure_channel(clients) as channel,
    ):
        files = adapter_files(1)
        listed = [
            {"name": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        ]
        stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
        call = stub.UploadAdapter(timeout=STEP_S, metadata=bearer(key))
        await call.write(adapters_pb2.UploadAdapterRequest(header={"adapter_id": "poet", "files": listed}))
        change_keys(path, lambda entries: tuple(item for item in entries if item != entry))
        async with asyncio.timeout(STEP_S):
            while await code_of(channel, "/motet.v1.StatusService/GetStatus", bearer(key)) not in REFUSALS:
                await asyncio.sleep(0.05)  # between two looks of the server at its files
        for index, data in enumerate(files.values()):
            chunk = {"file_index": index, "offset": 0, "data": data}
            await call.write(adapters_pb2.UploadAdapterRequest(chunk=chunk))
        await call.done_writing()
        assert (await call).adapter.name == "adapters/poet"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await upload(channel, "other", files, bearer(key))
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@contextlib.asynccontextmanager
async def with_tokens_and_certificates(tmp_path: Path, authority: Authority) -> AsyncIterator[str]:
    """The address of a control plane with both."""
    cert, key = authority.issue(*LOCALHOST).write(tmp_path)
    (tmp_path / "jwks.json").write_bytes(jwks(jwk(private_key("ES256"), "es")))
    grant = {"tenants": ["acme"], "roles": ["infer"]}
    (tmp_path / "identities.json").write_text(json.dumps({"spiffe://acme/alice": grant}))
    flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority.write(tmp_path))]
    flags += ["--client-identities", str(tmp_path / "identities.json"), "--jwt-jwks", str(tmp_path / "jwks.json")]
    flags += ["--jwt-issuer", ISSUER, "--jwt-audience", AUDIENCE, "--host-cache", "memory"]
    async with control_plane(tmp_path, *flags) as (_, clients, _workers):
        yield f"localhost:{clients.rpartition(':')[2]}"


async def test_tokens_and_certificates_over_tls(tmp_path: Path) -> None:
    authority = Authority()
    now_s = int(time.time())
    good = token(private_key("ES256"), "ES256", roles="adapters.read", exp=now_s + 600)
    late = token(private_key("ES256"), "ES256", roles="adapters.read", exp=now_s - 61)
    alice, bob = authority.issue("spiffe://acme/alice"), authority.issue("spiffe://acme/bob")
    generation, adapters = "/motet.v1.GenerationService/Generate", "/motet.v1.AdapterService/ListAdapters"
    async with with_tokens_and_certificates(tmp_path, authority) as address:
        for own, metadata, expected in (
            (alice, (), (False, True)),  # alice's certificate has the role infer
            (bob, (), (True, True)),
            (alice, bearer(good), (True, False)),  # the token decides, and has the role adapters.read
            (bob, bearer(good), (True, False)),
            (alice, bearer(late), (True, True)),
            (alice, bearer("sesame"), (True, True)),
        ):
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.secure_channel(address, authority.channel_credentials(own), options) as channel:
                codes = [await code_of(channel, method, metadata) for method in (generation, adapters)]
            assert tuple(code in REFUSALS for code in codes) == expected, (metadata, codes)


async def test_the_file_of_tenants_bounds_what_a_tenant_pins(tmp_path: Path) -> None:
    keys, tenants = tmp_path / "keys.json", tmp_path / "tenants.json"
    _, key = add_key(keys, Role.ADAPTERS_WRITE, tenant="team-a")
    tenants.write_text(json.dumps({"team-a": {"max_pinned_bytes": 1}}))
    flags = ("--host-cache", "memory", "--api-keys", str(keys), "--tenants", str(tenants))
    async with (
        control_plane(tmp_path, *flags) as (_, clients, _workers),
        grpc.aio.insecure_channel(clients) as channel,
    ):
        stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
        await upload(channel, "poet", adapter_files(1), bearer(key))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = adapters_pb2.PinAdapterRequest(name="adapters/poet")
            await stub.PinAdapter(request, timeout=STEP_S, metadata=bearer(key))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_pinned_bytes" in str(caught.value.details())


async def test_a_flood_of_bad_credentials_fills_neither_log_nor_audit_log(tmp_path: Path) -> None:
    """Every one of them is another one, and half of the methods are invented."""
    path, audit = tmp_path / "keys.json", tmp_path / "audit.jsonl"
    add_key(path, Role.ADMIN)
    flags = ("--host-cache", "memory", "--api-keys", str(path), "--audit-log", str(audit))
    async with control_plane(tmp_path, *flags) as (process, clients, _workers):
        async with grpc.aio.insecure_channel(clients) as channel:
            for number in range(400):
                method = (
                    f"/motet.v1.Invented{number}/{'M' * 900}" if number % 2 else "/motet.v1.StatusService/GetStatus"
                )
                code = await code_of(channel, method, bearer(f"motet_flood{number:05d}_{'x' * 43}"))
                assert code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), STEP_S)
    lines = audit.read_text("utf-8").splitlines()
    assert len(lines) < 100 and max(map(len, lines)) < 2000, "one line a second and reason, and the counts"
    refused = [json.loads(line)["data"] for line in lines if ".refusal" in line]
    assert refused[0]["reason"] == "UNAUTHENTICATED"
    assert log.count(b"\n") < 40 and b"flood00" not in log

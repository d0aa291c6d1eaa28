"""Every RPC has a Caller, whatever its kind, its service and its port."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import grpc
import grpc.aio
import pytest
from cryptography import x509
from google.longrunning import operations_pb2
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from motet.v1 import (
    adapters_pb2,
    fleet_pb2,
    generation_pb2,
    model_pb2,
    pooling_pb2,
    push_pb2,
    residency_pb2,
    status_pb2,
    verify_pb2,
)

from contract.v1 import plan_pb2
from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.principal import ANYBODY, Principal, Role
from control_plane.api.rpc import listeners, reflection
from control_plane.api.rpc.callers import Callers
from control_plane.api.rpc.rpc_server import RpcServer
from control_plane.caller import THE_SERVER, Caller, acting_as, current_caller
from control_plane.config import add_arguments, from_args
from control_plane.errors import PermissionDenied, Unauthenticated, Unavailable
from control_plane.scaler.v1 import externalscaler_pb2
from control_plane.server import build
from tests.control_plane.api.fakes import details
from tests.control_plane.server_processes import checkpoint
from tests.fakes.authority import Authority

CA = Authority()


def methods_of(*files: Any) -> dict[str, MethodDescriptor]:
    """The methods of every service in files of protos, by the path that a client calls."""
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


REFLECTION = {
    f"/{name}/ServerReflectionInfo": method
    for name in reflection.SERVICE_NAMES
    for method in methods_of(reflection_pb2).values()
}
_CLIENT_FILES = (
    generation_pb2,
    model_pb2,
    pooling_pb2,
    adapters_pb2,
    push_pb2,
    fleet_pb2,
    residency_pb2,
    status_pb2,
    verify_pb2,
    operations_pb2,
    health_pb2,
)
CLIENT_METHODS = methods_of(*_CLIENT_FILES) | REFLECTION
WORKER_METHODS = methods_of(plan_pb2, health_pb2)


def recording_handler(method: MethodDescriptor, seen: list[Caller]) -> Any:
    """A handler of the method's kind, which notes the caller: in itself, and in a task that it starts."""

    async def note() -> None:
        seen.append(current_caller())

    async def unary(_request: Any, _context: Any) -> bytes:
        await asyncio.create_task(note())
        return b""

    async def stream(_request: Any, _context: Any) -> AsyncIterator[bytes]:
        await asyncio.create_task(note())
        yield b""
        assert seen[-1] == current_caller()

    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(stream if method.server_streaming else unary)


@pytest.mark.parametrize(
    ("make_server", "methods"),
    [
        (
            lambda: listeners.client_server(
                max_streams_per_connection=10, max_concurrent_rpcs=10, max_connections=10, write_timeout_s=30.0
            ),
            CLIENT_METHODS,
        ),
        (listeners.worker_server, WORKER_METHODS),
        (listeners.scaler_server, methods_of(externalscaler_pb2)),
    ],
    ids=["clients", "workers", "scaler"],
)
async def test_handlers_of_every_method_know_their_caller(
    make_server: Callable[[], RpcServer], methods: dict[str, MethodDescriptor]
) -> None:
    server, seen = make_server(), list[Caller]()
    for path, method in methods.items():
        _, service, name = path.split("/")
        server.add_registered_method_handlers(service, {name: recording_handler(method, seen)})
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    channel: Any
    async with grpc.aio.insecure_channel(address) as channel:
        for path in methods:
            call = channel.stream_stream(path)(iter([b""]), timeout=30, metadata=[("motet-tenant", "team-a")])
            assert [response async for response in call] == [b""], path
            caller = seen.pop()
            assert (caller.tenant, caller.principal, caller.host) == ("team-a", ANYBODY, "ipv4:127.0.0.1"), path
            assert not seen
    await server.stop(None)


async def test_every_method_of_a_running_server_refuses_a_bad_tenant(tmp_path: Path) -> None:
    """What the interceptor does reaches every method that the server has."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--model", str(checkpoint(tmp_path / "model")), "--data-dir", str(tmp_path / "data")]
    flags += ["--host-cache", "memory", "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]
    async with contextlib.AsyncExitStack() as stack:
        plane = await build(from_args(parser.parse_args(flags)), stack)
        for address, methods in ((plane.client_address, CLIENT_METHODS), (plane.worker_address, WORKER_METHODS)):
            channel: Any
            async with grpc.aio.insecure_channel(address) as channel:
                for path in methods:
                    call = channel.stream_stream(path)(iter([]), timeout=30, metadata=[("motet-tenant", "A")])
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        [response async for response in call]
                    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, path
                    assert details(caught.value)[1] == ["motet-tenant"], path


def test_outside_of_an_rpc_the_server_is_the_caller() -> None:
    job = Caller(tenant="ops", principal=Principal("retention job"))
    with acting_as(job):
        assert current_caller() is job
    assert current_caller() is THE_SERVER and current_caller().host == ""


class Tokens:
    """A method of authentication: tokens by name."""

    known: ClassVar = {
        "infer": Principal("key:infer", frozenset({Role.INFER}), ("acme", "labs")),
        "nothing": Principal("key:nothing", tenants=("acme",)),
    }

    def principal(self, presented: Presented) -> Principal | None:
        return self.known.get(presented.token)


class FakeContext:
    def __init__(self, auth: dict[str, list[bytes]] | None = None, /, **metadata: str) -> None:
        self._auth = auth or {}
        self._metadata = [(key.replace("_", "-"), value) for key, value in metadata.items()]

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._auth

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"


GENERATE = "/motet.v1.GenerationService/Generate"


def caller(method: str = GENERATE, **metadata: str) -> Caller:
    context: Any = FakeContext(**metadata)
    return Callers(Authenticator([Tokens()]))(method, context)


def test_the_principal_determines_the_tenant() -> None:
    assert caller(authorization="Bearer infer").tenant == "acme"
    assert caller(authorization="bearer infer", motet_tenant="labs").tenant == "labs"
    with pytest.raises(PermissionDenied, match="may not act for tenant 'other'"):
        caller(authorization="Bearer infer", motet_tenant="other")


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tracestate": "a=1,b=2", "traceparent": PARENT}, (PARENT, "a=1,b=2")),
        ({"traceparent": PARENT}, (PARENT, "")),
        ({"traceparent": PARENT, "tracestate": "no list"}, (PARENT, "")),
        ({"traceparent": "wrong", "tracestate": "a=1"}, ("", "")),
        ({"tracestate": "a=1"}, ("", "")),
    ],
)
def test_a_call_belongs_to_the_trace_that_its_metadata_names(
    metadata: dict[str, str], expected: tuple[str, str]
) -> None:
    found = caller(authorization="Bearer infer", **metadata)
    assert (found.traceparent, found.tracestate) == expected


def test_calls_without_the_role_are_refused() -> None:
    with pytest.raises(PermissionDenied, match=r"Generate needs the role 'infer'"):
        caller(authorization="Bearer nothing")
    with pytest.raises(PermissionDenied, match=r"needs the role 'admin'"):
        caller(f"/{reflection.SERVICE_NAMES[0]}/ServerReflectionInfo", authorization="Bearer infer")


class Names:
    """A method of authentication: the names of the certificate."""

    def principal(self, presented: Presented) -> Principal | None:
        return Principal(",".join(presented.identities), frozenset(Role), ("acme",)) if presented.identities else None


def test_names_of_a_certificate_count_only_if_tls_verified_them() -> None:
    names = {"x509_pem_cert": [CA.issue("spiffe://acme/a", "a.acme").cert]}
    callers = Callers(Authenticator([Names()]))
    context: Any = FakeContext({**names, "transport_security_type": [b"ssl"]})
    assert callers(GENERATE, context).principal.name == "spiffe://acme/a,a.acme"
    for kind in ([], [b"insecure"], [b"ssl", b"insecure"]):
        context = FakeContext({**names, "transport_security_type": kind})
        with pytest.raises(Unauthenticated):
            callers(GENERATE, context)


def test_a_name_of_a_certificate_is_never_a_part_of_another_name() -> None:
    """gRPC's own list of names ends each at a NUL, and holds names of all types."""
    certificate = CA.issue(x509.DNSName("ops.example.org\0.evil.com"))
    auth = {
        "x509_pem_cert": [certificate.cert],
        "x509_subject_alternative_name": [b"ops.example.org"],
        "transport_security_type": [b"ssl"],
    }
    context: Any = FakeContext(auth)
    with pytest.raises(Unauthenticated, match="a subject alternative name with a control character; connect with"):
        Callers(Authenticator([Names()]))(GENERATE, context)
    auth["x509_pem_cert"] = [CA.issue("bob.example.org", x509.RFC822Name("ops.example.org")).cert]
    assert Callers(Authenticator([Names()]))(GENERATE, context).principal.name == "bob.example.org"


@pytest.mark.parametrize(
    "metadata",
    [{}, {"authorization": "Basic infer"}, {"authorization": "Bearer"}, {"authorization": "Bearer " + 5000 * "x"}],
)
def test_calls_without_a_credential_are_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated):
        caller(**metadata)


def test_health_needs_no_credential_and_gives_no_rights() -> None:
    probe = caller("/grpc.health.v1.Health/Check", authorization="Bearer infer")
    assert probe.principal.roles == frozenset() and not probe.principal.tenants
    assert (probe.tenant, probe.principal.name) == ("acme", "key:infer"), "limits are shared by it"
    for metadata in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic infer"}):
        stranger = caller("/grpc.health.v1.Health/Check", **metadata)
        assert stranger.principal.is_stranger and stranger.tenant == "", "nothing of a stranger counts for a tenant"


def test_health_responds_while_the_keys_of_tokens_are_fetched() -> None:
    class Fetching:
        def principal(self, presented: Presented) -> Principal | None:
            raise Unavailable("keys are being fetched")

    callers, context = Callers(Authenticator([Fetching()])), cast(Any, FakeContext(authorization="Bearer infer"))
    assert callers("/grpc.health.v1.Health/Check", context).principal.is_stranger
    with pytest.raises(Unavailable):
        callers(GENERATE, context)

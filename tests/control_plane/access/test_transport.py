"""Both ports over TLS as the settings say, with real connections: who is let in, and who is thrown out."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from contract.v1 import plan_pb2, plan_pb2_grpc
from control_plane.access.peer_certificate import read_certificate
from control_plane.access.settings import AccessSettings
from control_plane.access.transport import Transport, open_transport
from control_plane.access.watched_files import FileWatcher
from control_plane.access.worker_access import WorkerAccess
from control_plane.api.rpc import listeners
from control_plane.caller import Caller
from control_plane.errors import MotetError
from control_plane.fleet.service import WorkerService
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.session import WorkerSession
from data_plane.wire import encode_hello
from tests.fakes.authority import LOCALHOST, UNREADABLE_NAME, Authority, Issued
from tests.fakes.fleet_rig import CAPACITIES, FakeClock, FakeWeights, InspectedFleet, make_fleet

CA = Authority()
SERVER = CA.issue(*LOCALHOST)
ALICE = CA.issue("spiffe://lab.example/user/alice")
BOB = CA.issue("bob.example")
BOTH = CA.issue("gpu-1", "gpu-2")
GPU_1, GPU_2 = CA.issue("spiffe://lab.example/motet/worker/gpu-1"), CA.issue("gpu-2")

CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]  # a connection of each channel's own


class Watched(FileWatcher):
    """Looks when the test says so."""

    def look(self) -> None:
        for files in self._files:
            files.refresh()


@dataclass
class Ports:
    """A clients' port with one method that streams without end, and a workers' port."""

    directory: Path
    watcher: Watched
    transport: Transport
    fleet: InspectedFleet
    clients: str = ""  # HOST:PORT
    workers: str = ""  # HOST:PORT
    num_denials: int = 0
    refused: list[Caller] = field(default_factory=list)  # as the audit log learns of them

    def on_refused(self, _method: str, caller: Caller, _error: MotetError) -> None:
        self.refused.append(caller)

    def channel(self, address: str, own: Issued | None, authority: Authority = CA) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, authority.channel_credentials(own), CHANNEL_OPTIONS)

    @contextlib.contextmanager
    def worker_channel(self, own: Issued | None) -> Iterator[grpc.Channel]:
        with grpc.secure_channel(self.workers, CA.channel_credentials(own), CHANNEL_OPTIONS) as channel:
            yield channel

    def deny(self, *entries: str) -> None:
        self.num_denials += 1
        path = self.directory / "denied"
        path.write_text("\n".join(entries), "utf-8")
        os.utime(path, (self.num_denials, self.num_denials))
        self.watcher.look()


async def endless(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
    yield b"begun"
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def ports(directory: Path, wall_clock: Callable[[], float] | None = None) -> AsyncIterator[Ports]:
    """`wall_clock`: by which the sessions of workers end; the port itself lets workers in by the real one."""
    cert, key = SERVER.write(directory)
    ca, denied, allowed = CA.write(directory), directory / "denied", directory / "allowed"
    denied.touch()
    os.utime(denied, (0, 0))
    allowed.write_text("gpu-1\n", "utf-8")
    settings = AccessSettings(
        tls_cert=cert,
        tls_key=key,
        tls_client_ca=ca,
        worker_tls_cert=cert,
        worker_tls_key=key,
        worker_tls_client_ca=ca,
        worker_allow=allowed,
        tls_deny=denied,
    )
    watcher = Watched()
    transport = open_transport(settings, watcher)
    access = transport.worker_access if wall_clock is None else WorkerAccess(wall_clock=wall_clock)
    fleet = make_fleet(FakeClock())
    made = Ports(directory, watcher, transport, fleet)
    clients = listeners.client_server(
        max_streams_per_connection=10,
        max_concurrent_rpcs=10,
        max_connections=10,
        write_timeout_s=30.0,
        guard=transport.client_guard,
        on_refused=made.on_refused,
    )
    handlers = {"Endless": grpc.unary_stream_rpc_method_handler(endless)}
    clients.add_registered_method_handlers("test", handlers)
    workers = listeners.worker_server(guard=transport.worker_guard, on_refused=made.on_refused)
    service = WorkerService(fleet, FakeWeights(), access)
    plan_pb2_grpc.add_WorkerServiceServicer_to_server(service, workers)
    made.clients = listeners.bind(clients, "localhost:0", transport.client_credentials)
    made.workers = listeners.bind(workers, "localhost:0", transport.worker_credentials)
    await clients.start()
    await workers.start()
    try:
        yield made
    finally:
        await clients.stop(None)
        await workers.stop(None)


def stream(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/test/Endless", None, None)
    return method(b"", timeout=30)


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def test_a_listed_client_is_refused_and_its_running_streams_end(tmp_path: Path) -> None:
    async with (
        ports(tmp_path) as made,
        made.channel(made.clients, BOB) as bob,
        made.channel(made.clients, ALICE) as alice,
    ):
        streams = [stream(alice), stream(alice), stream(bob)]
        assert [await each.read() for each in streams] == [b"begun"] * 3
        made.deny("spiffe://lab.example/user/alice")
        message = "the client's certificate is refused by the operator of this server"
        for each in (*streams[:2], stream(alice)):
            assert await end_of(each) == (grpc.StatusCode.PERMISSION_DENIED, message)
        assert not streams[2].done() and await stream(bob).read() == b"begun"
        made.deny(f"sha256:{BOB.fingerprint}")
        assert await end_of(streams[2]) == (grpc.StatusCode.PERMISSION_DENIED, message)
        assert await stream(alice).read() == b"begun", "no longer on the list"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (CA.issue(x509.DNSName("gpu-1\0.evil.com")), "has a subject alternative name with a control character"),
        (CA.issue(extensions=[UNREADABLE_NAME]), "cannot be parsed: it, or its extensions, are not valid X.509"),
    ],
    ids=["NUL in a name", "not ASCII"],
)
async def test_a_certificate_that_tls_accepts_and_nobody_can_read_is_refused_on_both_ports(
    tmp_path: Path, own: Issued, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ports(tmp_path) as made,
        made.channel(made.clients, own) as client,
    ):
        refusal = f"the certificate of this connection {message}; connect with another one"
        assert await end_of(stream(client)) == (grpc.StatusCode.UNAUTHENTICATED, refusal)
        with made.worker_channel(own) as worker:
            call, response = await attach(worker, "gpu-1")
            assert response is None and await call.end() == (grpc.StatusCode.UNAUTHENTICATED, refusal)
    assert "Traceback" not in caplog.text


async def test_a_client_that_leaves_while_it_is_denied_disturbs_nobody(tmp_path: Path) -> None:
    async with ports(tmp_path) as made, made.channel(made.clients, BOB) as bob:
        async with made.channel(made.clients, ALICE) as alice:
            assert await stream(alice).read() == b"begun"
            made.deny("spiffe://lab.example/user/alice")
        assert await stream(bob).read() == b"begun"


class Attached:
    """A call of Attach as a worker makes it: by blocking grpc. grpc.aio may report a hello that could not be written
    ("Internal error from Core") in place of the refusal that ended the call (grpc issue 36066)."""

    def __init__(self, channel: grpc.Channel, worker_id: str) -> None:
        self._requests: queue.SimpleQueue[plan_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._requests.put(encode_hello(CAPACITIES, worker_id))
        stub: Any = plan_pb2_grpc.WorkerServiceStub(channel)
        self._call: Any = stub.Attach(iter(self._requests.get, None), timeout=30)
        self._call.add_callback(lambda: self._requests.put(None))

    async def read(self) -> Any:
        """The next response, or None where the call has ended."""
        try:
            return await asyncio.to_thread(next, self._call, None)
        except grpc.RpcError:
            return None

    async def end(self) -> tuple[grpc.StatusCode, str]:
        while await self.read() is not None:
            pass
        return self._call.code(), self._call.details()


async def attach(channel: grpc.Channel, worker_id: str) -> tuple[Attached, Any]:
    """The call, and its first response or None."""
    call = Attached(channel, worker_id)
    return call, await call.read()


async def welcomed(made: Ports, channel: grpc.Channel) -> tuple[Attached, WorkerSession]:
    """gpu-1's call and session, which goes on after a tick."""
    call, response = await attach(channel, "gpu-1")
    assert response.WhichOneof("message") == "welcome"
    [session] = made.fleet.parts.sessions.by_id.values()
    made.fleet.tick()
    assert not session.ended.is_set()
    return call, session


@pytest.mark.parametrize(
    ("own", "worker_id", "message"),
    [
        (GPU_1, "gpu-3", "the certificate is not that of worker gpu-3: it has spiffe://lab.example/motet/worker/gpu-1"),
        (GPU_2, "gpu-2", "worker gpu-2 is not on the list of --worker-allow"),
        (GPU_2, "gpu-1", "worker gpu-2 is not on the list of --worker-allow"),
        (ALICE, "gpu-1", "the certificate names no worker; it has spiffe://lab.example/user/alice"),
    ],
    ids=["another id", "not listed", "a listed id that it is not", "a client"],
)
async def test_a_worker_that_it_is_not_or_that_is_not_listed_is_refused(
    tmp_path: Path, own: Issued, worker_id: str, message: str
) -> None:
    async with ports(tmp_path) as made, made.channel(made.workers, own) as channel:
        with made.worker_channel(own) as worker:
            call, response = await attach(worker, worker_id)
            assert response is None
            code, details = await call.end()
        assert code is grpc.StatusCode.PERMISSION_DENIED and details.startswith(message)
        assert made.fleet.num_workers == 0
        stub: Any = plan_pb2_grpc.WorkerServiceStub(channel)
        fetch = stub.FetchAdapter(plan_pb2.FetchAdapterRequest(digest="0" * 64, worker_id=worker_id), timeout=30)
        code, details = await end_of(fetch)
        assert code is grpc.StatusCode.PERMISSION_DENIED and details.startswith(message)


@pytest.mark.parametrize(
    ("own", "name"),
    [
        (ALICE, "cert:spiffe://lab.example/user/alice"),
        (GPU_1, "cert:spiffe://lab.example/motet/worker/gpu-1"),
        (BOTH, f"cert:sha256:{BOTH.fingerprint}"),
    ],
    ids=["no worker", "another id", "two names"],
)
async def test_a_refusal_on_any_port_says_whose_certificate_it_was(tmp_path: Path, own: Issued, name: str) -> None:
    async with ports(tmp_path) as made:
        with made.worker_channel(own) as worker:
            call, _ = await attach(worker, "gpu-9")
            assert (await call.end())[0] is grpc.StatusCode.PERMISSION_DENIED
        made.deny(f"sha256:{own.fingerprint}")
        async with made.channel(made.clients, own) as channel:
            assert await stream(channel).code() is grpc.StatusCode.PERMISSION_DENIED
    assert [(caller.principal.name, caller.tenant) for caller in made.refused] == [(name, "")] * 2
    assert not any(caller.principal.is_admin or caller.principal.may_act_for("acme") for caller in made.refused)


async def test_a_listed_worker_is_attached_until_it_is_denied(tmp_path: Path) -> None:
    async with ports(tmp_path) as made:
        with made.worker_channel(GPU_1) as worker:
            call, session = await welcomed(made, worker)
            made.deny("gpu-1")
            made.fleet.tick()
            assert session.end_cause is EndCause.REFUSED
            denied = grpc.StatusCode.PERMISSION_DENIED, "worker gpu-1 or its certificate is on the list of --tls-deny"
            assert await call.end() == denied
            again, response = await attach(worker, "gpu-1")
            assert response is None and await again.end() == denied
            made.deny()
            _, response = await attach(worker, "gpu-1")
            assert response.WhichOneof("message") == "welcome"


async def test_a_session_ends_when_the_workers_certificate_expires(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end_s = read_certificate(GPU_1.cert).not_after_s
    now_s = end_s - 1
    async with ports(tmp_path, lambda: now_s) as made:
        with made.worker_channel(GPU_1) as worker:
            call, session = await welcomed(made, worker)
            now_s = end_s
            made.fleet.tick()
            code, details = await call.end()
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert details.startswith("the worker's certificate has expired: it was valid until 20")
    assert "worker refused worker_id=gpu-1 epoch=" in caplog.text and session.end_cause is EndCause.REFUSED


@pytest.mark.parametrize("port", ["clients", "workers"])
@pytest.mark.parametrize(
    "own",
    [None, Authority().issue("gpu-1"), CA.issue("gpu-1", lasts=-datetime.timedelta(hours=1))],
    ids=["no certificate", "of another authority", "expired"],
)
async def test_no_port_talks_to_who_has_no_valid_certificate(tmp_path: Path, port: str, own: Issued | None) -> None:
    async with ports(tmp_path) as made:
        address = made.clients if port == "clients" else made.workers
        async with made.channel(address, own) as channel:
            code, details = await end_of(stream(channel))
        assert code is grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect to all addresses")
        async with grpc.aio.insecure_channel(address) as plain:
            code, details = await end_of(stream(plain))
        assert code is grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect to all addresses")


async def test_a_server_without_tls_needs_none_of_it() -> None:
    assert open_transport(AccessSettings(), FileWatcher()) == Transport()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("server.pem", "--tls-cert: the certificate's file has no complete certificate in PEM"),
        ("denied", "--tls-deny: line 1: 'a b' has a space"),
        ("allowed", "--worker-allow: line 1: 'a b' has a space"),
    ],
)
async def test_a_file_that_cannot_be_used_is_named_by_its_flag(tmp_path: Path, broken: str, message: str) -> None:
    cert, key = SERVER.write(tmp_path)
    files = {name: tmp_path / name for name in ("denied", "allowed")}
    for path in files.values():
        path.touch()
    (tmp_path / broken).write_text("a b", "utf-8")
    ca = CA.write(tmp_path)
    settings = AccessSettings(
        tls_cert=cert,
        tls_key=key,
        tls_client_ca=ca,
        worker_tls_cert=cert,
        worker_tls_key=key,
        worker_tls_client_ca=ca,
        worker_allow=files["allowed"],
        tls_deny=files["denied"],
    )
    with pytest.raises(ValueError) as caught:
        open_transport(settings, FileWatcher())
    assert str(caught.value).startswith(message)

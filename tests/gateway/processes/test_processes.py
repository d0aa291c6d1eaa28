"""A gateway of two processes: what they share, and what a process takes with it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.harness import System
from tests.fakes.authority import Authority
from tests.gateway.gateway_process import Gateway
from tests.makers import make_checkpoint, make_tokenizer

NUM_TOKENS = 64
WAIT_S = 120.0
SAMPLE = {
    "prompt": {"chunks": [{"tokens": [5, 6]}]},
    "sampling_params": {"max_tokens": 4, "temperature": 0.0, "stop": []},
    "seq_id": 0,
}


@dataclass(frozen=True)
class Served:
    """A gateway of two processes before a worker whose tokens are known."""

    system: System
    gateway: Gateway

    def processes(self) -> dict[int, psutil.Process]:
        """Those that serve the port, by process id."""
        return {each.pid: each for each in psutil.Process(self.gateway.process.pid).children()}

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.gateway.url}/metrics", timeout=WAIT_S).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    async def until(self, name: str, value: float) -> None:
        """Wait until a metric has this value."""
        async with asyncio.timeout(WAIT_S):
            while self.metric(name) != value:
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("processes")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
    with System(checkpoint, directory) as system:
        system.start_hash_worker(flags=["--max-rows", "32", "--step-time-ms", "20"])
        yield system


@pytest.fixture
def served(system: System, tmp_path: Path) -> Iterator[Served]:
    with Gateway(system.address, tmp_path, ["--processes", "2", "--base-model-name", "tiny"]) as gateway:
        yield Served(system, gateway)


class Stream:
    """A completion that is being streamed over a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.port: int = writer.get_extra_info("sockname")[1]
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, address: str, num_tokens: int = NUM_TOKENS) -> Stream:
        """One whose first event has come."""
        host, _, port = address.rpartition(":")
        stream = cls(*await asyncio.open_connection(host, int(port)))
        body = {"model": "tiny", "prompt": [5, 6, 7], "stream": True, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "max_tokens": num_tokens}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        stream._writer.write(head.encode() + data)
        await stream._reader.readuntil(b"data: ")
        return stream

    async def is_whole(self) -> bool:
        """Read it to its end: whether it has one."""
        data = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                while b"data: [DONE]" not in data and (more := await self._reader.read(65536)):
                    data += more
        self._writer.close()
        return b"data: [DONE]" in data and b'"finish_reason":"length"' in data


@contextlib.asynccontextmanager
async def streams(served: Served, count: int) -> AsyncIterator[dict[int, list[Stream]]]:
    """By process, streams of which every process has some."""
    found: dict[int, list[Stream]] = {pid: [] for pid in served.processes()}
    for _ in range(count):
        stream = await Stream.begin(served.gateway.address, 400)
        [pid] = [pid for pid, process in served.processes().items() if stream.port in ports_of(process)]
        found[pid].append(stream)
    assert all(found.values()), "each process has connections"
    yield found


def ports_of(process: psutil.Process) -> set[int]:
    """Of the other ends of its connections."""
    return {each.raddr.port for each in process.net_connections("tcp") if each.raddr}


async def test_a_killed_process_takes_its_own_connections_with_it_and_no_other_ones(served: Served) -> None:
    assert served.metric("motet_gateway_processes") == 2
    before = served.processes()
    async with streams(served, 16) as by_pid:
        assert served.metric("motet_gateway_streams_open") == 16
        victim, survivor = by_pid
        before[victim].kill()
        ended = await asyncio.gather(*(stream.is_whole() for stream in by_pid[victim]))
        assert not any(ended)
        # Its connections end before its listening socket does: the kernel may deal one more to it until it is gone.
        await asyncio.to_thread(before[victim].wait, WAIT_S)
        # While one process is gone, new connections are served.
        more = [await Stream.begin(served.gateway.address) for _ in range(4)]
        assert all(await asyncio.gather(*(stream.is_whole() for stream in [*by_pid[survivor], *more])))
    await served.until("motet_gateway_processes", 2)
    await served.until("motet_gateway_streams_open", 0)
    after = served.processes()
    assert len(after) == 2 and survivor in after and victim not in after
    num_survived = len(by_pid[survivor]) + len(more)
    await served.until('motet_gateway_requests_total{method="POST",route="/v1/completions",status="200"}', num_survived)


def test_connections_are_dealt_out_evenly(served: Served) -> None:
    host, _, port = served.gateway.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)]
        for client in clients:
            client.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert all(client.recv(12) == b"HTTP/1.1 200" for client in clients)
        ports = {client.getsockname()[1] for client in clients}
        counts = [len(ports & ports_of(process)) for process in served.processes().values()]
    assert sum(counts) == 200 and min(counts) > 60, "by a hash: 6 standard deviations are 58"


async def test_what_a_dead_process_counted_stays(served: Served) -> None:
    name = 'motet_gateway_requests_total{method="GET",route="/healthz",status="200"}'
    for _ in range(20):
        assert httpx.get(f"{served.gateway.url}/healthz", timeout=WAIT_S).status_code == 200
    await served.until(name, 20)
    for pid, process in served.processes().items():
        process.kill()
        async with asyncio.timeout(WAIT_S):
            while pid in served.processes() or served.metric("motet_gateway_processes") != 2:
                await asyncio.sleep(0.05)
    assert served.metric(name) == 20


async def test_a_signal_lets_streams_of_every_process_finish(served: Served) -> None:
    async with streams(served, 16) as by_pid:
        served.gateway.process.send(signal.SIGTERM)
        whole = [stream.is_whole() for group in by_pid.values() for stream in group]
        assert all(await asyncio.gather(*whole))
    assert served.gateway.process.stop() == 0
    with socket.socket() as again, pytest.raises(ConnectionRefusedError):
        host, _, port = served.gateway.address.rpartition(":")
        again.connect((host, int(port)))


async def test_the_processes_end_with_their_supervisor(served: Served) -> None:
    processes = served.processes()
    sockets = [each.laddr for process in processes.values() for each in process.net_connections("unix")]
    folder = Path(next(path for path in sockets if "motet-gateway-" in path)).parent
    assert folder.is_dir()
    served.gateway.process.kill()
    gone, alive = psutil.wait_procs(list(processes.values()), timeout=WAIT_S)
    assert len(gone) == 2 and not alive
    assert not folder.exists()
    served.gateway.start()  # on the same port


def test_a_sample_is_found_whichever_process_gets_the_request(served: Served) -> None:
    """Each request has a connection of its own, so that any process gets it."""
    url = f"{served.gateway.url}/api/v1"

    def post(path: str, body: dict[str, object]) -> httpx.Response:
        return httpx.post(f"{url}/{path}", json=body, timeout=WAIT_S)

    requests = list[str]()
    for number in range(12):
        session = post("create_session", {}).json()["session_id"]
        sampling = {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"}
        made = post("create_sampling_session", sampling).json()["sampling_session_id"]
        started = post("asample", {**SAMPLE, "sampling_session_id": made})
        assert started.status_code == 200, started.text
        requests.append(started.json()["request_id"])
        again = post("asample", {**SAMPLE, "sampling_session_id": made})
        assert again.json() == started.json(), "it has begun already"
    found = [post("retrieve_future", {"request_id": request}) for request in requests]
    assert [one.headers["content-type"] for one in found] == ["application/x-protobuf"] * 12
    assert len({one.content for one in found}) == 1, "the same greedy sample"
    assert [post("cancel_future", {"request_id": request}).status_code for request in requests] == [200] * 12
    assert {post("retrieve_future", {"request_id": request}).status_code for request in requests} == {410}
    refused = post("asample", {**SAMPLE, "sampling_session_id": "nobody's"})
    assert refused.status_code == 404 and "detail" in refused.json()


def test_every_process_speaks_tls(system: System, tmp_path: Path) -> None:
    authority = Authority()
    cert, key = (str(path) for path in authority.issue("localhost", "127.0.0.1").write(tmp_path))
    context = ssl.create_default_context(cafile=str(authority.write(tmp_path)))
    flags = ["--processes", "2", "--tls-cert", cert, "--tls-key", key, "--base-model-name", "tiny"]
    with Gateway(system.address, tmp_path, flags) as gateway:
        served = Served(system, gateway)
        seen = set[int]()
        for _ in range(20):
            with httpx.Client(base_url=f"https://{gateway.address}", verify=context, timeout=WAIT_S) as http:
                body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
                assert http.post("/v1/completions", json=body).status_code == 200
                seen |= {pid for pid, process in served.processes().items() if ports_of(process)}
            if len(seen) == 2:
                break
        assert len(seen) == 2


def test_a_process_that_cannot_start_ends_the_command_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    flags = ["--processes", "2", "--tls-cert", str(broken), "--tls-key", str(broken)]
    gateway = Gateway("127.0.0.1:1", tmp_path, flags)
    with pytest.raises(Exception, match="ended with status 1 before it was ready"):
        gateway.start()
    assert "motet gateway: " in gateway.process.log_tail()

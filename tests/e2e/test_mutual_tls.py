"""A whole system over mutual TLS on all addresses of the machine: control plane, workers and clients as processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from motet import AsyncClient, MotetError, PermissionDenied, RetryPolicy, Unavailable

from tests.control_plane.server_processes import STEP_S, adapter_files, control_plane, hash_worker, start
from tests.fakes.authority import LOCALHOST, Authority

CA = Authority()
NUM_ROTATIONS = 5


class Files:
    """The files of a control plane, a worker gpu-1, and a client alice, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = CA.write(directory)
        self.allowed, self.denied = directory / "allowed", directory / "denied"
        self.write_list(self.allowed, "gpu-1")
        self.write_list(self.denied)
        self.rotate()

    def rotate(self) -> None:
        """New certificates and keys for everybody."""
        CA.issue(*LOCALHOST).write(self.directory, "server")
        CA.issue("spiffe://lab.example/motet/worker/gpu-1").write(self.directory, "gpu-1")
        CA.issue("spiffe://lab.example/user/alice").write(self.directory, "alice")

    def write_list(self, path: Path, *entries: str) -> None:
        beside = path.with_suffix(".new")
        beside.write_text("\n".join(entries), "utf-8")
        beside.replace(path)

    def pair(self, name: str) -> tuple[str, str]:
        return str(self.directory / f"{name}.pem"), str(self.directory / f"{name}.key")

    def server_flags(self) -> list[str]:
        cert, key = self.pair("server")
        return [
            *("--listen", "0.0.0.0:0", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", str(self.ca)),
            *("--worker-listen", "0.0.0.0:0", "--worker-tls-cert", cert, "--worker-tls-key", key),
            *("--worker-tls-client-ca", str(self.ca), "--worker-allow", str(self.allowed)),
            *("--tls-deny", str(self.denied)),
        ]

    def worker_flags(self, name: str) -> list[str]:
        cert, key = self.pair(name)
        return [
            *("--control-plane-tls-ca", str(self.ca), "--control-plane-tls-cert", cert, "--control-plane-tls-key", key)
        ]

    def client(self, address: str, name: str = "alice", **settings: Any) -> AsyncClient:
        cert, key = self.pair(name)
        return AsyncClient(address, tls_ca=self.ca, tls_cert=cert, tls_key=key, **settings)

    def served_certificate(self, address: str) -> bytes:
        """What a new connection to the port gets."""
        context = ssl.create_default_context(cadata=CA.pem.decode())
        context.load_cert_chain(*self.pair("alice"))
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), STEP_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            found = secured.getpeercert(binary_form=True)
            assert found is not None
            return found


@contextlib.asynccontextmanager
async def running(files: Files) -> AsyncIterator[tuple[str, str, Process]]:
    """Addresses of clients and workers, and the control plane's process."""
    async with control_plane(files.directory, *files.server_flags()) as (process, clients, workers):
        yield clients.replace("0.0.0.0", "127.0.0.1"), workers.replace("0.0.0.0", "localhost"), process


async def until(is_so: Callable[[], Any]) -> None:
    """Wait until a condition, plain or to be awaited, holds."""
    async with asyncio.timeout(STEP_S):
        while True:
            result = is_so()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.05)


async def num_workers(client: AsyncClient) -> int:
    return len((await client.status()).workers)


async def test_no_stream_fails_while_every_certificate_is_rotated(tmp_path: Path) -> None:
    files = Files(tmp_path)
    (tmp_path / "adapter").mkdir()
    for name, content in adapter_files(1).items():
        (tmp_path / "adapter" / name).write_bytes(content)
    async with (
        running(files) as (clients, workers, _),
        hash_worker(tmp_path, workers, "--worker-id", "gpu-1", "--step-time-ms", "5", *files.worker_flags("gpu-1")),
        files.client(clients, retry=RetryPolicy(max_attempts=1)) as client,
    ):
        await client.adapters.register("poet", tmp_path / "adapter")
        is_rotating = True
        expected = await client.generate("hello", adapter="poet", max_tokens=40, ignore_eos=True).text()

        async def generate_on() -> int:
            num_streams = 0
            while is_rotating:
                assert await client.generate("hello", adapter="poet", max_tokens=40, ignore_eos=True).text() == expected
                num_streams += 1
            return num_streams

        readers = [asyncio.create_task(generate_on()) for _ in range(6)]
        for _ in range(NUM_ROTATIONS):
            before = await asyncio.to_thread(files.served_certificate, clients)
            files.rotate()

            async def is_new(before: bytes = before) -> bool:
                return await asyncio.to_thread(files.served_certificate, clients) != before

            await until(is_new)
        is_rotating = False
        assert min(await asyncio.gather(*readers)) > 0


async def test_a_denied_worker_loses_its_session_and_comes_back_when_it_is_allowed(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with (
        running(files) as (clients, workers, process),
        hash_worker(tmp_path, workers, "--worker-id", "gpu-1", *files.worker_flags("gpu-1")),
        files.client(clients) as client,
    ):

        async def has_workers(number: int) -> bool:
            return await num_workers(client) == number

        await until(lambda: has_workers(1))
        files.write_list(files.denied, "gpu-1")
        await until(lambda: has_workers(0))
        # The same machine with new files is honest again.
        files.write_list(files.denied)
        files.rotate()
        await until(lambda: has_workers(1))
        assert await client.generate("hello", max_tokens=3, ignore_eos=True).text()
        process.terminate()
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
    assert "worker refused worker_id=gpu-1" in log and "is on the list of --tls-deny" in log


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["spiffe://lab.example/motet/worker/gpu-2"], "the certificate is not that of worker gpu-1"),
        (["spiffe://lab.example/user/alice"], "the certificate names no worker"),
    ],
    ids=["of another worker", "of a client"],
)
async def test_a_process_under_a_name_that_its_certificate_lacks_is_kept_out_and_the_real_worker_attaches(
    tmp_path: Path, names: list[str], message: str
) -> None:
    files = Files(tmp_path)
    files.write_list(files.allowed, "gpu-1", "gpu-2")
    CA.issue(*names).write(tmp_path, "misplaced")
    async with running(files) as (clients, workers, _), files.client(clients) as client:
        misplaced = await _start_worker(tmp_path, workers, *files.worker_flags("misplaced"))
        try:
            assert misplaced.stderr is not None
            line = (await asyncio.wait_for(misplaced.stderr.readline(), STEP_S)).decode()
            assert "not attached worker_id=gpu-1: PERMISSION_DENIED: " in line and message in line
            async with hash_worker(tmp_path, workers, "--worker-id", "gpu-1", *files.worker_flags("gpu-1")):
                assert await num_workers(client) == 1
                assert await client.generate("hello", max_tokens=3, ignore_eos=True).text()
            assert misplaced.returncode is None, "it goes on trying"
        finally:
            misplaced.kill()
            await misplaced.communicate()


async def _start_worker(directory: Path, address: str, *flags: str) -> Process:
    model = str(directory / "model")
    return await start(
        "tests.fakes.hash_worker",
        *("--control-plane", address, "--model", model, "--worker-id", "gpu-1", *flags),
        cwd=directory,
    )


async def test_a_worker_without_tls_says_in_one_line_why_it_is_not_attached(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with running(files) as (_, workers, _):
        worker = await _start_worker(tmp_path, workers)
        try:
            assert worker.stderr is not None
            line = (await asyncio.wait_for(worker.stderr.readline(), STEP_S)).decode()
            assert "not attached worker_id=gpu-1: the server closed the connection at once; if its port" in line
            assert line.endswith("give its authority with --control-plane-tls-ca; trying again every second\n")
        finally:
            worker.kill()
            await worker.communicate()


async def test_a_denied_client_is_refused_at_once(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with running(files) as (clients, _, _), files.client(clients) as client:
        await client.status()
        files.write_list(files.denied, "spiffe://lab.example/user/alice")

        async def is_refused() -> bool:
            try:
                await client.status()
            except PermissionDenied:
                return True
            return False

        await until(is_refused)
        with pytest.raises(Unavailable, match="it may need a certificate of the client"):
            async with AsyncClient(clients, tls_ca=files.ca, retry=RetryPolicy(max_attempts=1)) as nobody:
                await nobody.status()
        with pytest.raises(MotetError, match="if its port has TLS"):
            async with AsyncClient(clients, retry=RetryPolicy(max_attempts=1)) as plain:
                await plain.status()


async def test_a_denied_clients_running_stream_ends_and_another_goes_on_through_half_written_files(
    tmp_path: Path,
) -> None:
    files = Files(tmp_path)
    CA.issue("spiffe://lab.example/user/bob").write(tmp_path, "bob")
    options: Any = {"max_tokens": 150, "ignore_eos": True, "seed": 3}
    async with (
        running(files) as (clients, workers, process),
        hash_worker(tmp_path, workers, "--worker-id", "gpu-1", "--step-time-ms", "30", *files.worker_flags("gpu-1")),
        files.client(clients, retry=RetryPolicy(max_attempts=1)) as alice,
        files.client(clients, "bob", retry=RetryPolicy(max_attempts=1)) as bob,
    ):
        async with alice.generate("hello", **options) as refused, bob.generate("hello", **options) as kept:
            assert (await anext(aiter(refused))).token_ids and (await anext(aiter(kept))).token_ids
            cert = tmp_path / "server.pem"
            cert.write_bytes(cert.read_bytes()[:200])
            files.write_list(files.denied, "spiffe://lab.example/user/alice")
            with pytest.raises(PermissionDenied, match="certificate is refused by the operator"):
                async for _ in refused:
                    pass
            async for _ in kept:
                pass
            assert kept.finished is not None and kept.finished.usage.completion_tokens == options["max_tokens"]
        process.terminate()
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
    assert "file not read again, the former content stays" in log


async def test_an_idle_worker_attaches_anew_with_its_new_certificate(tmp_path: Path) -> None:
    """So that nothing is cut when the former certificate expires."""
    files = Files(tmp_path)
    async with (
        running(files) as (clients, workers, _),
        hash_worker(tmp_path, workers, "--worker-id", "gpu-1", *files.worker_flags("gpu-1")),
        files.client(clients) as client,
    ):
        [before] = (await client.status()).workers
        files.rotate()

        async def is_anew() -> bool:
            return any(worker.epoch > before.epoch for worker in (await client.status()).workers)

        await until(is_anew)

"""Keys, lost servers, lost gateways, clients that give up: what the real SDK gets, and what is left behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from motet import Client

from control_plane.access.authentication.grants import Grant
from control_plane.access.authentication.key_file import change_keys, new_key
from control_plane.access.principal import Role
from tests.e2e.harness import System, wait_until
from tests.gateway.gateway_process import Gateway
from tests.gateway.tinker.conftest import PROMPT, WAIT_S, Served, model_input, params, tokens_of
from tests.makers import make_adapter, make_checkpoint
from tests.secret_scan import SCAN


@pytest.fixture
def stopped_worker(served: Served) -> Iterator[None]:
    """Nothing is computed until the test lets the worker go on, or ends."""
    worker = served.system.workers["w0"]
    worker.send(signal.SIGSTOP)
    yield
    worker.send(signal.SIGCONT)
    wait_until(lambda: len(served.client.status().workers) == 1, "the worker is back")


def num_requests(served: Served) -> int:
    return served.client.status().queues.num_requests


def service_client(url: str, key: str = "tml-no-key-is-needed") -> tinker.ServiceClient:
    """One that has connected, which the constructor does not."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    service.create_sampling_client(base_model="model").result(WAIT_S)
    return service


class Wire:
    """The protocol without the SDK, for what the SDK does not do."""

    def __init__(self, gateway: Gateway, key: str = "tml-any") -> None:
        self.http = httpx.Client(base_url=f"{gateway.url}/api/v1", headers={"x-api-key": key}, timeout=WAIT_S)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def start_sample(self, model_path: str) -> str:
        """The id of a request that has begun."""
        session = self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": model_path}
        sampling = self.post("create_sampling_session", body).json()["sampling_session_id"]
        chunks = [{"type": "encoded_text", "tokens": PROMPT}]
        sample = {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 4}}
        return str(self.post("asample", {**sample, "sampling_session_id": sampling, "seq_id": 0}).json()["request_id"])


@pytest.mark.usefixtures("stopped_worker")
async def test_a_cancelled_sample_frees_its_row(served: Served) -> None:
    sampler = await served.service.create_sampling_client(model_path="tinker://legal")

    async def sample() -> None:
        await sampler.sample(model_input(PROMPT), 1, params())

    waiting = asyncio.ensure_future(sample())
    await asyncio.to_thread(wait_until, lambda: num_requests(served) == 1, "the request is at the server")
    waiting.cancel()
    await asyncio.to_thread(wait_until, lambda: num_requests(served) == 0, "it is cancelled there")
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.usefixtures("stopped_worker")
def test_a_sample_that_nobody_polls_is_cancelled(served: Served, tmp_path: Path) -> None:
    with Gateway(served.system.address, tmp_path, ["--abandoned-s", "2"]) as gateway:
        wire = Wire(gateway)
        request_id = wire.start_sample("tinker://legal")
        wait_until(lambda: num_requests(served) == 1, "the request is at the server")
        wait_until(lambda: num_requests(served) == 0, "it is cancelled there")
        assert wire.post("retrieve_future", {"request_id": request_id}).status_code == 410
        wire.http.close()


def test_a_gateway_that_was_killed_is_sent_its_requests_again(served: Served, tmp_path: Path) -> None:
    expected = tokens_of(served.sampler("tinker://legal"))
    with Gateway(served.system.address, tmp_path) as gateway:
        service = service_client(gateway.url)
        sampler = service.create_sampling_client(model_path="tinker://legal").result(WAIT_S)
        worker = served.system.workers["w0"]
        worker.send(signal.SIGSTOP)
        try:
            future = sampler.sample(model_input(PROMPT), 1, params())
            wait_until(lambda: num_requests(served) == 1, "the request is at the server")
            gateway.process.kill()
            wait_until(lambda: num_requests(served) == 0, "its requests end with it")
            gateway.start()
        finally:
            worker.send(signal.SIGCONT)
        assert list(future.result(WAIT_S).sequences[0].tokens) == expected
        service.close("success").result(WAIT_S)


def test_keys_are_judged_by_motet_and_a_server_that_is_gone_fails_the_sample(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", arch="llama")
    adapter = make_adapter(tmp_path / "adapter", checkpoint, rank=4, targets=["q_proj"], seed=1)
    (writer, key), (infer, lesser) = (
        new_key(set(), Grant(tenants=("acme",), roles=roles, adapters=("*",)))
        for roles in ((Role.INFER, Role.ADAPTERS_WRITE), (Role.INFER,))
    )
    change_keys(tmp_path / "keys.json", lambda _: (writer, infer), may_create=True)
    for name, value in (("a key", key), ("another key", lesser)):
        SCAN.plant(name, value)
    flags = ["--api-keys", str(tmp_path / "keys.json")]
    with System(checkpoint, tmp_path, control_flags=flags) as system:
        system.start_hash_worker()
        with Client(system.address, api_key=key) as client:
            client.adapters.register("legal", adapter)
        with Gateway(system.address, tmp_path, ["--server-absence-s", "1"]) as gateway:
            with pytest.raises(tinker.AuthenticationError, match="not valid"):
                service_client(gateway.url, f"tml-{key[:-3]}abc")
            with pytest.raises(tinker.AuthenticationError, match="needs a credential"):
                service_client(gateway.url, "tml-")
            few = service_client(gateway.url, f"tml-{lesser}")
            with pytest.raises(tinker.PermissionDeniedError, match=r"adapters\.read"):
                few.create_sampling_client(model_path="tinker://legal").result(WAIT_S)
            service = service_client(gateway.url, f"tml-{key}")
            sampler = service.create_sampling_client(model_path="tinker://legal").result(WAIT_S)
            assert len(tokens_of(sampler)) == 8
            mine, others = Wire(gateway, f"tml-{key}"), Wire(gateway, f"tml-{lesser}")
            wrong = Wire(gateway, f"tml-{key[:-3]}abc")
            sample = {"sampling_session_id": f"motet-{'0' * 32}:sample:1:base", "seq_id": 1, "num_samples": 1}
            for route, body in (("asample", sample), ("retrieve_future", {"request_id": "x"}), ("telemetry", {})):
                assert wrong.post(route, body).status_code == 401, "nothing is kept for a key that is not valid"
            request_id = mine.start_sample("tinker://legal")
            assert others.post("retrieve_future", {"request_id": request_id}).status_code == 410
            assert mine.post("retrieve_future", {"request_id": request_id}).status_code == 200
            assert httpx.get(f"{gateway.url}/readyz", timeout=WAIT_S).status_code == 200

            system.control_plane.kill()
            with pytest.raises(tinker.RequestFailedError) as raised:
                tokens_of(sampler)
            assert raised.value.category == "server" and key not in str(raised.value)
            assert mine.post("create_session", {}).status_code == 503
            assert httpx.get(f"{gateway.url}/readyz", timeout=WAIT_S).status_code == 503
            assert httpx.get(f"{gateway.url}/healthz", timeout=WAIT_S).status_code == 200
            for wire in (mine, others, wrong):
                wire.http.close()
            for one in (few, service):
                one.close("success").result(WAIT_S)

"""The base model's name is kept for a moment, and never lets another model respond under it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import motet
import pytest
from motet.v1 import model_pb2

from gateway.http.keys import Keys, current_key
from gateway.openai.forms import Forms
from gateway.openai.models import KEPT_S, Models, Source
from tests.gateway.openai.conftest import PROMPT, Served


class Server:
    """A client of a server whose model changes."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(name="old", fingerprint="ab" * 32)
        self.num_statuses = 0

    async def status(self) -> Any:
        self.num_statuses += 1
        return SimpleNamespace(model=self.model)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_the_name_is_read_again_after_a_moment() -> None:
    server, clock = Server(), Clock()
    models = Models(("mine",), clock)
    client: Any = server
    for _ in range(5):
        assert (await models.resolve("old", client, is_checked=True)).fingerprint == "ab" * 32
        assert (await models.resolve("legal", client, is_checked=True)).adapter == "legal"
    assert server.num_statuses == 1
    server.model = SimpleNamespace(name="new", fingerprint="cd" * 32)
    assert (await models.resolve("old", client, is_checked=True)).fingerprint == "ab" * 32, "which the server refuses"
    clock.now_s = KEPT_S
    assert (await models.resolve("new", client, is_checked=True)).fingerprint == "cd" * 32
    assert (await models.resolve("old", client, is_checked=True)).adapter == "old", "no name of the base model now"


async def test_what_the_server_does_not_check_is_read_at_every_request() -> None:
    server = Server()
    models = Models((), Clock())
    client: Any = server
    await models.resolve("old", client, is_checked=True)
    server.model = SimpleNamespace(name="new", fingerprint="cd" * 32)
    assert (await models.resolve("old", client)).adapter == "old"


async def test_a_name_that_the_operator_gave_stands_for_whatever_model_there_is() -> None:
    client: Any = Server()
    assert (await Models(("mine",), Clock()).resolve("mine", client, is_checked=True)).fingerprint == ""


def test_a_generation_that_relies_on_another_model_is_refused(served: Served) -> None:
    own = served.client.status().model.fingerprint
    assert served.client.generate(PROMPT, max_tokens=1, model_fingerprint=own).result().token_ids
    with pytest.raises(motet.FailedPrecondition, match="is not the model served here"):
        served.client.generate(PROMPT, max_tokens=1, model_fingerprint="ab" * 32).result()


class Versions:
    """A client of a server whose adapter gets another version."""

    def __init__(self) -> None:
        self.digest = "ab" * 32
        self.keys: list[str] = []

    async def send(self, call: Any) -> Any:
        self.keys.append(current_key())
        return call.read(model_pb2.GetModelResponse(adapter="adapters/legal", adapter_digest=self.digest))


async def test_the_version_behind_a_name_is_kept_for_a_moment_and_for_one_key() -> None:
    server, clock = Versions(), Clock()
    forms, found = Forms(clock), list[str]()

    async def find(_scope: Any, _receive: Any, _send: Any) -> None:
        client: Any = server
        found.append((await forms.find(Source("legal"), {}, client))[1])

    async def request(key: str) -> None:
        anything: Any = None
        headers = [(b"authorization", f"Bearer {key}".encode())]
        await Keys(find)({"type": "http", "headers": headers}, anything, anything)

    for key in ("a", "a", "b", "a"):
        await request(key)
    assert server.keys == ["a", "a", "b"], "a's facts and then the form of the version; b's facts"
    server.digest = "cd" * 32
    await request("a")
    clock.now_s = KEPT_S
    await request("a")
    assert found == ["ab" * 32] * 5 + ["cd" * 32]

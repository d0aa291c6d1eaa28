"""Chats whose form matters are served by the version that is active now, in its own form, a moment after a change, too.

The gateway keeps for a moment which version a name stands for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from motet import VersionRollout

from tests.e2e.harness import active_version
from tests.gateway.chats.conftest import TOOLS, WAIT_S, Chats

NAME = "moving"
MESSAGES = [{"role": "user", "content": "Is it raining?"}]
CALL: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400, "seed": 3}
CALL |= {"parallel_tool_calls": False}
OBJECT: dict[str, Any] = {
    "messages": MESSAGES,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
    "max_tokens": 400,
    "seed": 3,
}


class Moving:
    """An adapter whose versions are those of other names."""

    def __init__(self, chats: Chats, http: httpx.Client) -> None:
        self._chats = chats
        self._http = http

    def register(self, name: str, rollout: VersionRollout | None = None) -> str:
        """Give it this version; the digest."""
        adapters = self._chats.client.adapters
        adapters.register(NAME, self._chats.adapters[name], rollout=rollout)
        return active_version(adapters.get(name)).digest

    def chat(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Digest of the version that responded, and its choice."""
        response = self._http.post("/v1/chat/completions", json={"model": NAME, **body})
        assert response.status_code == 200, response.text
        return response.headers["x-motet-adapter-digest"], response.json()["choices"][0]


@pytest.fixture
def moving(chats: Chats) -> Iterator[Moving]:
    with httpx.Client(base_url=chats.gateway.url, timeout=WAIT_S) as http:
        yield Moving(chats, http)
    chats.client.adapters.delete(NAME)


def is_call(choice: dict[str, Any]) -> bool:
    [call] = choice["message"]["tool_calls"]
    return not choice["message"]["content"] and isinstance(json.loads(call["function"]["arguments"]), dict)


def test_calls_are_those_of_the_version_that_became_active(moving: Moving) -> None:
    for name in ("hermes", "mistral-args", "pythonic", "hermes"):
        digest = moving.register(name)
        found, choice = moving.chat(CALL)
        assert found == digest, name
        assert is_call(choice)


def test_an_adapter_that_was_unloaded_and_loaded_again_is_found(chats: Chats, moving: Moving) -> None:
    moving.register("hermes")
    moving.chat(CALL)
    chats.client.adapters.delete(NAME)
    digest = moving.register("llama3")
    for further in ({}, {"chat_template_kwargs": {"date": "today"}}):  # whose form was not found before
        found, choice = moving.chat({**CALL, **further})
        assert found == digest and is_call(choice)


def test_a_form_that_was_not_known_is_found_when_it_becomes_active(moving: Moving, chats: Chats) -> None:
    moving.register("silent")
    response = httpx.post(f"{chats.gateway.url}/v1/chat/completions", json={"model": NAME, **CALL}, timeout=WAIT_S)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"
    digest = moving.register("hermes")
    found, choice = moving.chat(CALL)
    assert found == digest and is_call(choice)


def test_what_the_content_has_to_be_holds_where_the_new_version_reasons_first(moving: Moving) -> None:
    for name in ("silent", "thinker", "silent"):
        digest = moving.register(name)
        found, choice = moving.chat(OBJECT)
        assert found == digest
        if name == "thinker":  # its random reasoning may not end
            assert choice["message"]["reasoning_content"]
        assert choice["finish_reason"] == "length" or json.loads(choice["message"]["content"]) == {}


def test_a_canary_calls_in_its_own_form(moving: Moving) -> None:
    moving.register("hermes")
    moving.chat(CALL)
    digest = moving.register("mistral", VersionRollout(canary_per_mille=1000))
    found, choice = moving.chat(CALL)
    assert found == digest and is_call(choice)

"""The options of a channel, and that a user's own replace them."""

from __future__ import annotations

import pytest
from motet import ResourceExhausted
from motet.channel import MAX_RECEIVE_BYTES, channel_options

from tests.client.conftest import Driver
from tests.client.scripted_server import ScriptedServer


def test_grpc_does_not_retry_and_every_option_is_given_once() -> None:
    options = channel_options()
    assert dict(options)["grpc.enable_retries"] == 0 and "grpc.service_config" not in dict(options)
    assert len(dict(options)) == len(options)


def test_an_option_of_the_user_replaces_ours() -> None:
    options = channel_options((("grpc.max_receive_message_length", 10), ("grpc.primary_user_agent", "mine")))
    assert options.count(("grpc.max_receive_message_length", 10)) == 1
    assert ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES) not in options
    assert ("grpc.primary_user_agent", "mine") in options


def test_option_given_to_a_client_takes_effect(server: ScriptedServer, driver: Driver) -> None:
    server.status.model.name = "a name that is longer than ten bytes"
    driver.settings["options"] = (("grpc.max_receive_message_length", 10),)
    with pytest.raises(ResourceExhausted, match="larger than max"):
        driver.run(lambda client: client.status())

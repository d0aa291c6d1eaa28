"""The options of a channel, that a user's own replace them, and when another channel takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from motet import ResourceExhausted
from motet.connection.channel import MAX_RECEIVE_BYTES, Channels, Security, channel_options, security_of

from tests.client.conftest import Driver
from tests.client.scripted_server import ScriptedServer
from tests.fakes.authority import Authority, overwrite


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


class Opened:
    """Channels, which are numbers here: those that were opened and those that were closed."""

    def __init__(self, security: Security) -> None:
        self.num_opened = 0
        self.closed: list[int] = []
        self.channels: Channels[int] = Channels(security, self._open, self.closed.append)

    def _open(self, _credentials: object) -> int:
        self.num_opened += 1
        return self.num_opened


def test_without_files_there_is_one_channel() -> None:
    opened = Opened(Security())
    assert [opened.channels.acquire(), opened.channels.acquire()] == [1, 1] and not opened.channels.may_change
    opened.channels.release(1)
    assert opened.channels.all() == [1] and opened.closed == []


def test_a_channel_that_was_replaced_is_closed_when_its_last_call_has_ended(tmp_path: Path) -> None:
    ca = Authority().write(tmp_path)
    opened = Opened(security_of(None, ca, None, None))
    channels = opened.channels
    assert [channels.acquire(), channels.acquire()] == [1, 1] and channels.may_change
    overwrite(ca, Authority().pem)
    assert channels.acquire() == 2 and channels.all() == [2, 1]
    channels.release(1)
    assert channels.acquire() == 2 and opened.closed == []
    channels.release(1)
    assert channels.acquire() == 2 and opened.closed == [1] and channels.all() == [2]


def test_files_that_cannot_be_used_keep_the_channel_and_are_read_again_when_they_change(tmp_path: Path) -> None:
    ca = Authority().write(tmp_path)
    opened = Opened(security_of(None, ca, None, None))
    overwrite(ca, b"half")
    assert opened.channels.acquire() == 1
    ca.unlink()
    assert opened.channels.acquire() == 1
    ca.write_bytes(Authority().pem)
    assert opened.channels.acquire() == 2
    for _ in range(2):
        opened.channels.release(1)
    assert opened.channels.acquire() == 2 and opened.closed == [1]


def test_a_channel_that_no_call_uses_is_closed_as_soon_as_it_is_replaced(tmp_path: Path) -> None:
    ca = Authority().write(tmp_path)
    opened = Opened(security_of(None, ca, None, None))
    overwrite(ca, Authority().pem)
    assert opened.channels.acquire() == 2 and opened.closed == [1]

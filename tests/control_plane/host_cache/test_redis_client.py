"""Connections to Redis: TLS, passwords of files, what errors say, and what the workers' user may do."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis

from contract.redis_access import PasswordUnreadable, RedisAccess, RedisTls, reason_of
from control_plane.host_cache.embedded import EmbeddedRedis
from control_plane.host_cache.redis_cache import RedisHostCache
from control_plane.host_cache.redis_client import find_wrong_permission, make_client
from tests.control_plane.host_cache.rig import BUDGET, FakeStore, RedisProcess, make_weights, read_all
from tests.fakes.authority import LOCALHOST, Authority
from tests.fakes.tls_front import TlsFront

SECURITY = Path(__file__).resolve().parents[3] / "docs" / "security.md"
TIMEOUT_S = 20.0  # on a busy machine


def documented_users() -> list[list[str]]:
    """The commands of docs/security.md that make the two users, with passwords in place of the placeholders."""
    found = re.findall(r"^(ACL SETUSER .*)$", SECURITY.read_text(encoding="utf-8"), re.M)
    return [line.replace("SERVER_PASSWORD", "srv-pw").replace("WORKER_PASSWORD", "wrk-pw").split() for line in found]


def access(process: RedisProcess, user: str) -> RedisAccess:
    return RedisAccess(url=process.url.replace("unix://", f"unix://{user}@"))


async def test_the_documented_users_serve_the_cache_and_no_more(
    redis_process: RedisProcess, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    users = documented_users()
    assert [user[2] for user in users] == ["motet-server", "motet-worker"]
    for command in users:
        redis_process.client.execute_command(*command)
    workers = access(redis_process, "motet-worker:wrk-pw")
    cache = RedisHostCache(
        access(redis_process, "motet-server:srv-pw"),
        worker_access=workers,
        budget_bytes=BUDGET,
        call_timeout_s=TIMEOUT_S,
    )
    await cache.check()
    assert cache.is_available
    weights, digest = make_weights(cache, store), store.add(1)
    await weights.ensure_cached(digest)
    assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    await weights.drop(digest)
    await cache.close()
    assert not caplog.records, "neither user is permitted too little or too much"


@pytest.mark.parametrize(
    ("permissions", "words"),
    [
        (("~motet:a:*", "+get", "+set"), "may write motet:a:*"),
        (("~*", "+get"), "may read other keys than motet:a:*"),
        (("~motet:b:*", "+get"), "may not read motet:a:*"),
        (("~motet:a:*", "+get", "+mget", "+exists"), None),
    ],
)
async def test_what_the_workers_user_may_do_is_tried_out(
    redis_process: RedisProcess, permissions: tuple[str, ...], words: str | None
) -> None:
    redis_process.client.execute_command("ACL", "SETUSER", "w", "on", ">pw", "-@all", "+auth", "+hello", *permissions)
    found = await asyncio.to_thread(find_wrong_permission, access(redis_process, "w:pw"), TIMEOUT_S)
    assert (found is None) if words is None else (found is not None and words in found)
    assert not redis_process.client.keys("motet:a:*"), "nothing is left behind"


async def test_a_user_who_may_write_is_warned_of_once_the_cache_responds(
    redis_process: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    everything = RedisAccess(url=redis_process.url)
    cache = RedisHostCache(everything, worker_access=everything, budget_bytes=BUDGET, call_timeout_s=TIMEOUT_S)
    for _ in range(3):
        await cache.check()
    await cache.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "the workers' Redis user may write motet:a:*" in warnings[0]


async def test_a_redis_that_cannot_be_reached_says_nothing_of_permissions() -> None:
    nowhere = RedisAccess(url="unix:///nowhere/at/all")
    assert await asyncio.to_thread(find_wrong_permission, nowhere, 1.0) is None


async def test_a_changed_password_file_needs_no_restart(redis_process: RedisProcess, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    redis_process.client.execute_command("ACL", "SETUSER", "s", "on", ">first", "~*", "+@all")
    client = make_client(
        RedisAccess(url=access(redis_process, "s").url, password_file=file), TIMEOUT_S, max_connections=1
    )
    assert await asyncio.to_thread(client.ping)
    redis_process.client.execute_command("ACL", "SETUSER", "s", "resetpass", ">second")
    redis_process.client.execute_command("CLIENT", "KILL", "USER", "s")
    file.write_text("second\n")
    with contextlib.suppress(redis.ConnectionError):  # the connection that was cut
        await asyncio.to_thread(client.ping)
    assert await asyncio.to_thread(client.ping)
    file.unlink()
    client.connection_pool.disconnect()
    with pytest.raises(PasswordUnreadable) as caught:
        await asyncio.to_thread(client.ping)
    assert reason_of(caught.value) == "the file with the password of Redis cannot be read"


Respond = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def test_a_redis_that_repeats_the_password_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """Redis before version 6 refuses HELLO and repeats its arguments, as do proxies that rename commands."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(
            b"-ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `motet-server`, `planted`, \r\n"
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    cache = RedisHostCache(RedisAccess(url=f"redis://motet-server:planted@127.0.0.1:{port}"), budget_bytes=BUDGET)
    await cache.check()
    assert cache.error == "Redis refuses: unknown command `HELLO`"
    assert "planted" not in caplog.text and "unknown command `HELLO`" in caplog.text
    await cache.close()
    server.close()


async def test_redis_is_reached_by_tls_with_a_certificate_of_ones_own(tmp_path: Path, store: FakeStore) -> None:
    authority = Authority()
    ca, (cert, key) = authority.write(tmp_path), authority.issue(*LOCALHOST).write(tmp_path)
    own_cert, own_key = authority.issue("control-plane").write(tmp_path, "own")
    async with EmbeddedRedis(tmp_path / "redis") as server, TlsFront(server.socket, cert, key, client_ca=ca) as front:
        (password,) = re.findall(r">(\w+)", (tmp_path / "redis" / "redis.conf").read_text())
        url = f"rediss://motet-server:{password}@127.0.0.1:{front.port}"
        tls = RedisTls(ca=ca, cert=own_cert, key=own_key)
        cache = RedisHostCache(RedisAccess(url=url, tls=tls), budget_bytes=BUDGET, call_timeout_s=TIMEOUT_S)
        await cache.check()
        assert cache.error == ""
        weights, digest = make_weights(cache, store), store.add(1)
        await weights.ensure_cached(digest)
        assert weights.is_cached(digest)
        assert await read_all(await weights.open_packed(digest)) == store.content(digest)
        await cache.close()


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (
            "other authority",
            "TLS fails: unable to get local issuer certificate; --redis-tls-ca must have its authority",
        ),
        ("other host name", "TLS fails: IP address mismatch, certificate is not valid for '127.0.0.1'"),
        ("no certificate of one's own", "TLS fails: Redis (wants|closes).*--redis-tls-cert|Redis cannot be reached"),
    ],
)
async def test_a_tls_server_that_is_not_the_right_one_is_not_used(tmp_path: Path, case: str, error: str) -> None:
    authority, other = Authority(), Authority()
    ca = authority.write(tmp_path)
    names = ("redis.example",) if case == "other host name" else LOCALHOST
    cert, key = (other if case == "other authority" else authority).issue(*names).write(tmp_path)
    client_ca = ca if case.startswith("no certificate") else None
    async with (
        EmbeddedRedis(tmp_path / "redis") as server,
        TlsFront(server.socket, cert, key, client_ca=client_ca) as front,
    ):
        url = f"rediss://motet-worker:planted@127.0.0.1:{front.port}"
        cache = RedisHostCache(RedisAccess(url=url, tls=RedisTls(ca=ca)), budget_bytes=BUDGET, call_timeout_s=TIMEOUT_S)
        await cache.check()
        assert not cache.is_available and re.match(error, cache.error), cache.error
        await cache.close()

"""Redis that is away, hung, full, emptied or refuses: adapters are served all the same."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from contract.redis_access import RedisAccess
from control_plane.host_cache.redis_cache import RedisHostCache
from control_plane.host_cache.weights import AdapterWeights
from tests.control_plane.host_cache.rig import BUDGET, Clock, FakeStore, RedisProcess, make_weights, read_all


def is_up(process: RedisProcess) -> str:
    return process.url


def wants_a_password(process: RedisProcess) -> str:
    process.client.config_set("requirepass", "secret")
    return process.url


def has_another_password(process: RedisProcess) -> str:
    process.client.config_set("requirepass", "secret")
    return process.url.replace("unix://", "unix://:wr0ng@")


def is_not_there(process: RedisProcess) -> str:
    process.client.close()
    process.kill()
    return process.url


def is_stopped(process: RedisProcess) -> str:
    process.signal(signal.SIGSTOP)
    return process.url


def permits_no_scan(process: RedisProcess) -> str:
    process.client.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", "~*", "+@all", "-scan")
    return process.url.replace("unix://", "unix://narrow:pw@")


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (is_up, ""),
        (wants_a_password, "Redis refuses: it wants a password"),
        (has_another_password, "Redis refuses: invalid username-password pair or user is disabled."),
        (is_not_there, "Redis cannot be reached: "),
        (is_stopped, "Redis does not respond in time"),
        (permits_no_scan, "Redis refuses: this user has no permissions to run the 'scan' command"),
    ],
    ids=lambda case: case.__name__ if callable(case) else "",
)
async def test_why_redis_cannot_be_used_is_reported_and_logged_once(
    redis_process: RedisProcess,
    store: FakeStore,
    caplog: pytest.LogCaptureFixture,
    state: Callable[[RedisProcess], str],
    error: str,
) -> None:
    # On a busy machine a Redis that is well may take its time.
    timeout_s = 0.4 if state is is_stopped else 10.0
    cache = RedisHostCache(RedisAccess(url=state(redis_process)), budget_bytes=BUDGET, call_timeout_s=timeout_s)
    for _ in range(3):
        await cache.check()
    stats = make_weights(cache, store).stats()
    assert stats.error.startswith(error) and stats.is_available is (not error)
    assert (not error) is (not stats.error)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (1 if error else 0)
    assert all(f"not available reason={stats.error}" in warning for warning in warnings)
    assert str(redis_process.socket) not in stats.error and "wr0ng" not in caplog.text
    await cache.close()


async def test_a_server_that_is_not_a_redis_is_named_so(store: FakeStore) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    cache = RedisHostCache(RedisAccess(url=f"redis://127.0.0.1:{port}"), budget_bytes=BUDGET)
    await cache.check()
    assert cache.error == "the server there is not a Redis"
    assert str(port) not in cache.error
    await cache.close()
    server.close()


async def test_flushall_is_noticed_and_pins_come_back(
    weights: AdapterWeights, cache: RedisHostCache, store: FakeStore, redis_process: RedisProcess
) -> None:
    pinned, other = store.add(1), store.add(2)
    await weights.pin(pinned)
    await weights.ensure_cached(other)
    redis_process.client.flushall()
    await cache.check()
    await weights.wait_idle()
    assert (weights.is_cached(pinned), weights.is_cached(other)) == (True, False)


async def test_no_write_begins_while_redis_is_scanned(
    cache: RedisHostCache, weights: AdapterWeights, store: FakeStore, redis_process: RedisProcess
) -> None:
    """The scan ends reservations and removes what is not whole: a write beside it would be committed without either."""
    digest = store.add(1)
    manifest, chunks = store.blobs[digest]
    redis_process.client.flushall()
    num_scans = cache.num_scans
    checking = asyncio.create_task(cache.check())
    while cache.num_scans == num_scans:
        await asyncio.sleep(0)

    async def arriving() -> AsyncIterator[bytes]:
        await checking
        for chunk in chunks:
            yield chunk

    assert not await cache.write(digest, manifest, [len(chunk) for chunk in chunks], arriving())
    await checking
    assert not cache.contains(digest) and cache.used_bytes == 0
    await weights.ensure_cached(digest)
    assert cache.contains(digest)


async def test_a_write_that_waits_for_an_eviction_does_not_begin_within_a_scan(
    cache: RedisHostCache, store: FakeStore, redis_process: RedisProcess, clock: Clock
) -> None:
    evicted, digest = store.add(1), store.add(2)
    weights = make_weights(cache, store)
    await weights.ensure_cached(evicted)
    redis_process.client.execute_command("ACL", "SETUSER", "default", "-unlink")
    await cache.drop(evicted)  # its bytes stay, and every write tries first to remove them
    redis_process.client.execute_command("ACL", "SETUSER", "default", "+unlink")
    clock.ahead_s = 60.0  # the pause after a refusal is over
    manifest, chunks = store.blobs[digest]
    scanned = asyncio.Event()

    async def arriving() -> AsyncIterator[bytes]:
        await scanned.wait()
        for chunk in chunks:
            yield chunk

    writing = asyncio.create_task(cache.write(digest, manifest, [len(chunk) for chunk in chunks], arriving()))
    await asyncio.sleep(0)  # it waits for the removal
    redis_process.client.flushall()
    await cache.check()
    scanned.set()
    await writing
    assert cache.contains(digest) == bool(redis_process.client.exists(f"motet:a:{digest}:manifest"))
    await weights.ensure_cached(digest)
    assert cache.contains(digest)


async def test_killed_redis_is_a_miss_and_is_used_again_when_back(
    weights: AdapterWeights, cache: RedisHostCache, store: FakeStore, redis_process: RedisProcess
) -> None:
    digest = store.add(1)
    await weights.ensure_cached(digest)
    redis_process.kill()
    assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    assert not weights.stats().is_available
    redis_process.start()
    await cache.check()
    assert weights.stats().is_available
    assert not weights.is_cached(digest)
    await weights.ensure_cached(digest)
    assert weights.is_cached(digest)


async def test_hung_redis_is_given_up_and_the_store_responds(store: FakeStore, redis_process: RedisProcess) -> None:
    cache = RedisHostCache(RedisAccess(url=redis_process.url), budget_bytes=BUDGET, call_timeout_s=0.4)
    await cache.check()
    weights = make_weights(cache, store)
    digest, cold = store.add(1), store.add(2)
    await weights.ensure_cached(digest)
    redis_process.signal(signal.SIGSTOP)
    async with asyncio.timeout(30):  # without a bound of its own the read would wait for ever
        assert await read_all(await weights.open_packed(digest)) == store.content(digest)
        assert await read_all(await weights.open_packed(cold)) == store.content(cold)
    redis_process.signal(signal.SIGCONT)
    await cache.close()


async def test_hung_redis_costs_one_call_and_not_one_for_every_adapter(
    store: FakeStore, redis_process: RedisProcess
) -> None:
    cache = RedisHostCache(RedisAccess(url=redis_process.url), budget_bytes=BUDGET, call_timeout_s=1.0)
    await cache.check()
    weights = make_weights(cache, store)
    digests = [store.add(seed) for seed in range(30)]
    redis_process.signal(signal.SIGSTOP)
    async with asyncio.timeout(15):  # one time limit each would make 30 s
        for digest in digests:
            assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    redis_process.signal(signal.SIGCONT)
    await cache.close()


async def test_people_read_that_redis_responds_again_after_reading_that_it_does_not(
    redis_process: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cache = RedisHostCache(RedisAccess(url=redis_process.url), budget_bytes=BUDGET, call_timeout_s=2.0)
    await cache.check()
    assert cache.is_available and not [record for record in caplog.records if hasattr(record, "shown")]
    redis_process.signal(signal.SIGSTOP)
    await cache.check()
    redis_process.signal(signal.SIGCONT)
    async with asyncio.timeout(30):
        while not cache.is_available:
            await cache.check()
    assert [record.shown for record in caplog.records if hasattr(record, "shown")] == [
        "the host cache cannot be used: Redis does not respond in time; adapters are read from the store until Redis "
        "responds",
        "host cache responds",
    ]
    await cache.close()


async def test_full_redis_refuses_writes_and_reads_go_on(
    weights: AdapterWeights, store: FakeStore, redis_process: RedisProcess
) -> None:
    cached, cold = store.add(1), store.add(2)
    await weights.ensure_cached(cached)
    redis_process.client.config_set("maxmemory", 1)
    assert await read_all(await weights.open_packed(cold)) == store.content(cold)
    assert weights.stats().is_available
    assert not weights.is_cached(cold)
    reads = store.num_chunk_reads
    assert await read_all(await weights.open_packed(cached)) == store.content(cached)
    assert store.num_chunk_reads == reads


async def test_what_could_not_be_removed_counts_until_it_is(
    weights: AdapterWeights, cache: RedisHostCache, store: FakeStore, redis_process: RedisProcess, clock: Clock
) -> None:
    """Redis refuses to unlink: the bytes of the evicted one are there still, so there is no room for another."""
    client = redis_process.client
    old, new = store.add(1, (15_000,)), store.add(2, (15_000,))
    await weights.ensure_cached(old)
    client.execute_command("ACL", "SETUSER", "default", "-unlink")
    await weights.ensure_cached(new)
    assert (weights.is_cached(old), weights.is_cached(new)) == (False, False)
    assert sum(client.strlen(key) for key in client.keys("motet:a:*")) <= cache.used_bytes <= BUDGET
    client.execute_command("ACL", "SETUSER", "default", "+unlink")
    clock.ahead_s = 60.0  # the pause after a refusal is over
    await weights.ensure_cached(new)
    assert weights.is_cached(new)
    assert not client.keys(f"motet:a:{old}:*")
    assert cache.used_bytes == store.size(new)

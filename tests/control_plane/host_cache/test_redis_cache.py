"""The Redis host cache against a real redis-server."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest

from contract.cache_keys import PART_BYTES, manifest_key
from control_plane.errors import AdapterDamaged, AdapterNotFound, InvalidRequest, PinBudgetExceeded
from control_plane.host_cache.redis_cache import RedisHostCache, check_url
from control_plane.host_cache.weights import AdapterWeights
from tests.control_plane.host_cache.rig import FakeStore, RedisProcess, make_weights, read_all

BUDGET = 20_000


class Clock:
    """Ahead of the real one by as much as a test says."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def cache(redis_process: RedisProcess, clock: Clock) -> AsyncIterator[RedisHostCache]:
    # The time limit holds on a busy machine too.
    made = RedisHostCache(redis_process.url, budget_bytes=BUDGET, call_timeout_s=20.0, clock=clock, seed=1)
    await made.check()
    yield made
    await made.close()


@pytest.fixture
def weights(cache: RedisHostCache, store: FakeStore) -> AdapterWeights:
    return make_weights(cache, store)


async def test_a_miss_fills_the_cache_and_the_next_read_is_a_hit(weights: AdapterWeights, store: FakeStore) -> None:
    digest = store.add(1)
    first = await weights.open_packed(digest)
    assert (first.manifest, await read_all(first)) == (store.blobs[digest][0], store.content(digest))
    reads = store.num_chunk_reads
    second = await weights.open_packed(digest)
    assert (second.manifest, await read_all(second)) == (store.blobs[digest][0], store.content(digest))
    assert store.num_chunk_reads == reads
    stats = weights.stats()
    assert (stats.num_hits, stats.num_misses, stats.num_adapters, stats.used_bytes) == (1, 1, 1, store.size(digest))


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
    cache = RedisHostCache(state(redis_process), budget_bytes=BUDGET, call_timeout_s=timeout_s)
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
    cache = RedisHostCache(f"redis://127.0.0.1:{port}", budget_bytes=BUDGET)
    await cache.check()
    assert cache.error == "the server there is not a Redis"
    assert str(port) not in cache.error
    await cache.close()
    server.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:pw@host?ssl_verify=no", "has an option that redis-py does not know: ssl_verify"),
        ("rediss://host?ssl_cert_reqs=perhaps", "ssl_cert_reqs|Certificate"),
        ("redis://host:99999", "Port"),
        ("unix:///tmp/s?colour=red", "colour"),
        ("redis://:pw@host?socket_timeout=long", "socket_timeout"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        check_url(url)
    assert "pw" not in str(caught.value)


def test_urls_that_work_are_taken() -> None:
    for url in ("redis://u:pw@host:1/2", "rediss://host?ssl_cert_reqs=none", "unix:///tmp/s", "redis://h?db=3"):
        check_url(url)


async def test_large_chunks_travel_in_parts(redis_process: RedisProcess, store: FakeStore) -> None:
    cache = RedisHostCache(redis_process.url, budget_bytes=1 << 26)
    await cache.check()
    weights = make_weights(cache, store)
    digest = store.add(1, (2 * PART_BYTES + 5, PART_BYTES, 0))
    await weights.ensure_cached(digest)
    assert redis_process.client.strlen(f"motet:a:{digest}:0:1") == PART_BYTES
    assert redis_process.client.strlen(f"motet:a:{digest}:0:2") == 5
    reads = store.num_chunk_reads
    assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    assert store.num_chunk_reads == reads
    await cache.close()


async def test_least_recently_used_goes_first_and_the_budget_holds(
    weights: AdapterWeights, store: FakeStore, redis_process: RedisProcess
) -> None:
    digests = [store.add(seed, (5000,)) for seed in range(4)]
    for digest in digests[:3]:
        await weights.ensure_cached(digest)
    weights.touch(digests[0])
    await weights.ensure_cached(digests[3])
    assert [weights.is_cached(digest) for digest in digests] == [True, False, True, True]
    assert weights.stats().used_bytes <= BUDGET
    assert not redis_process.client.keys(f"motet:a:{digests[1]}:*")


async def test_a_pinned_adapter_survives_eviction_and_pins_have_a_limit(
    weights: AdapterWeights, store: FakeStore
) -> None:
    digests = [store.add(seed, (8000,)) for seed in range(4)]
    await weights.pin(digests[0])
    for digest in digests[1:]:
        await weights.ensure_cached(digest)
    assert [weights.is_cached(digest) for digest in digests] == [True, False, False, True]
    await weights.pin(digests[1])
    with pytest.raises(PinBudgetExceeded, match="--host-cache-bytes"):
        await weights.pin(digests[2])
    await weights.unpin(digests[0])
    await weights.pin(digests[2])


async def test_an_adapter_larger_than_the_budget_is_served_from_the_store(
    weights: AdapterWeights, store: FakeStore
) -> None:
    digest = store.add(1, (BUDGET + 1,))
    assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    assert not weights.is_cached(digest)


@pytest.mark.parametrize("damage", ["flip", "swap", "missing part", "missing manifest", "wrong manifest"])
async def test_damaged_entries_are_misses_and_are_filled_again(
    damage: str, weights: AdapterWeights, store: FakeStore, redis_process: RedisProcess
) -> None:
    digest, other = store.add(1), store.add(2)
    await weights.ensure_cached(digest)
    await weights.ensure_cached(other)
    client = redis_process.client
    if damage == "flip":
        client.setrange(f"motet:a:{digest}:1:0", 7, b"\xff\x00")
    elif damage == "swap":
        client.rename(f"motet:a:{other}:1:0", f"motet:a:{digest}:1:0")
    elif damage == "missing part":
        client.delete(f"motet:a:{digest}:0:0")
    elif damage == "missing manifest":
        client.delete(f"motet:a:{digest}:manifest")
    else:
        client.copy(f"motet:a:{other}:manifest", f"motet:a:{digest}:manifest", replace=True)
    assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    await weights.wait_idle()
    assert weights.is_cached(digest)
    reads = store.num_chunk_reads
    assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    assert store.num_chunk_reads == reads
    assert weights.stats().num_corrupt == (1 if damage in ("flip", "swap", "wrong manifest") else 0)


async def test_concurrent_misses_read_the_store_once(weights: AdapterWeights, store: FakeStore) -> None:
    digest = store.add(1)
    opened = await asyncio.gather(*(weights.open_packed(digest) for _ in range(20)))
    for packed in opened:
        assert await read_all(packed) == store.content(digest)
    assert (store.num_manifest_reads, store.num_chunk_reads) == (1, 2)


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
    cache = RedisHostCache(redis_process.url, budget_bytes=BUDGET, call_timeout_s=0.4)
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
    cache = RedisHostCache(redis_process.url, budget_bytes=BUDGET, call_timeout_s=1.0)
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
    cache = RedisHostCache(redis_process.url, budget_bytes=BUDGET, call_timeout_s=2.0)
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


async def test_a_new_control_plane_finds_what_is_whole_and_removes_the_rest(
    weights: AdapterWeights, store: FakeStore, redis_process: RedisProcess
) -> None:
    whole, partial, headless = store.add(1), store.add(2), store.add(3)
    for digest in (whole, partial, headless):
        await weights.ensure_cached(digest)
    redis_process.client.delete(f"motet:a:{partial}:0:0")
    redis_process.client.delete(f"motet:a:{headless}:manifest")
    second = RedisHostCache(redis_process.url, budget_bytes=BUDGET)
    await second.check()
    assert [second.contains(digest) for digest in (whole, partial, headless)] == [True, False, False]
    assert second.used_bytes == store.size(whole)
    assert not redis_process.client.keys(f"motet:a:{partial}:*")
    await second.close()


async def test_a_key_that_only_looks_like_a_manifest_is_removed_and_the_cache_goes_on(
    weights: AdapterWeights, cache: RedisHostCache, store: FakeStore, redis_process: RedisProcess
) -> None:
    """Its value hashes to its name, and is none: the scan used to end there, and the cache stayed off."""
    value = b'{"not": "a manifest"}'
    poison = f"motet:a:{hashlib.sha256(value).hexdigest()}:manifest"
    redis_process.client.flushall()
    redis_process.client.set(poison, value)
    await cache.check()
    assert cache.is_available
    assert not redis_process.client.exists(poison)
    digest = store.add(1)
    await weights.ensure_cached(digest)
    assert weights.is_cached(digest)


async def test_keys_of_another_type_are_replaced_and_the_cache_goes_on(
    weights: AdapterWeights, cache: RedisHostCache, store: FakeStore, redis_process: RedisProcess
) -> None:
    """A list where a manifest or the marker belongs: the scan used to end there, and the cache stayed off."""
    digest = store.add(1)
    await weights.ensure_cached(digest)
    for key in ("motet:cache:marker", manifest_key(digest)):
        redis_process.client.delete(key)
        redis_process.client.lpush(key, b"x")
    await cache.check()
    assert cache.is_available and cache.error == ""
    assert not redis_process.client.exists(manifest_key(digest)) and not weights.is_cached(digest)
    await weights.ensure_cached(digest)
    assert weights.is_cached(digest)
    await cache.check()
    assert weights.is_cached(digest), "the marker is ours again"


async def test_a_key_of_another_type_is_a_miss_that_holds_up_no_write(
    weights: AdapterWeights, cache: RedisHostCache, store: FakeStore, redis_process: RedisProcess
) -> None:
    first, second = store.add(1), store.add(2)
    await weights.ensure_cached(first)
    redis_process.client.delete(manifest_key(first))
    redis_process.client.lpush(manifest_key(first), b"x")
    assert await cache.read_manifest(first) is None
    await weights.ensure_cached(second)
    assert weights.is_cached(second)


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


async def test_a_cancelled_read_never_mixes_up_responses(weights: AdapterWeights, store: FakeStore) -> None:
    digests = [store.add(seed) for seed in range(3)]
    for digest in digests:
        await weights.ensure_cached(digest)
    for turn in range(60):
        victim = asyncio.create_task(weights.open_packed(digests[turn % 3]))
        for _ in range(turn % 4):
            await asyncio.sleep(0)
        victim.cancel()
        await asyncio.gather(victim, return_exceptions=True)
        digest = digests[(turn + 1) % 3]
        assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    assert weights.stats().num_corrupt == 0


async def test_dropped_adapters_leave_no_key(
    weights: AdapterWeights, store: FakeStore, redis_process: RedisProcess
) -> None:
    digest = store.add(1)
    await weights.pin(digest)
    await weights.unpin(digest)
    await weights.drop(digest)
    assert not weights.is_cached(digest)
    assert not redis_process.client.keys("motet:a:*")


async def test_bad_digests_and_damaged_stores_are_refused(weights: AdapterWeights, store: FakeStore) -> None:
    with pytest.raises(InvalidRequest, match="digest"):
        await weights.open_packed("../../etc/passwd")
    with pytest.raises(AdapterNotFound):
        await weights.open_packed("0" * 64)
    digest = store.add(1)
    store.blobs[digest][1][1] = b"x" * 2000
    with pytest.raises(AdapterDamaged, match="damaged"):
        await weights.open_packed(digest)
    assert not weights.is_cached(digest)

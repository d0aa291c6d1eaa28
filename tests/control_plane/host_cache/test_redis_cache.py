"""The Redis host cache against a real redis-server."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

from contract.cache_keys import PART_BYTES, manifest_key
from contract.redis_access import RedisAccess
from control_plane.errors import AdapterDamaged, AdapterNotFound, InvalidRequest, PinBudgetExceeded
from control_plane.host_cache.redis_cache import RedisHostCache
from control_plane.host_cache.redis_client import check_access
from control_plane.host_cache.weights import AdapterWeights
from tests.control_plane.host_cache.rig import BUDGET, FakeStore, RedisProcess, make_weights, read_all


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


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://host:99999", "cannot be read as SCHEME://"),
        ("redis://:pw/x@host", "cannot be read as SCHEME://"),
        ("redis://:pw@host?db=long", "Invalid value for 'db'"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        check_access(RedisAccess(url=url))
    assert "pw" not in str(caught.value)


def test_urls_that_work_are_taken() -> None:
    for url in ("redis://u:pw@host:1/2", "rediss://host?client_name=motet", "unix:///tmp/s", "redis://h?db=3"):
        check_access(RedisAccess(url=url))


async def test_large_chunks_travel_in_parts(redis_process: RedisProcess, store: FakeStore) -> None:
    cache = RedisHostCache(RedisAccess(url=redis_process.url), budget_bytes=1 << 26)
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


async def test_a_new_control_plane_finds_what_is_whole_and_removes_the_rest(
    weights: AdapterWeights, store: FakeStore, redis_process: RedisProcess
) -> None:
    whole, partial, headless = store.add(1), store.add(2), store.add(3)
    for digest in (whole, partial, headless):
        await weights.ensure_cached(digest)
    redis_process.client.delete(f"motet:a:{partial}:0:0")
    redis_process.client.delete(f"motet:a:{headless}:manifest")
    second = RedisHostCache(RedisAccess(url=redis_process.url), budget_bytes=BUDGET)
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


async def test_a_manifest_that_claims_chunks_without_end_is_removed_and_the_cache_goes_on(
    weights: AdapterWeights, cache: RedisHostCache, store: FakeStore, redis_process: RedisProcess
) -> None:
    """The keys of its chunks were listed before they were counted: the scan took all memory."""
    endless = {"name": "layers.0", "sha256": "0" * 64, "size_bytes": 10**18}
    value = json.dumps({"chunks": [endless]}).encode()
    poison = f"motet:a:{hashlib.sha256(value).hexdigest()}:manifest"
    redis_process.client.flushall()
    redis_process.client.set(poison, value)
    await cache.check()
    assert cache.is_available and not redis_process.client.exists(poison)
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

"""Reading adapters part by part, whatever is damaged, deleted, large or hung meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import tracemalloc
from pathlib import Path

import pytest

from contract.cache_keys import PART_BYTES
from control_plane.errors import AdapterDamaged, AdapterNotFound, StoreUnavailable
from control_plane.host_cache.fresh_blobs import FreshBlob
from control_plane.host_cache.memory_cache import MemoryHostCache
from control_plane.host_cache.packed import read_layout
from control_plane.host_cache.weights import HELD_BYTES, AdapterWeights
from control_plane.store_calls import StoreCalls
from tests.control_plane.host_cache.rig import FakeStore, make_blob, make_weights, read_all

BUDGET = 64 << 20
LARGE = HELD_BYTES + 1000  # a chunk that is never in memory as a whole


@pytest.fixture
def cache() -> MemoryHostCache:
    return MemoryHostCache(budget_bytes=BUDGET)


@pytest.mark.parametrize("is_cached", [False, True])
async def test_large_chunks_come_in_parts_that_cross_no_chunk(
    cache: MemoryHostCache, store: FakeStore, is_cached: bool
) -> None:
    weights = make_weights(cache if is_cached else MemoryHostCache(budget_bytes=0), store)
    digest = store.add(1, (LARGE, 10, PART_BYTES + 1))
    packed = await weights.open_packed(digest)
    parts = [part async for part in packed.parts()]
    assert [len(part) for part in parts] == [*[PART_BYTES] * 16, 1000, 10, PART_BYTES, 1]
    assert b"".join(parts) == store.content(digest)
    assert weights.is_cached(digest) is is_cached


async def test_a_large_chunk_is_never_in_memory_as_a_whole(store: FakeStore) -> None:
    weights = make_weights(MemoryHostCache(budget_bytes=0), store)
    packed = await weights.open_packed(store.add(1, (32 * PART_BYTES,)))
    tracemalloc.start()
    try:
        async for _ in packed.parts():
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The one in hand, and those that a thread and a caller have not let go yet; 16 would be a chunk that is held.
    assert peak_bytes < 12 * PART_BYTES


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
@pytest.mark.parametrize("size", [2000, LARGE], ids=["small", "large"])
async def test_damage_in_the_store_is_reported_before_any_wrong_byte_and_remembered(
    cache: MemoryHostCache, store: FakeStore, damage: str, size: int
) -> None:
    for weights in (make_weights(cache, store), make_weights(MemoryHostCache(budget_bytes=0), store)):
        digest = store.add(1, (100, size))
        chunks = store.blobs[digest][1]
        good = chunks[1]
        if damage == "flip":
            chunks[1] = good[:-1] + bytes([good[-1] ^ 1])
        elif damage == "cut":
            chunks[1] = good[:-1]
        else:
            del chunks[1]
        with pytest.raises(AdapterDamaged, match="damaged; register the same adapter files again"):
            await read_all(await weights.open_packed(digest))
        assert weights.damage(digest) is not None
        assert not weights.is_cached(digest)
        chunks[1:] = [good]
        weights.stored_anew(digest)
        assert weights.damage(digest) is None
        assert await read_all(await weights.open_packed(digest)) == store.content(digest)


async def test_damage_that_was_a_moments_is_forgotten_when_all_is_read(
    cache: MemoryHostCache, store: FakeStore
) -> None:
    weights = make_weights(cache, store)
    digest = store.add(1)
    chunks = store.blobs[digest][1]
    good, chunks[1] = chunks[1], b"x" * len(chunks[1])
    with pytest.raises(AdapterDamaged):
        await weights.ensure_cached(digest)
    chunks[1] = good
    await weights.ensure_cached(digest)
    assert weights.damage(digest) is None


async def test_a_large_chunk_that_changes_between_two_reads_is_noticed(
    cache: MemoryHostCache, store: FakeStore
) -> None:
    weights = make_weights(MemoryHostCache(budget_bytes=0), store)
    digest = store.add(1, (LARGE,))
    packed = await weights.open_packed(digest)
    parts = packed.parts()
    await anext(parts)  # the first reading is over
    store.blobs[digest][1][0] = b"x" * LARGE
    with pytest.raises(StoreUnavailable, match="changed while they were read"):
        async for _ in parts:
            pass


async def test_weights_that_are_gone_are_not_called_damaged(cache: MemoryHostCache, store: FakeStore) -> None:
    names = Names()
    weights = make_weights(MemoryHostCache(budget_bytes=0), store, is_wanted=names)
    digest = store.add(1)
    packed = await weights.open_packed(digest)
    del store.blobs[digest]
    with pytest.raises(AdapterNotFound, match="register the adapter again"):
        await read_all(packed)
    assert weights.damage(digest) is None
    names.wanted.add(digest)  # a name has them: the store lost its manifest
    with pytest.raises(AdapterDamaged):
        await weights.open_packed(digest)


class Names:
    """Which digests names have."""

    def __init__(self) -> None:
        self.wanted: set[str] = set()

    def __call__(self, digest: str) -> bool:
        return digest in self.wanted


async def test_a_deleted_adapter_is_read_for_streams_that_finish_but_never_cached_again(
    cache: MemoryHostCache, store: FakeStore
) -> None:
    names = Names()
    weights = make_weights(cache, store, is_wanted=names)
    digest = store.add(1)
    names.wanted.add(digest)
    await weights.ensure_cached(digest)
    names.wanted.clear()  # its deletion begins
    await weights.drop(digest)
    # Until its weights are removed from the store, a worker may fetch it and a request may ask for it in advance.
    assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    await weights.ensure_cached(digest)
    await weights.wait_idle()
    assert not weights.is_cached(digest) and weights.stats().used_bytes == 0


async def test_a_deletion_during_a_fill_leaves_nothing_in_the_cache(cache: MemoryHostCache) -> None:
    """The fill was under way when the deletion dropped the adapter, and ended after that."""

    class SlowStore(FakeStore):
        entered, go_on = threading.Event(), threading.Event()

        def read_range(self, digest: str, index: int, start: int, size_bytes: int) -> bytes:
            self.entered.set()
            assert self.go_on.wait(60)
            return super().read_range(digest, index, start, size_bytes)

    store, names = SlowStore(), Names()
    weights = make_weights(cache, store, is_wanted=names)
    digest = store.add(1)
    names.wanted.add(digest)
    filling = asyncio.ensure_future(weights.ensure_cached(digest))
    assert await asyncio.to_thread(store.entered.wait, 60)
    names.wanted.clear()
    store.go_on.set()
    await filling
    assert not weights.is_cached(digest) and weights.stats().used_bytes == 0


async def test_a_cache_that_is_there_again_forgets_what_was_deleted_meanwhile(
    cache: MemoryHostCache, store: FakeStore
) -> None:
    """A control plane that was killed between a deletion's steps finds the adapter in a Redis that went on."""
    names = Names()
    kept, deleted, pinned = (store.add(seed) for seed in range(3))
    names.wanted.update((kept, deleted, pinned))
    first = make_weights(cache, store, is_wanted=names)
    for digest in (kept, deleted):
        await first.ensure_cached(digest)
    names.wanted.discard(deleted)
    second = make_weights(cache, store, is_wanted=names)
    await second.pin(pinned)
    await cache.drop(pinned)
    assert cache.on_available is not None
    cache.on_available()
    await second.wait_idle()
    assert [second.is_cached(digest) for digest in (kept, deleted, pinned)] == [True, False, True]


async def test_a_store_that_hangs_is_unavailable_and_does_not_hold_other_readers(cache: MemoryHostCache) -> None:
    class HungStore(FakeStore):
        is_back = threading.Event()
        hung = ""

        def read_manifest(self, digest: str) -> bytes:
            if digest == self.hung:
                assert self.is_back.wait(120)
            return super().read_manifest(digest)

    store = HungStore()
    calls = StoreCalls(timeout_s=3.0)
    weights = AdapterWeights(cache, store, calls, is_wanted=lambda digest: True)
    store.hung, other = store.add(1), store.add(2)
    reading = asyncio.ensure_future(weights.open_packed(store.hung))
    assert await read_all(await weights.open_packed(other)) == store.content(other)
    with pytest.raises(StoreUnavailable, match="did not respond within 3 s"):
        await reading
    store.is_back.set()
    while calls.num_hung:
        await asyncio.sleep(0)
    assert await read_all(await weights.open_packed(store.hung)) == store.content(store.hung)


NO_MANIFESTS = [
    b"",
    b"[]",
    b"{}",
    b'{"chunks": 7}',
    b'{"chunks": [7]}',
    b'{"chunks": [{"size_bytes": -1, "sha256": "x"}]}',
    b'{"chunks": [{"size_bytes": "1", "sha256": "x"}]}',
    b'{"a":' * 100_000,
]


@pytest.mark.parametrize("manifest", NO_MANIFESTS, ids=[raw[:20].decode() for raw in NO_MANIFESTS])
def test_bytes_that_are_no_manifest_are_none_even_if_their_hash_is_right(manifest: bytes) -> None:
    assert read_layout(hashlib.sha256(manifest).hexdigest(), manifest) is None
    assert read_layout(make_blob(1)[0], manifest) is None


async def test_a_fresh_blob_comes_from_its_files_and_is_cached_when_that_is_requested(
    cache: MemoryHostCache, store: FakeStore, tmp_path: Path
) -> None:
    """The last file has documents beside the weights, which no worker reads."""
    digest, manifest, chunks = make_blob(5)
    paths = [tmp_path / name for name in ("0", "1", "tokenizer")]
    for path, data in zip(paths, [*chunks, b"{}"], strict=True):
        path.write_bytes(data)
    weights, blob = make_weights(cache, store), FreshBlob(digest, manifest, paths)
    with weights.fresh(blob):
        packed = await weights.open_packed(digest)
        assert packed.paths == tuple(paths[:2]) and await read_all(packed) == b"".join(chunks)
        assert not weights.is_cached(digest)
        await weights.cache_fresh(blob)
        assert weights.is_cached(digest)
    assert (await weights.open_packed(digest)).paths == ()
    assert await read_all(await weights.open_packed(digest)) == b"".join(chunks)

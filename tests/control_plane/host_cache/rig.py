"""Blobs, a store that counts, and a plain redis-server that tests may hurt."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis

from control_plane.host_cache.base import HostCache
from control_plane.host_cache.embedded import find_redis_server
from control_plane.host_cache.packed import PackedAdapter
from control_plane.host_cache.weights import AdapterWeights
from control_plane.store_calls import StoreCalls

BUDGET = 20_000  # bytes of the Redis caches of these tests


class Clock:
    """Ahead of the real one by as much as a test says."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def make_blob(seed: int, sizes: tuple[int, ...] = (1000, 2000)) -> tuple[str, bytes, list[bytes]]:
    """Digest, manifest and chunks of a made-up adapter."""
    chunks = []
    for index, size in enumerate(sizes):
        block = hashlib.sha256(f"{seed} {index}".encode()).digest()
        chunks.append((block * (size // len(block) + 1))[:size])
    described = [
        {"name": f"layers.{i}", "sha256": hashlib.sha256(c).hexdigest(), "size_bytes": len(c), "modules": []}
        for i, c in enumerate(chunks)
    ]
    manifest = json.dumps({"chunks": described, "seed": seed}, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(manifest).hexdigest(), manifest, chunks


class FakeStore:
    """Blobs in memory, with counts of what was read."""

    def __init__(self) -> None:
        self.blobs: dict[str, tuple[bytes, list[bytes]]] = {}
        self.added: set[str] = set()  # digests, removed ones too
        self.num_manifest_reads = 0
        self.num_chunk_reads = 0

    def add(self, seed: int, sizes: tuple[int, ...] = (1000, 2000)) -> str:
        digest, manifest, chunks = make_blob(seed, sizes)
        self.blobs[digest] = (manifest, chunks)
        self.added.add(digest)
        return digest

    def content(self, digest: str) -> bytes:
        return b"".join(self.blobs[digest][1])

    def size(self, digest: str) -> int:
        manifest, chunks = self.blobs[digest]
        return len(manifest) + sum(map(len, chunks))

    def read_manifest(self, digest: str) -> bytes:
        self.num_manifest_reads += 1
        if digest not in self.blobs:
            raise FileNotFoundError(digest)
        return self.blobs[digest][0]

    def read_range(self, digest: str, index: int, start: int, size_bytes: int) -> bytes:
        self.num_chunk_reads += 1
        if digest not in self.blobs or index >= len(self.blobs[digest][1]):
            raise FileNotFoundError(digest)
        return self.blobs[digest][1][index][start : start + size_bytes]


class RedisProcess:
    """A redis-server without passwords, on a Unix socket."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "r.sock"
        self.url = f"unix://{self.socket}"
        self._arguments = [str(find_redis_server()), "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self._arguments += ["--dir", str(directory)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = redis.Redis.from_url(self.url)
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, "redis-server ended"
                os.sched_yield()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


def make_weights(
    cache: HostCache, store: FakeStore, *, is_wanted: Callable[[str], bool] | None = None
) -> AdapterWeights:
    """Over a fake store. Wanted is what was ever added to it, unless given otherwise."""
    return AdapterWeights(cache, store, StoreCalls(), is_wanted=is_wanted or store.added.__contains__)


async def read_all(packed: PackedAdapter) -> bytes:
    """All bytes of the chunks of an adapter."""
    return b"".join([part async for part in packed.parts()])

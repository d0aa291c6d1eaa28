"""What a host cache is: whole packed adapters under a byte budget, possibly gone at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class HostCacheStats:
    """What the cache holds, and whether it works."""

    num_adapters: int
    used_bytes: int
    budget_bytes: int
    is_available: bool
    error: str  # why it is not available, for people; empty when it is
    num_hits: int  # adapters opened from the cache
    num_misses: int  # adapters opened from the store
    num_corrupt: int  # cached chunks or manifests whose hash was wrong
    num_evicted: int = 0  # adapters that left to make room
    pinned_bytes: int = 0  # of pins, of each holder
    cache_read_bytes: int = 0  # of weights, in all
    store_read_bytes: int = 0  # of weights, in all


@dataclass(frozen=True, slots=True)
class CacheAddress:
    """Where workers read the cache by themselves."""

    url: str = field(default="", repr=False)  # "": they cannot; may hold a password
    needs_password: bool = False  # workers have to add one of their own to the URL


class HostCache(Protocol):
    """Adapters by digest. Nothing here raises because the cache fails: that is a miss, or not cached."""

    worker_address: CacheAddress
    budget_bytes: int
    # Called when the cache became available, after all that it holds was read: some may be lost, some may be unwanted.
    on_available: Callable[[], None] | None

    @property
    def is_available(self) -> bool:
        """Whether the cache responds."""

    @property
    def error(self) -> str:
        """Why the cache is not available, for people; empty when it is."""

    @property
    def digests(self) -> Sequence[str]:
        """The whole adapters held."""

    @property
    def used_bytes(self) -> int:
        """Bytes held and being written."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes that pins keep from eviction, of each holder of a pin."""

    @property
    def num_evicted(self) -> int:
        """Adapters that left to make room, in all."""

    def contains(self, digest: str) -> bool:
        """Whether the cache is thought to hold the whole adapter."""

    async def read_manifest(self, digest: str) -> bytes | None:
        """The manifest, unverified, or None."""

    async def read_part(self, digest: str, index: int, part: int) -> bytes | None:
        """One part of a chunk (see contract.cache_keys.PART_BYTES), unverified, or None."""

    async def write(self, digest: str, manifest: bytes, sizes: Sequence[int], parts: AsyncIterator[bytes]) -> bool:
        """Take the adapter in, evicting others; all or nothing. False: it is not cached.

        `sizes`: of the chunks, bytes. `parts`: all parts of all chunks in order; what it raises comes through.
        """

    async def drop(self, digest: str) -> None:
        """Forget the adapter."""

    def touch(self, digest: str) -> None:
        """It was used just now."""

    def pin(self, digest: str, size_bytes: int, holder: str = "") -> None:
        """Never evict it, once it is here. Raises PinBudgetExceeded.

        Each holder pays for its pins, also of a digest that others hold: so nobody learns what others have pinned.
        """

    def unpin(self, digest: str, holder: str = "") -> None:
        """It may be evicted again, unless there is another holder."""

    async def close(self) -> None:
        """Let go of connections and threads."""

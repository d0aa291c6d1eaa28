"""What a host cache is: whole packed adapters under a byte budget, possibly gone at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class HostCacheStats:
    """What the cache holds and how it fares."""

    num_adapters: int
    used_bytes: int
    budget_bytes: int
    is_available: bool
    num_hits: int  # adapters opened from the cache
    num_misses: int  # adapters opened from the store
    num_corrupt: int  # cached chunks or manifests whose hash was wrong


class HostCache(Protocol):
    """Adapters by digest. Nothing here raises because the cache fails: that is a miss, or not cached."""

    worker_url: str  # where workers read by themselves; "": they cannot
    budget_bytes: int
    on_emptied: Callable[[], None] | None  # called when the cache turns out to have lost what it held

    @property
    def is_available(self) -> bool:
        """Whether the cache answers."""

    @property
    def num_adapters(self) -> int:
        """Whole adapters held."""

    @property
    def used_bytes(self) -> int:
        """Bytes held and being written."""

    def contains(self, digest: str) -> bool:
        """Whether the cache is thought to hold the whole adapter."""

    async def read_manifest(self, digest: str) -> bytes | None:
        """The manifest, unverified, or None."""

    async def read_chunk(self, digest: str, index: int) -> bytes | None:
        """One chunk, unverified, or None."""

    async def write(self, digest: str, manifest: bytes, sizes: Sequence[int], chunks: AsyncIterator[bytes]) -> bool:
        """Take the adapter in, evicting others; all or nothing. False: it is not cached.

        What `chunks` raises comes through.
        """

    async def drop(self, digest: str) -> None:
        """Forget the adapter."""

    def touch(self, digest: str) -> None:
        """It was used just now."""

    def pin(self, digest: str, size_bytes: int) -> None:
        """Never evict it, once it is here. Raises PinBudgetExceeded."""

    def unpin(self, digest: str) -> None:
        """It may be evicted again."""

    async def close(self) -> None:
        """Let go of connections and threads."""

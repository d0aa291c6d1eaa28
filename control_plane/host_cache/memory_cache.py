"""A host cache in this process, for machines without redis-py. Workers elsewhere read through FetchAdapter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from contract.cache_keys import num_parts
from control_plane.host_cache.base import CacheAddress
from control_plane.host_cache.ledger import Ledger


class MemoryHostCache:
    """See base.HostCache."""

    def __init__(self, *, budget_bytes: int) -> None:
        self.worker_address = CacheAddress()
        self.budget_bytes = budget_bytes
        self.on_available: Callable[[], None] | None = None  # never called: it is always there, and loses nothing
        self._ledger = Ledger(budget_bytes)
        self._content: dict[str, tuple[bytes, list[list[bytes]]]] = {}  # digest -> manifest, parts of each chunk

    @property
    def is_available(self) -> bool:
        """See base.HostCache."""
        return True

    @property
    def error(self) -> str:
        """See base.HostCache."""
        return ""

    @property
    def digests(self) -> Sequence[str]:
        """See base.HostCache."""
        return self._ledger.digests

    @property
    def used_bytes(self) -> int:
        """See base.HostCache."""
        return self._ledger.used_bytes

    @property
    def pinned_bytes(self) -> int:
        """See base.HostCache."""
        return self._ledger.pinned_bytes

    @property
    def num_evicted(self) -> int:
        """See base.HostCache."""
        return self._ledger.num_evicted

    def contains(self, digest: str) -> bool:
        """See base.HostCache."""
        return digest in self._ledger

    async def read_manifest(self, digest: str) -> bytes | None:
        """See base.HostCache."""
        self._ledger.touch(digest)
        return self._content[digest][0] if digest in self._content else None

    async def read_part(self, digest: str, index: int, part: int) -> bytes | None:
        """See base.HostCache."""
        chunks = self._content[digest][1] if digest in self._content else []
        return chunks[index][part] if index < len(chunks) and part < len(chunks[index]) else None

    async def write(self, digest: str, manifest: bytes, sizes: Sequence[int], parts: AsyncIterator[bytes]) -> bool:
        """See base.HostCache."""
        if not self._ledger.reserve(digest, (len(manifest), *sizes)):
            return False
        self._forget_leaving()
        try:
            chunks = [[await anext(parts) for _ in range(num_parts(size))] for size in sizes]
        except BaseException:
            self._ledger.release(digest)
            self._forget_leaving()
            raise
        self._content[digest] = (manifest, chunks)
        self._ledger.commit(digest)
        return True

    async def drop(self, digest: str) -> None:
        """See base.HostCache."""
        self._ledger.remove(digest)
        self._forget_leaving()

    def touch(self, digest: str) -> None:
        """See base.HostCache."""
        self._ledger.touch(digest)

    def pin(self, digest: str, size_bytes: int, holder: str = "") -> None:
        """See base.HostCache."""
        self._ledger.pin(digest, size_bytes, holder)

    def unpin(self, digest: str, holder: str = "") -> None:
        """See base.HostCache."""
        self._ledger.unpin(digest, holder)

    async def close(self) -> None:
        """See base.HostCache."""

    def _forget_leaving(self) -> None:
        for digest, _ in self._ledger.leaving:
            self._content.pop(digest, None)
            self._ledger.left(digest)

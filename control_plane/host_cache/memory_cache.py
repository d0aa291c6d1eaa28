"""A host cache in this process, for machines without redis-py. Workers elsewhere read through FetchAdapter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from control_plane.host_cache.ledger import Ledger


class MemoryHostCache:
    """See base.HostCache."""

    def __init__(self, *, budget_bytes: int) -> None:
        self.worker_url = ""
        self.budget_bytes = budget_bytes
        self.on_emptied: Callable[[], None] | None = None  # never called: it loses nothing
        self._ledger = Ledger(budget_bytes)
        self._content: dict[str, tuple[bytes, list[bytes]]] = {}  # digest -> manifest, chunks

    @property
    def is_available(self) -> bool:
        """See base.HostCache."""
        return True

    @property
    def num_adapters(self) -> int:
        """See base.HostCache."""
        return len(self._ledger)

    @property
    def used_bytes(self) -> int:
        """See base.HostCache."""
        return self._ledger.used_bytes

    def contains(self, digest: str) -> bool:
        """See base.HostCache."""
        return digest in self._ledger

    async def read_manifest(self, digest: str) -> bytes | None:
        """See base.HostCache."""
        self._ledger.touch(digest)
        return self._content[digest][0] if digest in self._content else None

    async def read_chunk(self, digest: str, index: int) -> bytes | None:
        """See base.HostCache."""
        chunks = self._content[digest][1] if digest in self._content else []
        return chunks[index] if index < len(chunks) else None

    async def write(self, digest: str, manifest: bytes, sizes: Sequence[int], chunks: AsyncIterator[bytes]) -> bool:
        """See base.HostCache."""
        evicted = self._ledger.reserve(digest, (len(manifest), *sizes))
        if evicted is None:
            return False
        for victim, _ in evicted:
            del self._content[victim]
        try:
            content = (manifest, [chunk async for chunk in chunks])
        except BaseException:
            self._ledger.release(digest)
            raise
        self._content[digest] = content
        self._ledger.commit(digest)
        return True

    async def drop(self, digest: str) -> None:
        """See base.HostCache."""
        self._ledger.remove(digest)
        self._content.pop(digest, None)

    def touch(self, digest: str) -> None:
        """See base.HostCache."""
        self._ledger.touch(digest)

    def pin(self, digest: str, size_bytes: int) -> None:
        """See base.HostCache."""
        self._ledger.pin(digest, size_bytes)

    def unpin(self, digest: str) -> None:
        """See base.HostCache."""
        self._ledger.unpin(digest)

    async def close(self) -> None:
        """See base.HostCache."""

"""Who is in the cache, how large, how recently used, and what must go to make room. No I/O."""

from __future__ import annotations

from collections import OrderedDict

from control_plane.errors import PinBudgetExceeded


class Ledger:
    """LRU by bytes over digests that nobody pinned."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        # Invariants: no digest is in both; their sizes together are at most the budget.
        self._held: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # least recently used first; sizes: see reserve
        self._reserved: dict[str, tuple[int, ...]] = {}
        self._pins: dict[str, int] = {}  # digest -> bytes; a pinned digest need not be held

    @property
    def used_bytes(self) -> int:
        """Bytes held and reserved."""
        return sum(map(sum, self._held.values())) + sum(map(sum, self._reserved.values()))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def sizes(self, digest: str) -> tuple[int, ...] | None:
        """Sizes of a held adapter (manifest, then chunks; bytes), or None."""
        return self._held.get(digest)

    def touch(self, digest: str) -> None:
        """Used just now."""
        if digest in self._held:
            self._held.move_to_end(digest)

    def reserve(self, digest: str, sizes: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]] | None:
        """Make room for an adapter of `sizes` (manifest, then chunks; bytes): what was evicted for it, least recently
        used first, with its sizes. None, and nothing evicted, if it does not fit or is being written already."""
        if digest in self._reserved:
            return None
        need = sum(sizes) + self.used_bytes - sum(self._held.get(digest, ())) - self.budget_bytes
        victims: list[str] = []
        for candidate, held in self._held.items():
            if need <= 0:
                break
            if candidate not in self._pins and candidate != digest:
                victims.append(candidate)
                need -= sum(held)
        if need > 0:
            return None
        self._held.pop(digest, None)
        self._reserved[digest] = sizes
        return [(victim, self._held.pop(victim)) for victim in victims]

    def commit(self, digest: str) -> None:
        """The reserved adapter is whole."""
        self._held[digest] = self._reserved.pop(digest)

    def release(self, digest: str) -> None:
        """The reserved adapter did not come to be."""
        self._reserved.pop(digest, None)

    def remove(self, digest: str) -> tuple[int, ...] | None:
        """Forget a held adapter; its sizes, or None if it is not held. A pin stays."""
        return self._held.pop(digest, None)

    def replace_all(self, found: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
        """Hold exactly `found`, less what exceeds the budget, which is returned. Reservations end."""
        self._held = OrderedDict(found)
        self._reserved.clear()
        surplus = []
        for digest in sorted(found, key=lambda digest: digest in self._pins):
            if self.used_bytes <= self.budget_bytes:
                break
            surplus.append((digest, self._held.pop(digest)))
        return surplus

    def pin(self, digest: str, size_bytes: int) -> None:
        """Keep it from eviction. Raises PinBudgetExceeded if all pins together would not fit."""
        others = sum(size for other, size in self._pins.items() if other != digest)
        if others + size_bytes > self.budget_bytes:
            raise PinBudgetExceeded(
                f"pinning {size_bytes} bytes beside {others} pinned ones exceeds the host cache of {self.budget_bytes} "
                "bytes; unpin another adapter or raise --host-cache-bytes",
                retry_after_s=60.0,
            )
        self._pins[digest] = size_bytes

    def unpin(self, digest: str) -> None:
        """Let it be evicted again; not pinned is fine."""
        self._pins.pop(digest, None)

"""Which adapters are in the cache, their sizes, how recently they were used, and which to evict. No I/O."""

from __future__ import annotations

from collections import OrderedDict

from control_plane.errors import PinBudgetExceeded

Sizes = tuple[int, ...]  # of one adapter: manifest, then chunks; bytes


class Ledger:
    """LRU by bytes over digests that are not pinned."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        # Invariants: no digest is in two of these three; used_bytes is the sum of their sizes.
        self._held: OrderedDict[str, Sizes] = OrderedDict()  # least recently used first
        self._reserved: dict[str, Sizes] = {}  # being written
        self._leaving: dict[str, Sizes] = {}  # given up; their bytes are there until `left`
        self._used_bytes = 0
        self._pins: dict[str, dict[str, int]] = {}  # digest -> holder -> bytes; a pinned digest need not be held
        self.num_evicted = 0  # adapters that left to make room, in all
        self._pinned_bytes = 0  # the sum over _pins, of each holder's bytes

    @property
    def used_bytes(self) -> int:
        """Bytes held, reserved, and not removed yet."""
        return self._used_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned adapters, held or not, of each holder of a pin."""
        return self._pinned_bytes

    @property
    def digests(self) -> list[str]:
        """The adapters held, least recently used first."""
        return list(self._held)

    @property
    def leaving(self) -> list[tuple[str, Sizes]]:
        """Adapters whose bytes are still to be removed."""
        return list(self._leaving.items())

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def sizes(self, digest: str) -> Sizes | None:
        """Sizes of a held adapter, or None."""
        return self._held.get(digest)

    def touch(self, digest: str) -> None:
        """Used just now."""
        if digest in self._held:
            self._held.move_to_end(digest)

    def reserve(self, digest: str, sizes: Sizes) -> bool:
        """Make room for an adapter: what has to go for it, and what there is of it, is `leaving` then.

        False, and nothing changes, if it does not fit, is being written, or is leaving.
        """
        if digest in self._reserved or digest in self._leaving:
            return False
        free_bytes = self.budget_bytes - self._used_bytes + sum(self._held.get(digest, ()))
        victims: list[str] = []
        for candidate, held in self._held.items():
            if free_bytes >= sum(sizes):
                break
            if candidate not in self._pins and candidate != digest:
                victims.append(candidate)
                free_bytes += sum(held)
        if free_bytes < sum(sizes):
            return False
        for victim in victims:
            self.remove(victim)
        self.num_evicted += len(victims)
        self._used_bytes += sum(sizes) - sum(self._held.pop(digest, ()))
        self._reserved[digest] = sizes
        return True

    def commit(self, digest: str) -> None:
        """The reserved adapter is whole."""
        self._held[digest] = self._reserved.pop(digest)

    def release(self, digest: str) -> None:
        """The reserved adapter did not come to be: what was written of it is `leaving`."""
        if digest in self._reserved:
            self._leaving[digest] = self._reserved.pop(digest)

    def remove(self, digest: str) -> None:
        """Give up a held adapter: it is `leaving` then. One that is not held is fine; a pin stays."""
        if digest in self._held:
            self._leaving[digest] = self._held.pop(digest)

    def left(self, digest: str) -> None:
        """The bytes of an adapter that was leaving are gone."""
        self._used_bytes -= sum(self._leaving.pop(digest, ()))

    def replace_all(self, found: dict[str, Sizes]) -> None:
        """Hold exactly `found`; what exceeds the budget is `leaving`. Reservations end."""
        self._held = OrderedDict(found)
        self._reserved.clear()
        self._leaving.clear()
        self._used_bytes = held_bytes = sum(map(sum, found.values()))
        for digest in sorted(found, key=lambda digest: digest in self._pins):
            if held_bytes <= self.budget_bytes:
                break
            held_bytes -= sum(found[digest])
            self.remove(digest)

    def pin(self, digest: str, size_bytes: int, holder: str = "") -> None:
        """Keep it from eviction for this holder. Raises PinBudgetExceeded if the pins of all holders would not fit.

        A digest counts once for each holder. The error does not say what the others have pinned.
        """
        holders = self._pins.get(digest, {})
        others_bytes = self._pinned_bytes - holders.get(holder, 0)
        if others_bytes + size_bytes > self.budget_bytes:
            raise PinBudgetExceeded(
                f"pinning {size_bytes} more bytes exceeds what is left for pins in the host cache of "
                f"{self.budget_bytes} bytes; unpin another adapter or raise --host-cache-bytes",
                retry_after_s=60.0,
            )
        self._pins[digest] = holders | {holder: size_bytes}
        self._pinned_bytes = others_bytes + size_bytes

    def unpin(self, digest: str, holder: str = "") -> None:
        """Take a holder's pin back, which lets the digest be evicted after its last one; not pinned is fine."""
        holders = self._pins.get(digest, {})
        self._pinned_bytes -= holders.pop(holder, 0)
        if not holders:
            self._pins.pop(digest, None)

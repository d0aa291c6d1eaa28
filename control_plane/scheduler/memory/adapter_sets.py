"""Sets of adapters that requests in the queues combine: all of a set must lie in ready slots at the same time.

If two sets each hold a part of the arena, neither may ever be whole. So one set at a time is being assembled: its
adapters are kept once they are loaded, and may take the place of adapters that only other sets wait for. It stays that
set until all its adapters are ready or no request waits for it, so it gets whole in the end: it fits the arena alone,
and everything else in the arena is used by requests that run or may start, or can be evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from control_plane.scheduler.types import AdapterRef, digests_of


@dataclass(slots=True, eq=False)
class AdapterSet:
    """A set that requests in the queues combine."""

    refs: tuple[AdapterRef, ...]
    num_waiting: Counter[str] = field(default_factory=Counter)  # requests by account; no zeros


class AdapterSets:
    """The sets in demand, and which of them is being assembled."""

    def __init__(self) -> None:
        self._sets: dict[str, AdapterSet] = {}  # by name, in the order in which they came
        # Invariant: an adapter is here with the names of its sets, and none is empty.
        self._names_by_digest: dict[str, dict[str, None]] = {}
        self._assembled: str | None = None  # the set that is being assembled

    def __bool__(self) -> bool:
        return bool(self._sets)

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def add(self, name: str, refs: tuple[AdapterRef, ...], account: str) -> None:
        """A request of the account waits with this set."""
        wanted = self._sets.get(name)
        if wanted is None:
            wanted = self._sets[name] = AdapterSet(refs)
            for ref in refs:
                self._names_by_digest.setdefault(ref.digest, {})[name] = None
        wanted.num_waiting[account] += 1

    def remove(self, name: str, account: str) -> None:
        """A request of the account with this set does not wait any more."""
        wanted = self._sets[name]
        wanted.num_waiting[account] -= 1
        if not wanted.num_waiting[account]:
            del wanted.num_waiting[account]
        if wanted.num_waiting:
            return
        del self._sets[name]
        for ref in wanted.refs:
            names = self._names_by_digest[ref.digest]
            del names[name]
            if not names:
                del self._names_by_digest[ref.digest]

    def num_waiting(self, digest: str) -> int:
        """Requests that wait with a set that has this adapter."""
        return sum(self._sets[name].num_waiting.total() for name in self._names_by_digest.get(digest, ()))

    def choose_only(self, name: str | None) -> None:
        """Assemble this set if it waits, and no other."""
        self._assembled = name if name in self._sets else None

    def choose(
        self, is_ready: Callable[[str], bool], is_draining: Callable[[str], bool], counter: Callable[[str], float]
    ) -> None:
        """Choose the set that is being assembled from here on.

        The present one stays; else it is one of the account with the least counter, there the first that came. A set
        of which a slot is drained for a starving adapter has to wait: else sets that keep coming would starve it.
        """
        if self._assembled not in self._sets or is_ready(self._assembled):
            lacking = [name for name in self._sets if not is_ready(name) and not is_draining(name)]
            counters = {name: min(map(counter, self._sets[name].num_waiting)) for name in lacking}
            self._assembled = min(lacking, key=counters.__getitem__, default=None)

    def crowded_out(self, pinned: Collection[AdapterRef], arena_bytes: int, num_slots: int) -> str | None:
        """The name of the set that is being assembled if pinned adapters leave no room for it, else None."""
        if self._assembled is None:
            return None
        together = {ref.digest: ref.arena_bytes for ref in (*pinned, *self._sets[self._assembled].refs)}
        has_room = sum(together.values()) <= arena_bytes and len(together) <= num_slots
        return None if has_room else self._assembled

    def holds(self, digest: str, is_ready: Callable[[str], bool]) -> bool:
        """Whether an adapter that no request needs alone is kept for a set: the one being assembled, or a ready one."""
        return any(name == self._assembled or is_ready(name) for name in self._names_by_digest.get(digest, ()))

    def is_assembling(self, digest: str) -> bool:
        """Whether the adapter is one of the set that is being assembled."""
        return self._assembled is not None and self._assembled in self._names_by_digest.get(digest, ())

    @property
    def assembled_digests(self) -> list[str]:
        """The adapters of the set that is being assembled."""
        return [] if self._assembled is None else digests_of(self._assembled)

    def check_invariants(self, waiting: dict[str, dict[str, int]]) -> None:
        """Raise AssertionError if the sets are not those of `waiting`, by name and account."""
        assert {name: wanted.num_waiting for name, wanted in self._sets.items()} == waiting, "sets are miscounted"
        pairs = {(digest, name) for name in self._sets for digest in digests_of(name)}
        indexed = {(digest, name) for digest, names in self._names_by_digest.items() for name in names}
        assert pairs == indexed and all(self._names_by_digest.values()), "the index of sets by adapter is wrong"

"""Sets of adapters that requests in the queues combine: all of a set must lie in ready slots at the same time.

If two sets each hold a part of the arena, neither may ever be whole. So one set at a time is being assembled: its
adapters are kept once they are loaded, and may take the place of adapters that only other sets wait for. It stays that
set until all its adapters are ready or no request waits for it, so it gets whole in the end: it fits the arena beside
the pinned adapters, and everything else in the arena is used by requests that run or may start, or can be evicted. A
set that pinned adapters leave no room for is given up.

Slots are closed for an adapter that a request needs alone, or for one of the set that is being assembled. An adapter
of another set could not take them. While slots are closed, the next set is one that has this adapter: so sets and
single adapters take turns in the order of load_queue.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from control_plane.scheduler.memory.adapter_slot import no_room_beside_pinned
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
        self._assembled: str | None = None  # the set that is being assembled; a request waits for it

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
        if name == self._assembled:
            self._assembled = None
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

    def end_assembly(self, is_ready: Callable[[str], bool]) -> str | None:
        """The set that was being assembled and is whole; another may follow. None, and no change, without one."""
        name = self._assembled
        if name is None or not is_ready(name):
            return None
        self._assembled = None
        return name

    def choose(self, is_ready: Callable[[str], bool], counter: Callable[[str], float], starving: str | None) -> None:
        """Choose the set that is being assembled from here on, if none is.

        It is one of the account with the least counter, there the first that came. `starving`: an adapter that slots
        are closed for. Then it must be a set that has this adapter: else sets that keep coming would take those slots.
        """
        if self._assembled is None:
            names = self._sets if starving is None else self._names_by_digest.get(starving, ())
            lacking = [name for name in names if not is_ready(name)]
            counters = {name: min(map(counter, self._sets[name].num_waiting)) for name in lacking}
            self._assembled = min(lacking, key=counters.__getitem__, default=None)

    def crowded_out(self, pinned: Collection[AdapterRef], arena_bytes: int, num_slots: int) -> dict[str, str]:
        """The sets that pinned adapters in slots leave no room for, by name, and why."""
        found: dict[str, str] = {}
        if not pinned:
            return found
        sizes = {ref.digest: ref.arena_bytes for ref in pinned}
        for name, wanted in self._sets.items():
            together = sizes | {ref.digest: ref.arena_bytes for ref in wanted.refs}
            num_bytes = sum(together.values())
            if num_bytes > arena_bytes or len(together) > num_slots:
                found[name] = no_room_beside_pinned(len(wanted.refs), together.values(), arena_bytes, num_slots)
        return found

    def holds(self, digest: str, is_ready: Callable[[str], bool]) -> bool:
        """Whether an adapter that no request needs alone is kept for a set: the one being assembled, or a ready one."""
        return any(name == self._assembled or is_ready(name) for name in self._names_by_digest.get(digest, ()))

    def is_assembling(self, digest: str) -> bool:
        """Whether the adapter is one of the set that is being assembled."""
        return self._assembled in self._names_by_digest.get(digest, ())

    @property
    def is_one_assembled(self) -> bool:
        """Whether a set is being assembled."""
        return self._assembled is not None

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

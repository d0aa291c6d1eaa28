"""The worker's KV blocks in host memory, where swapped-out sequences keep theirs.

A block that several members of a group share is here once, with a count of the sequences that name it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from control_plane.scheduler.memory.free_ids import FreeIds


class HostBlockPool:
    """Host blocks with reference counts."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Invariant: a block is free or held (ref_counts > 0), never both.
        # Host block -> sequences and steps in flight that name it; of blocks that were ever held.
        self.ref_counts = array("i")
        self._free = FreeIds(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """A block for one holder; there must be one."""
        block = self._free.take()
        if block == len(self.ref_counts):
            self.ref_counts.append(0)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more sequence names a held block."""
        assert self.ref_counts[block] > 0, f"host block {block} is shared but no sequence holds it"
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One sequence less names these blocks."""
        for block in blocks:
            assert self.ref_counts[block] > 0, f"host block {block} is released but no sequence holds it"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free.give_back(block)

    def check_invariants(self, holders: dict[int, int]) -> None:
        """Raise AssertionError unless the counts are those of `holders` by block, and all others are free."""
        assert {b: n for b, n in enumerate(self.ref_counts) if n} == holders, "host blocks miscount their holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a host block is free twice"
        assert free == set(range(self.num_blocks)) - set(holders), "a host block is lost, or free and held at once"

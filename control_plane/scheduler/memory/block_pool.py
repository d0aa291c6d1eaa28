"""The worker's KV blocks: which are free, how many tables hold each, which unheld ones the prefix cache keeps.

The pool does not know tokens or hashes. The prefix cache marks blocks as cached; an unheld cached block stays until the
pool needs it, oldest first, and `on_evict` notifies the cache. Memory is taken for blocks that were ever held, not for
all blocks that the worker reports.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from control_plane.scheduler.memory.evictable_blocks import EvictableBlocks
from control_plane.scheduler.memory.free_ids import FreeIds

MANY_BLOCKS = 64  # of one table: from here on numpy counts faster than a loop


class BlockPool:
    """Blocks with reference counts."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Invariant: a block is free, evictable or held (ref_counts > 0), exactly one of the three.
        self.ref_counts = array("i")  # block_id -> tables that hold it; of blocks that were ever held
        self.free = FreeIds(num_blocks)  # no holder, not cached
        self.evictable = EvictableBlocks(num_blocks)  # no holder, cached; oldest first
        self.is_cached = bytearray()  # block_id -> 1 if the prefix cache knows it; of blocks that were ever held
        self._account_by_block: dict[int, str] = {}  # of cached blocks: the account that filled them
        self.on_evict: Callable[[int], None] = _has_no_cache

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        return len(self.free) + len(self.evictable)

    @property
    def num_held(self) -> int:
        """Blocks in some table."""
        return self.num_blocks - self.num_available

    def take_one(self) -> int | None:
        """A block for one holder, or None if all are held. Unheld cached blocks go last (evictable_blocks.py)."""
        if self.free:
            block_id = self.free.take()
            if block_id == len(self.ref_counts):
                self.ref_counts.append(0)
                self.is_cached.append(0)
        elif self.evictable:
            block_id = self.evictable.evict()
            self.is_cached[block_id] = 0
            del self._account_by_block[block_id]
            self.on_evict(block_id)
        else:
            return None
        self.ref_counts[block_id] = 1
        return block_id

    def take(self, num_blocks: int) -> list[int]:
        """Blocks for one holder. The caller made sure that enough are available."""
        blocks: list[int] = []
        for _ in range(num_blocks):
            block_id = self.take_one()
            assert block_id is not None, f"{num_blocks} blocks taken where only {len(blocks)} were available"
            blocks.append(block_id)
        return blocks

    def share(self, block_id: int) -> None:
        """One more table holds a block that is held or cached."""
        if block_id not in range(len(self.ref_counts)) or self.ref_counts[block_id] == 0:
            self._revive(block_id)
        self.ref_counts[block_id] += 1

    def share_all(self, block_ids: list[int]) -> None:
        """One more table holds these blocks, each of which is named once and held or cached."""
        if len(block_ids) < MANY_BLOCKS:
            for block_id in block_ids:
                self.share(block_id)
            return
        ids, counts = np.array(block_ids), self._counts()
        for block_id in ids[counts[ids] == 0].tolist():
            self._revive(block_id)
        counts[ids] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One table less holds these blocks, named once each; given in table order, the tail is evicted first later."""
        table = list(block_ids)
        if len(table) < MANY_BLOCKS:
            for block_id in reversed(table):
                assert self.ref_counts[block_id] > 0, f"block {block_id} is released but no table holds it"
                self.ref_counts[block_id] -= 1
                if self.ref_counts[block_id] == 0:
                    self._abandon(block_id)
            return
        ids, counts = np.array(table[::-1]), self._counts()
        assert counts[ids].min() > 0, f"block {ids[counts[ids].argmin()]} is released but no table holds it"
        counts[ids] -= 1
        for block_id in ids[counts[ids] == 0].tolist():
            self._abandon(block_id)

    def _revive(self, block_id: int) -> None:
        """A table will hold a block that no table holds."""
        assert block_id in self.evictable, f"block {block_id} is shared but neither held nor in the prefix cache"
        self.evictable.remove(block_id)

    def _abandon(self, block_id: int) -> None:
        """No table holds the block any more."""
        if self.is_cached[block_id]:
            self.evictable.add(block_id, self._account_by_block[block_id])
        else:
            self.free.give_back(block_id)

    def _counts(self) -> npt.NDArray[np.int32]:
        """The reference counts as numpy sees them. To be dropped before a block is taken: a view keeps their size."""
        return np.frombuffer(self.ref_counts, dtype=np.int32)

    def mark_cached(self, block_id: int, account: str) -> None:
        """The prefix cache knows this held block from now on, which the account filled."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} enters the prefix cache but no table holds it"
        self.is_cached[block_id] = 1
        self._account_by_block[block_id] = account

    def unmark_cached(self, block_id: int) -> None:
        """The prefix cache forgot this block."""
        self.is_cached[block_id] = 0
        del self._account_by_block[block_id]
        if self.ref_counts[block_id] == 0:
            self.evictable.remove(block_id)
            self.free.give_back(block_id)


def _has_no_cache(block_id: int) -> None:
    raise AssertionError(f"block {block_id} was marked as cached but no cache listens")

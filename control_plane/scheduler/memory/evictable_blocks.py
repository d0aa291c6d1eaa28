"""Cached blocks that no table holds, by the account that filled them, and which of them is evicted next.

The oldest block is evicted, unless its account has less than an equal share of these blocks. Then the oldest block of
an account with more is evicted. So an account that fills the cache with new prompts evicts its own blocks, not blocks
that other accounts use again. A block that was unused for long is evicted in any case, so that accounts that are gone
keep nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

# A block is out of use after this many evictions for each block of the worker. If all prompts are new, an H200 that
# computes 40 000 tokens a second evicts as many as its 32 768 blocks in 13 s.
NUM_TURNS = 16


class EvictableBlocks:
    """Blocks in the order in which they became evictable."""

    def __init__(self, num_blocks: int) -> None:
        self._most_evictions = NUM_TURNS * num_blocks  # of others, while a block is not used
        self._num_evicted = 0
        self._blocks: OrderedDict[int, tuple[int, str]] = OrderedDict()  # block -> (evictions until then, account)
        self._by_account: dict[str, OrderedDict[int, None]] = {}  # the same blocks; none is empty
        self._large = ""  # an account that had more than its part when it was looked for

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def add(self, block_id: int, account: str) -> None:
        """No table holds this cached block any more, which the account filled."""
        self._blocks[block_id] = (self._num_evicted, account)
        blocks = self._by_account.get(account)
        if blocks is None:
            blocks = self._by_account[account] = OrderedDict()
        blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        """The block is held again, or no longer cached. It must be here."""
        _, account = self._blocks.pop(block_id)
        blocks = self._by_account[account]
        del blocks[block_id]
        if not blocks:
            del self._by_account[account]

    def evict(self) -> int:
        """Remove and return the block that is evicted next; there must be a block."""
        block_id, (num_evicted_before, account) = next(iter(self._blocks.items()))
        is_out_of_use = self._num_evicted - num_evicted_before >= self._most_evictions
        if not is_out_of_use and not self._has_its_part(account):
            block_id = next(iter(self._by_account[self._large_account()]))
        self.remove(block_id)
        self._num_evicted += 1
        return block_id

    def _has_its_part(self, account: str) -> bool:
        return len(self._by_account.get(account, ())) * len(self._by_account) >= len(self._blocks)

    def _large_account(self) -> str:
        """An account with at least its part; some account always has."""
        if not self._has_its_part(self._large):
            self._large = max(self._by_account, key=lambda account: len(self._by_account[account]))
        return self._large

    def check_invariants(self) -> None:
        """Raise AssertionError if the index by account is wrong."""
        by_account: dict[str, list[int]] = {}
        for block_id, (_, account) in self._blocks.items():
            by_account.setdefault(account, []).append(block_id)
        indexed = {account: list(blocks) for account, blocks in self._by_account.items()}
        assert by_account == indexed, "evictable blocks are miscounted by account"

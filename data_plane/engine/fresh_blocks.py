"""Makes the values of KV blocks finite before a row fills them, whatever the previous row left there."""

from __future__ import annotations

import numpy as np

from data_plane.engine.host_blocks import HostBlocks
from data_plane.engine.kv_cache import KVCache
from data_plane.engine.rows import Rows
from data_plane.plan import Int32Array, StepPlan


class FreshBlocks:
    """The blocks of one engine's rows."""

    def __init__(self, rows: Rows, cache: KVCache, host_blocks: HostBlocks | None) -> None:
        self._rows = rows
        self._cache = cache
        self._host_blocks = host_blocks

    def leave(self, rows: Int32Array) -> None:
        """These rows end. The blocks that they filled are remembered where their KV may not be finite."""
        for row in rows[self._rows.is_used[rows] & self._rows.maybe_non_finite[rows]].tolist():
            self._cache.mark_dirty(self._rows.own_blocks_of(row))

    def clean(self, plan: StepPlan) -> None:
        """Make blocks finite before rows fill them: appended blocks, and new rows' blocks after computed tokens."""
        size = self._rows.block_size
        fresh = [plan.appended_blocks[:, 1]]
        fresh += [new.block_ids[-(-new.num_computed_tokens // size) :] for new in plan.new_rows]
        dirty = self._cache.dirty_of(np.concatenate(fresh))
        if len(dirty) == 0:
            return
        if self._host_blocks is not None:
            self._host_blocks.before_writing(dirty.astype(np.int64))
        self._cache.make_finite(dirty)

"""Whether KV blocks can be taken: at once, later or never. Pure."""

from __future__ import annotations

import enum


class BlockFit(enum.Enum):
    """Whether a number of blocks can be taken."""

    OK = "ok"  # they can be taken at once
    LATER = "later"  # once other requests gave blocks back
    NEVER = "never"  # not even on an empty worker


def fit_blocks(num_needed: int, *, num_available: int, num_blocks: int, num_spare: int = 0) -> BlockFit:
    """Whether `num_needed` blocks of a pool of `num_blocks` can be taken, `num_available` of which are not held.

    `num_spare` blocks must stay available for running requests. They are not a reason for NEVER: if no request runs,
    none must stay available.
    """
    if num_needed > num_blocks:
        return BlockFit.NEVER
    return BlockFit.OK if num_available - num_needed >= num_spare else BlockFit.LATER

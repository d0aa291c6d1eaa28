"""Whether KV blocks can be had: the three verdicts on an allocation. Pure."""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What becomes of a demand for blocks."""

    OK = "ok"  # they can be taken at once
    LATER = "later"  # once others gave blocks back
    NEVER = "never"  # not even on an empty worker


def judge_blocks(num_needed: int, *, num_available: int, num_blocks: int, num_spare: int = 0) -> Verdict:
    """The verdict on `num_needed` blocks of a pool of `num_blocks`, `num_available` of them not held.

    `num_spare` are to stay available for those who run. They are no reason for NEVER: with nobody running none are.
    """
    if num_needed > num_blocks:
        return Verdict.NEVER
    return Verdict.OK if num_available - num_needed >= num_spare else Verdict.LATER

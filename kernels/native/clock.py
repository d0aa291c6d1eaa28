"""The clock that native code reads too: what Python and native code measure can be compared. No torch."""

from __future__ import annotations

import time


def clock_ns() -> int:
    """CLOCK_MONOTONIC, nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

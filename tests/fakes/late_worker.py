"""A worker whose masks of constrained rows are late by seeded draws. Otherwise `python -m data_plane`."""

from __future__ import annotations

import functools

from data_plane import worker
from data_plane.engine import build
from tests.data_plane.constraints.lanes import DrawnLanes

if __name__ == "__main__":
    lanes = DrawnLanes(3, 0.1, is_slow=False)
    build.build_engine = functools.partial(build.build_engine, lanes=lanes)
    raise SystemExit(worker.main())

"""Bounds of plans: the control plane plans no more, a worker refuses more."""

from __future__ import annotations

MAX_ROW_ADAPTERS = 4  # that one row combines

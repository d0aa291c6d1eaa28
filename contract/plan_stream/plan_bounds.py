"""Bounds of plans: the control plane plans no more."""

from __future__ import annotations

MAX_ROW_ADAPTERS = 4  # that one row combines; a worker refuses more
# Steps that one plan may stand for. A request that arrives waits for the steps already sent, so the fleet allows no
# more steps than hide the round trip. A worker that drafts makes its graphs for passes of as many tokens of each row.
MAX_PLAN_STEPS = 4

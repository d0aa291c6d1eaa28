"""Two tenants on one public adapter: neither learns from the prefix cache what the other one requested.

The same tokens, under the same weights, on every path that a request can take.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import BeamSearch, Request, RequestId
from tests.control_plane.scheduler.factories import make_adapter, make_request
from tests.control_plane.scheduler.step.test_forks import GroupBench
from tests.fakes.model_worker import oracle

PROMPT = list(range(1, 14))  # three full blocks of 4, and one token
PUBLIC = make_adapter("public")
SWAPPING = SchedulerSettings(swap_us_per_block=0.0, watermark=0.0)  # moving a block costs nothing
PATHS: dict[str, dict[str, Any]] = {
    "base model": {"adapter": None},
    "adapter": {},
    "with a salt": {"cache_salt": b"salt"},
    "several completions": {"num_samples": 3},
    "beams": {"beam": BeamSearch(3)},
    "resumed": {"generated_token_ids": tuple(oracle(make_request(1, PROMPT, 8, adapter=PUBLIC), 64)[:5])},
}


def request_of(tenant: str, request_id: int, **changes: Any) -> Request:
    settings = {"adapter": PUBLIC, "tenant": tenant} | changes
    return make_request(request_id, PROMPT, 8, **settings)


def cached_tokens(bench: GroupBench, request_id: int) -> int:
    """Prompt tokens that came from the cache, as the client sees them."""
    return max(output.num_cached_tokens for output in bench.outputs if output.request_id == request_id)


@pytest.mark.parametrize("changes", PATHS.values(), ids=PATHS)
def test_two_tenants_on_one_public_adapter_share_no_cached_token(changes: dict[str, Any]) -> None:
    bench = GroupBench()
    cached = []
    for request_id, tenant in enumerate(["acme", "acme", "labs", "acme", "labs"], start=1):
        bench.add(request_of(tenant, request_id, **changes))
        bench.run()
        cached.append(cached_tokens(bench, request_id))
    assert cached[0] == 0 and cached[1] > 0, "a tenant's own request is found"
    assert cached[2] == 0, "another tenant's request is not"
    assert cached[3] > 0 and cached[4] > 0


def shared_blocks(bench: GroupBench, tenants: dict[int, str]) -> bool:
    """Whether rows of two tenants hold a block together."""
    held = list(zip(bench.probe.running_ids(), bench.probe.block_tables(), strict=True))
    return any(
        tenants[one] != tenants[other] and not set(table).isdisjoint(other_table)
        for (one, table), (other, other_table) in combinations(held, 2)
    )


NUM_REQUESTS = 2 * len(PATHS)


def run_together(first: str, second: str, **limits: Any) -> tuple[GroupBench, bool]:
    """Each path for each of two tenants, all at once, preempted in turns. Whether the two held a block together."""
    bench = GroupBench(max_rows=12, num_slots=2, **limits)
    sides = {number: "first" if number <= len(PATHS) else "second" for number in range(1, NUM_REQUESTS + 1)}
    for number, changes in zip(sides, [*PATHS.values()] * 2, strict=True):
        bench.add(request_of(first if sides[number] == "first" else second, number, **changes))
    has_shared = False
    for turn in range(500):
        if not bench.scheduler.request_ids and not bench.sent:
            return bench, has_shared
        bench.step()
        has_shared |= shared_blocks(bench, sides)
        running = sorted(set(bench.probe.running_ids()))
        if turn % 3 == 2 and turn < 60 and len(running) > 1:
            bench.probe.preempt(RequestId(running[turn % len(running)]))
    raise AssertionError("the requests did not end")


@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["preempted", "swapped"])
@pytest.mark.parametrize("num_blocks", [40, 100])
def test_rows_of_two_tenants_hold_no_block_together(num_host_blocks: int, num_blocks: int) -> None:
    """Also after they were preempted, and swapped to host memory and back."""
    limits = {"settings": SWAPPING, "num_blocks": num_blocks, "num_host_blocks": num_host_blocks}
    bench, has_shared = run_together("acme", "labs", **limits)
    assert not has_shared
    stats = bench.scheduler.stats()
    assert stats.num_preemptions > 0 and bool(stats.num_swapped_out) == bool(num_host_blocks)
    assert run_together("acme", "acme", **limits)[1], "one tenant's requests hold blocks together"

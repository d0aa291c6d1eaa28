"""The scheduler against a worker that turns every mistake into a wrong token, over random walks from seeds."""

from __future__ import annotations

import pytest

from control_plane.scheduler.types import FinishReason
from tests.control_plane.scheduler.walk import Walk

SEEDS_PER_TEST = 25
PLANS_PER_SEED = 510  # 8 tests x 25 seeds x 510 plans: 102 000 scheduler steps


@pytest.mark.parametrize("first_seed", range(0, 8 * SEEDS_PER_TEST, SEEDS_PER_TEST))
def test_every_request_gets_its_own_tokens_and_the_books_balance(first_seed: int) -> None:
    ended: dict[FinishReason, int] = {}
    num_preemptions = num_hits = num_repeated = num_groups = num_copies = num_fed = 0
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        walk = Walk(seed)
        walk.run(PLANS_PER_SEED)
        assert walk.num_plans >= PLANS_PER_SEED
        for reason, count in walk.ledger.ended_by.items():
            ended[reason] = ended.get(reason, 0) + count
        num_repeated += walk.num_repeated
        num_groups += walk.num_groups
        num_copies += walk.num_copies
        num_fed += walk.num_fed
        num_preemptions += walk.scheduler.stats().num_preemptions
        num_hits += walk.scheduler.stats().prefix_hit_tokens
    # The walks went where they should: all of this happened, or they prove little.
    assert ended[FinishReason.LENGTH] > 500 and ended[FinishReason.STOP_TOKEN] > 50
    assert ended[FinishReason.DEADLINE] > 10
    assert num_preemptions > 50 and num_hits > 500 and num_repeated > 100
    assert num_groups > 500 and num_copies > 200 and num_fed > 150


def test_the_same_seed_gives_the_same_plans() -> None:
    traces = []
    for _ in range(2):
        walk = Walk(seed=11)
        walk.run(300)
        traces.append(walk.trace.hexdigest())
    assert traces[0] == traces[1]

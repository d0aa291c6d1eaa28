"""The scheduler against a worker that turns every mistake into a wrong token, over random walks from seeds.

Out of CI, millions of steps from other seeds, all state checked at each third move:

    MOTET_WALK_STEPS=2000000 MOTET_WALK_SEED=1000000 make test TESTS=tests/control_plane/scheduler/test_random_walk.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from control_plane.scheduler.settings import Policy
from control_plane.scheduler.types import FinishReason
from tests.control_plane.scheduler.walk import Walk

ROOT = Path(__file__).resolve().parents[3]
STEPS_OF_CI = 200_000
STEPS = int(os.environ.get("MOTET_WALK_STEPS", STEPS_OF_CI))
FIRST_SEED = int(os.environ.get("MOTET_WALK_SEED", "0"))
IS_LONG = STEPS > STEPS_OF_CI
STEPS_PER_SEED = 500
CHECK_EVERY = 3 if IS_LONG else 40  # moves between two checks of all state
# Every policy is walked; the default one most, for it has most to decide.
SHARES = {Policy.CHUNKED_PREFILL: 0.6, Policy.PREFILL_FIRST: 0.25, Policy.FCFS: 0.15}
# What must have come about in 10 000 steps of CI's seeds, or the walks prove little. Other seeds may see a quarter.
LEAST: dict[str, float] = {
    "ended by length": 400,
    "ended by stop token": 50,
    "ended by deadline": 5,
    "ended by pooled": 100,
    "preempted": 100,
    "tokens from the prefix cache": 300,
    "plans of several steps": 100,
    "requests with several completions": 200,
    "blocks copied": 10,
    "tokens fed to beams": 30,
    "withdrawn": 100,
    "sat out": 100,
}
# Of policies that swap and where requests pass others.
LEAST_OF_OTHERS: dict[str, float] = {
    "swapped out": 20,
    "several completions swapped in": 2,
    "ended before a move": 1,
    "set aside": 300,
    "vectors begun again": 1,
    "given way": 10,
}


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("policy", Policy)
def test_every_request_gets_its_own_tokens_and_the_state_is_consistent(policy: Policy, part: int) -> None:
    num_steps = round(STEPS * SHARES[policy] / 4)
    seen: Counter[str] = Counter()
    for seed in count(FIRST_SEED + 10_000 * part):
        walk = Walk(seed, policy, check_every=CHECK_EVERY)
        walk.run(min(STEPS_PER_SEED, num_steps - seen["steps"]))
        for reason in (FinishReason.LENGTH, FinishReason.STOP_TOKEN, FinishReason.DEADLINE, FinishReason.POOLED):
            seen[f"ended by {reason.value.replace('_', ' ')}"] += walk.ledger.ended_by.get(reason, 0)
        stats = walk.scheduler.stats()
        seen["preempted"] += stats.num_preemptions
        seen["swapped out"] += stats.num_swapped_out
        seen["tokens from the prefix cache"] += stats.prefix_hit_tokens
        seen["plans of several steps"] += walk.num_repeated
        seen["requests with several completions"] += walk.num_groups
        seen["several completions swapped in"] += walk.num_groups_swapped_in
        seen["withdrawn"] += walk.num_withdrawn
        seen["vectors begun again"] += walk.num_preempted_pooling
        seen["set aside"] += walk.num_set_aside
        seen["given way"] += walk.num_preempted_for_room
        seen["ended before a move"] += walk.num_ended_before_move
        seen["blocks copied"] += walk.num_copies
        seen["tokens fed to beams"] += walk.num_fed
        seen["sat out"] += walk.worker.num_waits
        seen["steps"] += walk.num_steps
        if seen["steps"] >= num_steps:
            break
    least = LEAST if policy is Policy.FCFS else LEAST | LEAST_OF_OTHERS
    share = num_steps / 10_000 / (4 if IS_LONG or FIRST_SEED else 1)
    short = {what: seen[what] for what, number in least.items() if seen[what] < number * share}
    assert not short, f"walks of {seen['steps']} steps did not go where they should: {short}"


def test_the_same_seed_gives_the_same_plans_whatever_strings_hash_to() -> None:
    """In processes of their own, whose sets and dicts of strings differ in order wherever that can be seen."""
    program = "from tests.control_plane.scheduler.walk import trace; print(trace(11, 300))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    traces = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=environment | {"PYTHONHASHSEED": str(hash_seed)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (1, 2, 3)
    ]
    assert len(traces[0].strip()) == 64
    assert traces == traces[:1] * 3

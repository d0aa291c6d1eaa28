"""Short rounds of faults under load: every stream is right token by token, nothing hangs, and all comes to rest.

Thousands of rounds, drawn by seed, run outside CI: `make faults ROUNDS=1000`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.faults.kinds import FAULTS
from tests.hostile.faults.rig import Rig
from tests.hostile.faults.rounds import run_round

FAULT_BY_NAME = {fault.name: fault for fault in FAULTS}
HASH_ROUNDS = [
    ("worker killed", "redis corrupted"),
    ("all workers killed",),
    ("worker stopped", "many cancels"),
    ("redis killed", "adapter turned"),
    ("redis emptied", "slow readers", "worker terminated"),
]
REAL_ROUNDS = [("worker stopped", "adapter turned"), ("redis killed",)]
LEAST_RIGHT = 20  # streams of a round; the load is light where the machine is busy


@pytest.fixture
def hash_rig(tmp_path: Path) -> Iterator[Rig]:
    """With a Redis that can be emptied and corrupted."""
    with Rig(tmp_path, has_own_redis=True) as rig:
        yield rig


@pytest.fixture
def real_rig(tmp_path: Path) -> Iterator[Rig]:
    """With a model whose completions transformers and PEFT know."""
    with Rig(tmp_path, is_real=True) as rig:
        yield rig


@pytest.mark.timeout(300)
def test_streams_are_right_through_faults(hash_rig: Rig) -> None:
    check_rounds(hash_rig, HASH_ROUNDS)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_streams_of_a_real_model_are_right_through_faults(real_rig: Rig) -> None:
    check_rounds(real_rig, REAL_ROUNDS)


def check_rounds(rig: Rig, rounds: list[tuple[str, ...]]) -> None:
    """All on one rig, for its start takes longer than a round."""
    for number, names in enumerate(rounds):
        result = run_round(rig, number, f"test/{number}", [FAULT_BY_NAME[name] for name in names], timeout_s=60.0)
        found = [*result.wrong, *result.avoidable, *result.hung, *result.problems]
        assert not found, "\n".join([result.kind, *found])
        assert result.num_right >= LEAST_RIGHT

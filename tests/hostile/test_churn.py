"""Adapters of mixed kinds over arenas for four, changed at random beside faults; `make churn` runs it for an hour."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapter_kinds import PEFT_WARNINGS, kinds_of
from tests.hostile.churn.ledger import Ledger
from tests.hostile.churn.world import NUM_STABLE, World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # PEFT makes thirty adapters first
    pytest.mark.filterwarnings(*PEFT_WARNINGS),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A mixture of experts, which has all kinds, each once and plain LoRA more often."""
    num_adapters = NUM_STABLE + len(kinds_of("mixtral"))
    work_dir = tmp_path_factory.mktemp("churn")
    with World(work_dir, seed=1, num_adapters=num_adapters, num_versions=1, arch="mixtral") as world:
        yield world


def test_every_stream_is_its_own_adapters_while_adapters_come_go_move_and_workers_die(world: World) -> None:
    world.run(20.0)
    world.check_rest()
    assert world.ledger.problems == []
    for what in ("combinations", "tasks", "vectors", "classes"):
        assert world.ledger.counts[what] > 0, f"no {what}"
    assert world.ledger.counts["streams"] > 50


def test_the_weights_of_another_adapter_are_noticed(world: World) -> None:
    """The wrong adapter after slot reuse: two adapters of one kind, as the clients see them, exchanged."""
    (one,), (other,) = world.versions["churn-0"], world.versions["churn-1"]
    world.ledger.problems.clear()
    one.known, other.known = other.known, one.known
    try:
        world.check_rest()
    finally:
        one.known, other.known = other.known, one.known
    assert [problem.split(" at rest")[0] for problem in world.ledger.problems] == ["churn-0", "churn-1"]
    world.ledger.problems.clear()


def test_the_ledger_blames_versions_that_are_not_active_and_names_that_are_missed() -> None:
    ledger = Ledger(["a"])
    with ledger.change("a") as entry:
        entry.digests |= {"old", "new"}
        entry.active = "new"
    view = ledger.look("a")
    ledger.check_version(view, "new")
    assert ledger.problems == []
    ledger.check_version(view, "old")
    ledger.check_version(view, "unknown")
    ledger.check_missing(view)
    ledger.check_tokens("a", [1, 2], (1, 3))
    assert len(ledger.problems) == 4
    with ledger.change("a"):
        ledger.check_version(view, "old")  # the change may have happened already
    ledger.check_version(view, "old")
    assert len(ledger.problems) == 4

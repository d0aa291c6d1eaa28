"""Requests whose completions must be equal, or stand to each other in a known way, do so on a real model.

Longer runs, drawn by other seeds: `python -m tests.hostile.metamorphic --minutes 10 --seed 7`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.metamorphic.judge import Judge
from tests.hostile.metamorphic.relations import RELATIONS, Comparison, same
from tests.hostile.metamorphic.run import Counts, run_relation
from tests.hostile.metamorphic.world import World

LEAST_COMPARISONS = 350


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world"), seed=0) as world:
        yield world


@pytest.fixture(scope="module")
def judge(world: World) -> Judge:
    return Judge(world.model_dir, world.adapter_dirs)


@pytest.mark.timeout(300)
def test_every_relation_holds(world: World, judge: Judge) -> None:
    counts = Counts()
    for name, relation in RELATIONS.items():
        run_relation(world, judge, name, relation, counts)
    assert not counts.wrong, "\n".join(counts.wrong)
    assert counts.equal.keys() == RELATIONS.keys(), "a relation compared nothing"
    assert counts.num_compared >= LEAST_COMPARISONS and counts.close.total() <= 2


def test_a_relation_that_does_not_hold_is_seen(world: World, judge: Judge) -> None:
    """Two adapters do not generate alike, and no rounding explains that."""

    def two_adapters(world: World) -> Iterator[Comparison]:
        requests = [world.greedy(adapter="one"), world.sampled(adapter="one", top_p=0.9, top_k=50)]
        others = world.get_all([request.but(adapter="two") for request in requests])
        yield from same(requests, world.get_all(requests), others)

    counts = Counts()
    run_relation(world, judge, "two adapters", two_adapters, counts)
    assert len(counts.wrong) == 2 and counts.close.total() == 0


def test_tokens_that_rounding_may_exchange_are_a_close_call(world: World, judge: Judge) -> None:
    """The judge takes the likeliest two tokens for alike only where their scores are."""
    request = world.greedy(num_prompt=9, adapter="")
    token = world.get(request).token_ids[0]
    logits = judge.scores(request.prompt, [], request.options)[0]
    second = int(logits.topk(2).indices[1])
    assert not judge.is_close_call(request.prompt, [], (token, second), request.options)
    assert Judge(world.model_dir, world.adapter_dirs, close=1e9).is_close_call(
        request.prompt, [], (token, second), request.options
    )

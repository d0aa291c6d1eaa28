"""What is shared between requests, and what never is."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.scheduler.memory.prefix_cache import chain_next, chain_root
from control_plane.scheduler.types import AdapterRef, RequestId
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request
from tests.fakes.model_worker import oracle

PROMPT = list(range(1, 14))  # three full blocks of 4, and one token


def cached_tokens(bench: Bench) -> int:
    """Cached tokens that the last admitted request began with."""
    return [new for plan in bench.plans for new in plan.new_rows][-1].num_computed_tokens


def test_a_prefix_is_computed_once_and_the_completion_is_the_same() -> None:
    bench = Bench()
    bench.add(make_request(1, PROMPT))
    bench.run()
    bench.add(make_request(2, PROMPT))
    bench.run()
    assert cached_tokens(bench) == 12
    assert bench.ends[2].num_cached_tokens == 12
    assert bench.tokens[1] == bench.tokens[2] == oracle(make_request(1, PROMPT), 64)
    stats = bench.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (26, 12)


def test_at_least_one_token_is_always_computed() -> None:
    bench = Bench()
    for request_id in (1, 2):
        bench.add(make_request(request_id, PROMPT[:12]))
        bench.run()
    assert cached_tokens(bench) == 8


def test_a_prompt_that_finds_no_room_is_hashed_only_as_far_as_the_cache_has_it() -> None:
    bench = Bench(max_model_len=200, num_blocks=18)
    bench.add(make_request(1, PROMPT, max_tokens=20))
    bench.step()
    bench.add(make_request(2, [*PROMPT[:8], *range(60)], max_tokens=1))
    bench.step()
    assert bench.running_ids() == [1]
    assert bench.probe.num_hashed_blocks(RequestId(2)) == 3, "two that are in, and the first that is not"


def test_blocks_are_shared_while_their_first_owner_runs() -> None:
    bench = Bench()
    bench.add(make_request(1, PROMPT, max_tokens=10))
    bench.step()
    bench.add(make_request(2, PROMPT, max_tokens=10))
    bench.step()
    first, second = bench.probe.block_tables()
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    bench.run()
    assert bench.tokens[1] == bench.tokens[2]


def test_blocks_enter_the_cache_only_once_their_result_came() -> None:
    bench = Bench(plan_depth=2)
    bench.add(make_request(1, PROMPT))
    bench.plan()
    bench.add(make_request(2, PROMPT))
    bench.plan()
    assert cached_tokens(bench) == 0
    bench.run()
    assert bench.tokens[1] == bench.tokens[2]


def test_generated_tokens_are_cached_too() -> None:
    bench = Bench()
    first = make_request(1, PROMPT, max_tokens=8)
    bench.add(first)
    bench.run()
    bench.add(make_request(2, PROMPT + bench.tokens[1], max_tokens=2))
    bench.run()
    assert cached_tokens(bench) == 20, "the last of 21 tokens was never computed; 20 fill five blocks"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"adapter": make_adapter("one")}),
        ({"adapter": make_adapter("one")}, {}),
        ({"adapter": make_adapter("one")}, {"adapter": make_adapter("two")}),
        ({"cache_salt": b"a"}, {"cache_salt": b"b"}),
        ({}, {"cache_salt": b"b"}),
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"tenant": "a", "cache_salt": b"s"}, {"tenant": "b", "cache_salt": b"s"}),
    ],
)
def test_nothing_is_shared_between_adapters_tenants_or_salts(first: dict[str, Any], second: dict[str, Any]) -> None:
    bench = Bench()
    for request_id, kind in enumerate((first, second), start=1):
        bench.add(make_request(request_id, PROMPT, **kind))
        bench.run()
    assert cached_tokens(bench) == 0


def test_no_parts_of_the_root_run_into_each_other() -> None:
    def root(digest: str | None, tenant: str, cache_salt: bytes) -> bytes:
        adapter = None if digest is None else AdapterRef(digest, 1)
        return chain_root(make_request(1, adapter=adapter, tenant=tenant, cache_salt=cache_salt))

    assert root("ab", "t", b"c") != root("a", "bt", b"c") != root("a", "b", b"tc")
    assert root(None, "t", b"") != root("", "t", b"") != root("base", "t", b"")


def test_a_key_depends_on_every_token_before_it() -> None:
    root = chain_root(make_request(1))
    assert chain_next(chain_next(root, [1, 2]), [3, 4]) != chain_next(chain_next(root, [1, 9]), [3, 4])


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    bench = Bench(num_blocks=4)
    bench.add(make_request(1, PROMPT, max_tokens=1))
    bench.run()
    bench.add(make_request(2, prompt=5, max_tokens=1))  # two blocks: the free one, and one of the three cached
    bench.run()
    bench.add(make_request(3, PROMPT, max_tokens=1))
    bench.run()
    assert cached_tokens(bench) == 8


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    bench = Bench(num_blocks=8)
    for request_id, prompt in enumerate([[1] * 9, [2] * 9, [1] * 9], start=1):
        bench.add(make_request(request_id, prompt, max_tokens=1))
        bench.run()
    bench.add(make_request(4, [3] * 20, max_tokens=1))
    bench.run()
    bench.add(make_request(5, [1] * 9, max_tokens=1))
    bench.run()
    assert cached_tokens(bench) == 8


def test_a_preempted_request_resumes_from_its_own_cached_blocks() -> None:
    bench = Bench(num_blocks=16)
    bench.add(make_request(1, PROMPT, max_tokens=8))
    bench.step()
    bench.scheduler.pause(RequestId(1))
    bench.add(*[make_request(i, prompt=1, max_tokens=9) for i in range(2, 6)])
    bench.step()
    bench.step()
    assert 1 not in bench.running_ids(), "four rows: the paused one gave way"
    bench.scheduler.resume(RequestId(1))
    bench.run()
    assert cached_tokens(bench) >= 12
    assert bench.tokens[1] == oracle(make_request(1, PROMPT, max_tokens=8), 64)

"""Relations between requests whose answers must be equal, or stand to each other as said; no answer is known before.

Each relation draws its requests from the world's seed and yields comparisons. A relation is a function; its docstring
is what must hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from motet import BeamSearch, FinishReason, Generation

from tests.hostile.metamorphic.world import ADAPTERS, NUM_TOKENS, VOCAB_SIZE, Ask, World
from tests.makers import EOS_TOKEN_ID, make_prompt

TOLERANCE = 1e-4  # of log-probabilities: sums in another order differ by about 1e-5


@dataclass(frozen=True)
class Comparison:
    """What is due and what came; equal, unless `is_equal` says otherwise."""

    due: Sequence[int] | str | bool
    got: Sequence[int] | str | bool
    ask: Ask | None = None  # the request whose tokens these are, for the judge; None: equal or wrong
    what: str = ""


Relation = Callable[[World], Iterator[Comparison]]
RELATIONS: dict[str, Relation] = {}


def relation(function: Relation) -> Relation:
    RELATIONS[function.__name__.strip("_")] = function
    return function


def same(asks: Sequence[Ask], due: Sequence[Generation], got: Sequence[Generation]) -> Iterator[Comparison]:
    """Tokens, and the text where the tokens agree."""
    for ask, left, right in zip(asks, due, got, strict=True):
        yield Comparison(left.token_ids, right.token_ids, ask)
        if left.token_ids == right.token_ids:
            yield Comparison(left.text, right.text, what="text")


# ---- what else is in the batch ----


@relation
def alone_and_in_a_batch(world: World) -> Iterator[Comparison]:
    asks = [world.any() for _ in range(12)]
    yield from same(asks, world.get_cold(asks), world.get_all([ask.but(cache_salt=world.salt()) for ask in asks]))


@relation
def in_another_order(world: World) -> Iterator[Comparison]:
    asks = [world.any() for _ in range(12)]
    first = world.get_all(asks)
    again = world.get_all([ask.but(cache_salt=world.salt()) for ask in reversed(asks)])
    yield from same(asks, first, again[::-1])


@relation
def beside_cancelled_neighbours(world: World) -> Iterator[Comparison]:
    asks, neighbours = [world.any() for _ in range(6)], [world.any().but(max_tokens=60) for _ in range(12)]
    due = world.get_cold(asks)

    def cancel(neighbour: Ask) -> None:
        with world.client.generate(neighbour.prompt, timeout_s=60.0, **neighbour.options) as stream:
            next(stream)

    with ThreadPoolExecutor(12) as pool:
        cancelled = [pool.submit(cancel, neighbour) for neighbour in neighbours]
        got = world.get_all([ask.but(cache_salt=world.salt()) for ask in asks])
        for future in cancelled:
            future.result()
    yield from same(asks, due, got)


@relation
def beside_more_than_the_cache_holds(world: World) -> Iterator[Comparison]:
    """Requests that are preempted and swapped answer as alone."""
    asks = [world.any().but(max_tokens=70) for _ in range(28)]
    due = world.get_cold(asks)
    before = world.num_preemptions()
    yield from same(asks, due, world.get_all([ask.but(cache_salt=world.salt()) for ask in asks], num_at_once=28))
    yield Comparison(True, world.num_preemptions() > before, what="some were preempted")


@relation
def as_another_tenant_of_another_priority(world: World) -> Iterator[Comparison]:
    asks = [world.any() for _ in range(4)]
    others = [ask.but(tenant=f"tenant-{index}", priority=index * 30 - 50) for index, ask in enumerate(asks)]
    yield from same(asks, world.get_cold(asks), world.get_all(others))


@relation
def moved_to_another_worker(world: World) -> Iterator[Comparison]:
    """A worker that stands still for longer than it may loses its requests to the other one, mid-stream."""
    asks = [world.any().but(max_tokens=60) for _ in range(8)]
    due = world.get_cold(asks)
    with world.stopped_worker("w1", 2.6):
        got = world.get_all([ask.but(cache_salt=world.salt()) for ask in asks])
    yield from same(asks, due, got)


# ---- the prefix cache ----


@relation
def cold_and_from_the_prefix_cache(world: World) -> Iterator[Comparison]:
    asks = [world.any().but() for _ in range(4)]
    asks = [Ask([*make_prompt(world.draw.randrange(1 << 30), 30), *ask.prompt], ask.options) for ask in asks]
    cold = [world.get(ask) for ask in asks]
    warm = [world.get(ask) for ask in asks]
    yield from same(asks, cold, warm)
    for left, right in zip(cold, warm, strict=True):
        yield Comparison(True, left.started.cached_tokens == 0, what="the first is cold")
        yield Comparison(True, right.started.cached_tokens > 0, what="the second is warm")


@relation
def a_prompt_in_two_parts(world: World) -> Iterator[Comparison]:
    """The second part is computed behind the first one, which another request left in the cache."""
    for _ in range(4):
        ask = world.any()
        head, tail = make_prompt(world.draw.randrange(1 << 30), 24), ask.prompt
        (due,) = world.get_cold([Ask([*head, *tail], ask.options)])
        world.get(Ask(head, ask.but(max_tokens=1).options))
        yield from same([Ask([*head, *tail], ask.options)], [due], [world.get(Ask([*head, *tail], ask.options))])


@relation
def nothing_cached_crosses_adapters_tenants_or_salts(world: World) -> Iterator[Comparison]:
    ask = world.greedy(num_prompt=45, adapter="one")
    world.get(ask)
    others = [ask.but(adapter=name) for name in ADAPTERS if name != "one"]
    others += [ask.but(tenant="another"), ask.but(cache_salt=world.salt())]
    for other in others:
        (due,) = world.get_cold([other])
        got = world.get(other)
        yield Comparison(True, got.started.cached_tokens == 0, what="not shared")
        yield from same([other], [due], [got])


# ---- adapters ----


@relation
def an_adapter_by_two_names(world: World) -> Iterator[Comparison]:
    yield from _renamed(world, "one", "one-again")


@relation
def an_adapter_of_zeros_and_the_base(world: World) -> Iterator[Comparison]:
    yield from _renamed(world, "", "zero")


@relation
def an_adapter_padded_to_a_higher_rank(world: World) -> Iterator[Comparison]:
    yield from _renamed(world, "one", "padded")


@relation
def an_adapter_of_half_the_weights_and_twice_the_scaling(world: World) -> Iterator[Comparison]:
    yield from _renamed(world, "one", "halved")


@relation
def an_adapter_with_its_ranks_in_another_order(world: World) -> Iterator[Comparison]:
    yield from _renamed(world, "one", "permuted")


def _renamed(world: World, left: str, right: str) -> Iterator[Comparison]:
    asks = [world.any().but(adapter=left) for _ in range(6)]
    got = world.get_all([ask.but(adapter=right, cache_salt=world.salt()) for ask in asks])
    yield from same(asks, world.get_all(asks), got)


@relation
def an_update_changes_new_streams_and_no_running_one(world: World) -> Iterator[Comparison]:
    old = world.add("turning", world.adapter_dirs["one"])
    ask = world.any().but(adapter="turning", max_tokens=60)
    (due_old,) = world.get_cold([ask])
    with world.client.generate(ask.prompt, timeout_s=60.0, **ask.but(cache_salt=world.salt()).options) as stream:
        next(stream)
        new = world.add("turning", world.adapter_dirs["two"])
        got_old = stream.result()
    yield Comparison(True, old != new and got_old.started.adapter_digest == old, what="the version of its beginning")
    yield from same([ask.but(adapter="one")], [due_old], [got_old])
    named = [ask.but(adapter="two"), ask.but(adapter="one")]
    due = world.get_cold(named)
    pinned = ask.but(adapter_digest=old, cache_salt=world.salt())
    yield from same(named, due, [world.get(ask.but(cache_salt=world.salt())), world.get(pinned)])


# ---- how tokens are chosen ----


@relation
def the_same_seed_again(world: World) -> Iterator[Comparison]:
    asks = [world.sampled() for _ in range(6)]
    yield from same(asks, world.get_all(asks), world.get_all([ask.but(cache_salt=world.salt()) for ask in asks]))


@relation
def the_seed_that_the_server_drew(world: World) -> Iterator[Comparison]:
    for _ in range(4):
        ask = world.sampled(seed=None)
        drawn = world.get(ask)
        seeded = ask.but(seed=drawn.started.seed)
        yield from same([seeded], [drawn], world.get_cold([seeded]))


@relation
def each_of_four_answers_and_its_seed_alone(world: World) -> Iterator[Comparison]:
    for _ in range(2):
        ask = world.sampled()
        whole = world.get(ask.but(n=4))
        for answer in whole.completions:
            alone = ask.but(seed=answer.finished.seed)
            (got,) = world.get_cold([alone])
            yield Comparison(answer.token_ids, got.token_ids, alone)
            yield Comparison(answer.text, got.text, what="text")


@relation
def greedy_in_three_ways(world: World) -> Iterator[Comparison]:
    for _ in range(3):
        ask = world.greedy()
        due = world.get(ask)
        for options in ({"temperature": 1.0, "top_k": 1, "seed": 5}, {"temperature": 0.7, "top_p": 1e-6, "seed": 6}):
            yield from same([ask], [due], world.get_cold([ask.but(**options)]))
        yield from same([ask], [due], world.get_cold([ask.but(temperature=0.7, min_p=1.0, seed=7)]))


@relation
def settings_that_change_nothing(world: World) -> Iterator[Comparison]:
    neutral: list[dict[str, Any]] = [
        {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": -0.0},
        {"top_p": 1.0, "min_p": 0.0},
        {"logit_bias": {5: 0.0, 7: -0.0}},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"min_tokens": 0, "stop": [], "stop_token_ids": []},
        {"priority": 0, "n": 1, "best_of": 1, "request_id": "label"},
    ]
    for ask in (world.greedy(), world.sampled(top_k=None, top_p=None, min_p=None)):
        due = world.get(ask)
        for options in neutral:
            yield from same([ask], [due], world.get_cold([ask.but(**options)]))
    ask = world.sampled(top_k=None)
    yield from same([ask], [world.get(ask)], world.get_cold([ask.but(top_k=VOCAB_SIZE)]))


@relation
def what_is_in_effect_sent_back(world: World) -> Iterator[Comparison]:
    ask = world.sampled()
    due = world.get(ask)
    told = due.started
    again = ask.but(temperature=told.temperature, top_k=told.top_k, top_p=told.top_p, min_p=told.min_p, seed=told.seed)
    yield from same([ask], [due], world.get_cold([again.but(max_tokens=told.max_tokens)]))


@relation
def a_bias_of_all_tokens_alike(world: World) -> Iterator[Comparison]:
    ask = world.greedy()
    yield from same(
        [ask], [world.get(ask)], world.get_cold([ask.but(logit_bias=dict.fromkeys(range(VOCAB_SIZE), 8.0))])
    )


@relation
def a_banned_token_never_comes_and_a_wanted_one_always(world: World) -> Iterator[Comparison]:
    for ask in (world.greedy(), world.sampled()):
        due = world.get(ask)
        banned = due.token_ids[world.draw.randrange(len(due.token_ids))]
        place = due.token_ids.index(banned)
        (got,) = world.get_cold([ask.but(logit_bias={banned: -100.0})])
        yield Comparison(True, banned not in got.token_ids, what="banned")
        yield Comparison(due.token_ids[:place], got.token_ids[:place], ask, what="before its place nothing changes")
    (got,) = world.get_cold([world.greedy().but(logit_bias={77: 100.0})])
    yield Comparison((77,) * NUM_TOKENS, got.token_ids, what="wanted")


# ---- when it ends ----


@relation
def fewer_tokens_are_the_first_ones(world: World) -> Iterator[Comparison]:
    for _ in range(3):
        ask = world.any()
        due = world.get(ask)
        for count in (1, world.draw.randrange(2, NUM_TOKENS)):
            (got,) = world.get_cold([ask.but(max_tokens=count)])
            yield Comparison(due.token_ids[:count], got.token_ids, ask)


@relation
def a_stop_string_cuts_the_text(world: World) -> Iterator[Comparison]:
    for _ in range(4):
        ask = world.any().but(max_tokens=40)
        due = world.get(ask)
        if len(due.text) < 6:
            continue
        begin = world.draw.randrange(1, len(due.text) - 2)
        stop = due.text[begin : begin + world.draw.choice((1, 2))]
        (got,) = world.get_cold([ask.but(stop=[stop, "never" * 9])])
        yield Comparison(due.text[: due.text.index(stop)], got.text, what=f"stop {stop!r}")
        yield Comparison(True, got.finished.finish_reason is FinishReason.STOP_STRING, what="reason")
        yield Comparison(due.token_ids[: len(got.token_ids)], got.token_ids, ask)


@relation
def a_stop_token_cuts_the_tokens(world: World) -> Iterator[Comparison]:
    for _ in range(3):
        ask = world.any()
        due = world.get(ask)
        stop = due.token_ids[world.draw.randrange(len(due.token_ids))]
        (got,) = world.get_cold([ask.but(stop_token_ids=[stop, 3])])
        place = min(due.token_ids.index(token) for token in (stop, 3) if token in due.token_ids)
        yield Comparison(due.token_ids[: place + 1], got.token_ids, ask)


@relation
def the_end_of_sequence_cuts_the_tokens(world: World) -> Iterator[Comparison]:
    ask = world.any().but(max_tokens=40, logit_bias={EOS_TOKEN_ID: 6.0}, temperature=1.0, seed=world.draw.randrange(99))
    due = world.get(ask)
    (got,) = world.get_cold([ask.but(ignore_eos=False)])
    place = due.token_ids.index(EOS_TOKEN_ID) if EOS_TOKEN_ID in due.token_ids else len(due.token_ids)
    yield Comparison(due.token_ids[: place + 1], got.token_ids, ask)


@relation
def least_tokens_ban_what_would_end_it(world: World) -> Iterator[Comparison]:
    ask = world.greedy()
    stop = world.get(ask).token_ids[2]
    (due,) = world.get_cold([ask.but(logit_bias={stop: -100.0}, max_tokens=6)])
    (got,) = world.get_cold([ask.but(stop_token_ids=[stop], min_tokens=6, max_tokens=6)])
    yield Comparison(due.token_ids, got.token_ids, what="banned, and put off")


@relation
def continued_from_anywhere(world: World) -> Iterator[Comparison]:
    for _ in range(2):
        ask = world.any()
        due = world.get(ask)
        for offset in (1, world.draw.randrange(2, NUM_TOKENS - 1), NUM_TOKENS - 1, NUM_TOKENS):
            got = world.resumed(ask, due, offset)
            yield Comparison(due.token_ids, (*due.token_ids[:offset], *got), ask, what=f"continued at {offset}")


# ---- other ways to say or to rank the same ----


@relation
def a_text_and_its_tokens(world: World) -> Iterator[Comparison]:
    for text in ("The end of the line", "a b c  d\n\n\ttab", "1 + 1 = 2; naïve façade — \U0001f642"):
        ask = world.any()
        ids = world.tokenizer.encode(text).ids
        due = world.get(Ask(text, ask.options))
        yield from same([Ask(ids, ask.options)], [due], world.get_cold([Ask(ids, ask.options)]))


@relation
def a_conversation_and_its_text(world: World) -> Iterator[Comparison]:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why the sea?"}]
    text = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns) + "assistant: "
    ask = world.any()
    ids = world.tokenizer.encode(text).ids
    due = world.get(Ask(turns, ask.options))
    yield from same([Ask(ids, ask.options)], [due], world.get_cold([Ask(text, ask.options)]))


@relation
def log_probabilities_of_answer_and_prompt(world: World) -> Iterator[Comparison]:
    """Those of an answer's tokens are told again when prompt and answer are a prompt; their sum is told at the end."""
    ask = world.any()
    answer = world.get(ask.but(logprobs=2))
    whole = Ask([*ask.prompt, *answer.token_ids], ask.options).but(prompt_logprobs=0, max_tokens=1, temperature=0.0)
    told = [entry.logprob for entry in answer.completions[0].logprobs]
    again = [entry.logprob for entry in world.get(whole).started.prompt_logprobs][-len(told) :]
    yield Comparison(True, _is_close(told, again), what=f"{told} and {again}")
    yield Comparison(True, _is_close([sum(told)], [answer.finished.cumulative_logprob or 0.0]), what="sum")
    best = world.get(world.greedy().but(logprobs=2)).completions[0]
    yield Comparison(best.token_ids, [entry.top[0].token_id for entry in best.logprobs], what="greedy is the likeliest")


@relation
def the_best_of_four_is_one_of_the_four(world: World) -> Iterator[Comparison]:
    ask = world.sampled()
    four = world.get(ask.but(n=4, logprobs=0))
    (best,) = world.get_cold([ask.but(best_of=4)])

    def mean(answer: Any) -> float:
        return sum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)

    ranked = sorted(four.completions, key=mean, reverse=True)
    if mean(ranked[0]) - mean(ranked[1]) > TOLERANCE:
        yield Comparison(ranked[0].token_ids, best.token_ids, what="the likeliest of the four")


@relation
def beams_alone_and_in_a_batch(world: World) -> Iterator[Comparison]:
    """A search finds the same beside others, and scores its answers by what their tokens cost as a prompt.

    No relation to the greedy answer holds: a search may drop the greedy answer's beginning.
    """
    asks = [world.greedy().but(beam_search=BeamSearch(3), n=3) for _ in range(3)]
    alone = world.get_cold(asks)
    together = world.get_all([*asks, *(world.any() for _ in range(6))])[:3]
    for ask, left, right in zip(asks, alone, together, strict=True):
        scores = [answer.finished.score or 0.0 for answer in left.completions]
        if min(a - b for a, b in itertools.pairwise(scores)) > TOLERANCE:
            for due, got in zip(left.completions, right.completions, strict=True):
                yield Comparison(due.token_ids, got.token_ids, what="beams")
        yield Comparison(
            True, _is_close(scores, [answer.finished.score or 0.0 for answer in right.completions]), what="scores"
        )
        best = left.completions[0].token_ids
        whole = Ask([*ask.prompt, *best], ask.options).but(beam_search=None, n=1, max_tokens=1, prompt_logprobs=0)
        told = [entry.logprob for entry in world.get(whole).started.prompt_logprobs][-len(best) :]
        yield Comparison(True, _is_close([sum(told) / len(best)], scores[:1]), what=f"{scores[0]} of {told}")


@relation
def the_text_of_the_tokens(world: World) -> Iterator[Comparison]:
    for ask in (world.any(), world.sampled(temperature=3.0)):
        got = world.get(ask)
        yield Comparison(world.text_of(got.token_ids), got.text, what="decoded at once")


def _is_close(left: Sequence[float], right: Sequence[float]) -> bool:
    return len(left) == len(right) and all(
        abs(a - b) < TOLERANCE * max(1, len(left)) for a, b in zip(left, right, strict=True)
    )

"""Relations between requests whose completions must be equal, or relate as said; no completion is known before.

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

from tests.hostile.metamorphic.world import ADAPTERS, NUM_TOKENS, VOCAB_SIZE, Request, World
from tests.makers import EOS_TOKEN_ID, make_prompt

TOLERANCE = 1e-4  # of log-probabilities: sums in another order differ by about 1e-5


@dataclass(frozen=True)
class Comparison:
    """What is due and what came; equal, unless `is_equal` says otherwise."""

    due: Sequence[int] | str | bool
    got: Sequence[int] | str | bool
    request: Request | None = None  # the request whose tokens these are, for the judge; None: equal or wrong
    what: str = ""


Relation = Callable[[World], Iterator[Comparison]]
RELATIONS: dict[str, Relation] = {}


def relation(function: Relation) -> Relation:
    RELATIONS[function.__name__.strip("_")] = function
    return function


def same(requests: Sequence[Request], due: Sequence[Generation], got: Sequence[Generation]) -> Iterator[Comparison]:
    """Tokens, and the text where the tokens agree."""
    for request, left, right in zip(requests, due, got, strict=True):
        yield Comparison(left.token_ids, right.token_ids, request)
        if left.token_ids == right.token_ids:
            yield Comparison(left.text, right.text, what="text")


# ---- what else is in the batch ----


@relation
def alone_and_in_a_batch(world: World) -> Iterator[Comparison]:
    requests = [world.any() for _ in range(12)]
    yield from same(requests, world.get_cold(requests), world.get_all(world.salted(requests)))


@relation
def in_another_order(world: World) -> Iterator[Comparison]:
    requests = [world.any() for _ in range(12)]
    first = world.get_all(requests)
    again = world.get_all(world.salted(requests[::-1]))
    yield from same(requests, first, again[::-1])


@relation
def beside_cancelled_neighbours(world: World) -> Iterator[Comparison]:
    requests, neighbours = [world.any() for _ in range(6)], [world.any().but(max_tokens=60) for _ in range(12)]
    due = world.get_cold(requests)

    def cancel(neighbour: Request) -> None:
        with world.client.generate(neighbour.prompt, timeout_s=60.0, **neighbour.options) as stream:
            next(stream)

    with ThreadPoolExecutor(12) as pool:
        cancelled = [pool.submit(cancel, neighbour) for neighbour in neighbours]
        got = world.get_all(world.salted(requests))
        for future in cancelled:
            future.result()
    yield from same(requests, due, got)


@relation
def beside_more_than_the_cache_holds(world: World) -> Iterator[Comparison]:
    """Requests that are preempted and swapped generate as alone."""
    requests = [world.any().but(max_tokens=70) for _ in range(28)]
    due = world.get_cold(requests)
    before = world.num_preemptions()
    yield from same(requests, due, world.get_all(world.salted(requests), num_at_once=28))
    yield Comparison(True, world.num_preemptions() > before, what="some were preempted")


@relation
def as_another_tenant_of_another_priority(world: World) -> Iterator[Comparison]:
    requests = [world.any() for _ in range(4)]
    others = [request.but(tenant=f"tenant-{index}", priority=index * 30 - 50) for index, request in enumerate(requests)]
    yield from same(requests, world.get_cold(requests), world.get_all(others))


@relation
def moved_to_another_worker(world: World) -> Iterator[Comparison]:
    """A worker that stands still for longer than it may loses its requests to the other one, mid-stream."""
    requests = [world.any().but(max_tokens=60) for _ in range(8)]
    due = world.get_cold(requests)
    with world.stopped_worker("w1", 2.6):
        got = world.get_all(world.salted(requests))
    yield from same(requests, due, got)


# ---- the prefix cache ----


@relation
def cold_and_from_the_prefix_cache(world: World) -> Iterator[Comparison]:
    some = [world.any().but() for _ in range(4)]
    requests = [Request([*make_prompt(world.draw.randrange(1 << 30), 30), *one.prompt], one.options) for one in some]
    cold = [world.get(request) for request in requests]
    warm = [world.get(request) for request in requests]
    yield from same(requests, cold, warm)
    for left, right in zip(cold, warm, strict=True):
        yield Comparison(True, left.started.cached_tokens == 0, what="the first is cold")
        yield Comparison(True, right.started.cached_tokens > 0, what="the second is warm")


@relation
def a_prompt_in_two_parts(world: World) -> Iterator[Comparison]:
    """The second part is computed behind the first one, which another request left in the cache."""
    for _ in range(4):
        request = world.any()
        head, tail = make_prompt(world.draw.randrange(1 << 30), 24), request.prompt
        whole = Request([*head, *tail], request.options)
        (due,) = world.get_cold([whole])
        world.get(Request(head, request.but(max_tokens=1).options))
        yield from same([whole], [due], [world.get(whole)])


@relation
def nothing_cached_crosses_adapters_tenants_or_salts(world: World) -> Iterator[Comparison]:
    request = world.greedy(num_prompt=45, adapter="one")
    world.get(request)
    others = [request.but(adapter=name) for name in ADAPTERS if name != "one"]
    others += [request.but(tenant="another"), request.but(cache_salt=world.salt())]
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
    requests = [world.any().but(adapter=left) for _ in range(6)]
    got = world.get_all([request.but(adapter=right, cache_salt=world.salt()) for request in requests])
    yield from same(requests, world.get_all(requests), got)


@relation
def an_update_changes_new_streams_and_no_running_one(world: World) -> Iterator[Comparison]:
    old = world.add("turning", world.adapter_dirs["one"])
    request = world.any().but(adapter="turning", max_tokens=60)
    (due_old,) = world.get_cold([request])
    options = request.but(cache_salt=world.salt()).options
    with world.client.generate(request.prompt, timeout_s=60.0, **options) as stream:
        next(stream)
        new = world.add("turning", world.adapter_dirs["two"])
        got_old = stream.result()
    yield Comparison(True, old != new and got_old.started.adapter_digest == old, what="the version of its beginning")
    yield from same([request.but(adapter="one")], [due_old], [got_old])
    named = [request.but(adapter="two"), request.but(adapter="one")]
    due = world.get_cold(named)
    pinned = request.but(adapter_digest=old, cache_salt=world.salt())
    yield from same(named, due, [world.get(request.but(cache_salt=world.salt())), world.get(pinned)])


# ---- how tokens are chosen ----


@relation
def the_same_seed_again(world: World) -> Iterator[Comparison]:
    requests = [world.sampled() for _ in range(6)]
    yield from same(requests, world.get_all(requests), world.get_all(world.salted(requests)))


@relation
def the_seed_that_the_server_drew(world: World) -> Iterator[Comparison]:
    for _ in range(4):
        request = world.sampled(seed=None)
        drawn = world.get(request)
        seeded = request.but(seed=drawn.started.seed)
        yield from same([seeded], [drawn], world.get_cold([seeded]))


@relation
def each_of_four_completions_and_its_seed_alone(world: World) -> Iterator[Comparison]:
    for _ in range(2):
        request = world.sampled()
        whole = world.get(request.but(n=4))
        for completion in whole.completions:
            alone = request.but(seed=completion.finished.seed)
            (got,) = world.get_cold([alone])
            yield Comparison(completion.token_ids, got.token_ids, alone)
            yield Comparison(completion.text, got.text, what="text")


@relation
def greedy_in_three_ways(world: World) -> Iterator[Comparison]:
    for _ in range(3):
        request = world.greedy()
        due = world.get(request)
        for options in ({"temperature": 1.0, "top_k": 1, "seed": 5}, {"temperature": 0.7, "top_p": 1e-6, "seed": 6}):
            yield from same([request], [due], world.get_cold([request.but(**options)]))
        yield from same([request], [due], world.get_cold([request.but(temperature=0.7, min_p=1.0, seed=7)]))


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
    for request in (world.greedy(), world.sampled(top_k=None, top_p=None, min_p=None)):
        due = world.get(request)
        for options in neutral:
            yield from same([request], [due], world.get_cold([request.but(**options)]))
    request = world.sampled(top_k=None)
    yield from same([request], [world.get(request)], world.get_cold([request.but(top_k=VOCAB_SIZE)]))


@relation
def what_is_in_effect_sent_back(world: World) -> Iterator[Comparison]:
    request = world.sampled()
    due = world.get(request)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
    again = request.but(**{name: getattr(due.started, name) for name in names})
    yield from same([request], [due], world.get_cold([again]))


@relation
def a_bias_of_all_tokens_alike(world: World) -> Iterator[Comparison]:
    request = world.greedy()
    yield from same(
        [request], [world.get(request)], world.get_cold([request.but(logit_bias=dict.fromkeys(range(VOCAB_SIZE), 8.0))])
    )


@relation
def a_banned_token_never_comes_and_a_wanted_one_always(world: World) -> Iterator[Comparison]:
    for request in (world.greedy(), world.sampled()):
        due = world.get(request)
        banned = due.token_ids[world.draw.randrange(len(due.token_ids))]
        place = due.token_ids.index(banned)
        (got,) = world.get_cold([request.but(logit_bias={banned: -100.0})])
        yield Comparison(True, banned not in got.token_ids, what="banned")
        yield Comparison(due.token_ids[:place], got.token_ids[:place], request, what="before its place nothing changes")
    (got,) = world.get_cold([world.greedy().but(logit_bias={77: 100.0})])
    yield Comparison((77,) * NUM_TOKENS, got.token_ids, what="wanted")


# ---- when it ends ----


@relation
def fewer_tokens_are_the_first_ones(world: World) -> Iterator[Comparison]:
    for _ in range(3):
        request = world.any()
        due = world.get(request)
        for count in (1, world.draw.randrange(2, NUM_TOKENS)):
            (got,) = world.get_cold([request.but(max_tokens=count)])
            yield Comparison(due.token_ids[:count], got.token_ids, request)


@relation
def a_stop_string_cuts_the_text(world: World) -> Iterator[Comparison]:
    for _ in range(4):
        request = world.any().but(max_tokens=40)
        due = world.get(request)
        if len(due.text) < 6:
            continue
        begin = world.draw.randrange(1, len(due.text) - 2)
        stop = due.text[begin : begin + world.draw.choice((1, 2))]
        (got,) = world.get_cold([request.but(stop=[stop, "never" * 9])])
        yield Comparison(due.text[: due.text.index(stop)], got.text, what=f"stop {stop!r}")
        yield Comparison(True, got.finished.finish_reason is FinishReason.STOP_STRING, what="reason")
        yield Comparison(due.token_ids[: len(got.token_ids)], got.token_ids, request)


@relation
def a_stop_token_cuts_the_tokens(world: World) -> Iterator[Comparison]:
    for _ in range(3):
        request = world.any()
        due = world.get(request)
        stop = due.token_ids[world.draw.randrange(len(due.token_ids))]
        (got,) = world.get_cold([request.but(stop_token_ids=[stop, 3])])
        place = min(due.token_ids.index(token) for token in (stop, 3) if token in due.token_ids)
        yield Comparison(due.token_ids[: place + 1], got.token_ids, request)


@relation
def the_end_of_sequence_cuts_the_tokens(world: World) -> Iterator[Comparison]:
    request = world.any().but(
        max_tokens=40, logit_bias={EOS_TOKEN_ID: 6.0}, temperature=1.0, seed=world.draw.randrange(99)
    )
    due = world.get(request)
    (got,) = world.get_cold([request.but(ignore_eos=False)])
    place = due.token_ids.index(EOS_TOKEN_ID) if EOS_TOKEN_ID in due.token_ids else len(due.token_ids)
    yield Comparison(due.token_ids[: place + 1], got.token_ids, request)


@relation
def least_tokens_ban_what_would_end_it(world: World) -> Iterator[Comparison]:
    request = world.greedy()
    stop = world.get(request).token_ids[2]
    (due,) = world.get_cold([request.but(logit_bias={stop: -100.0}, max_tokens=6)])
    (got,) = world.get_cold([request.but(stop_token_ids=[stop], min_tokens=6, max_tokens=6)])
    yield Comparison(due.token_ids, got.token_ids, what="banned, and put off")


@relation
def continued_from_anywhere(world: World) -> Iterator[Comparison]:
    for _ in range(2):
        request = world.any()
        due = world.get(request)
        for offset in (1, world.draw.randrange(2, NUM_TOKENS - 1), NUM_TOKENS - 1, NUM_TOKENS):
            got = world.resumed(request, due, offset)
            yield Comparison(due.token_ids, (*due.token_ids[:offset], *got), request, what=f"continued at {offset}")


# ---- other ways to say or to rank the same ----


@relation
def a_text_and_its_tokens(world: World) -> Iterator[Comparison]:
    for text in ("The end of the line", "a b c  d\n\n\ttab", "1 + 1 = 2; naïve façade — \U0001f642"):
        request = world.any()
        ids = world.tokenizer.encode(text).ids
        due = world.get(Request(text, request.options))
        yield from same([Request(ids, request.options)], [due], world.get_cold([Request(ids, request.options)]))


@relation
def a_conversation_and_its_text(world: World) -> Iterator[Comparison]:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why the sea?"}]
    text = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns) + "assistant: "
    request = world.any()
    ids = world.tokenizer.encode(text).ids
    due = world.get(Request(turns, request.options))
    yield from same([Request(ids, request.options)], [due], world.get_cold([Request(text, request.options)]))


@relation
def log_probabilities_of_completion_and_prompt(world: World) -> Iterator[Comparison]:
    """Those of a completion are returned again when it ends a prompt; their sum comes at the end."""
    request = world.any()
    generated = world.get(request.but(logprobs=2))
    whole = Request([*request.prompt, *generated.token_ids], request.options)
    whole = whole.but(prompt_logprobs=0, max_tokens=1, temperature=0.0)
    returned = [entry.logprob for entry in generated.completions[0].logprobs]
    again = [entry.logprob for entry in world.get(whole).started.prompt_logprobs][-len(returned) :]
    yield Comparison(True, _is_close(returned, again), what=f"{returned} and {again}")
    yield Comparison(True, _is_close([sum(returned)], [generated.finished.cumulative_logprob or 0.0]), what="sum")
    best = world.get(world.greedy().but(logprobs=2)).completions[0]
    yield Comparison(best.token_ids, [entry.top[0].token_id for entry in best.logprobs], what="greedy is the likeliest")


@relation
def the_best_of_four_is_one_of_the_four(world: World) -> Iterator[Comparison]:
    request = world.sampled()
    four = world.get(request.but(n=4, logprobs=0))
    (best,) = world.get_cold([request.but(best_of=4)])

    def mean(completion: Any) -> float:
        return sum(entry.logprob for entry in completion.logprobs) / len(completion.logprobs)

    ranked = sorted(four.completions, key=mean, reverse=True)
    if mean(ranked[0]) - mean(ranked[1]) > TOLERANCE:
        yield Comparison(ranked[0].token_ids, best.token_ids, what="the likeliest of the four")


@relation
def beams_alone_and_in_a_batch(world: World) -> Iterator[Comparison]:
    """A search finds the same beside others, and scores its completions by what their tokens cost as a prompt.

    No relation to the greedy completion holds: a search may drop the greedy completion's beginning.
    """
    requests = [world.greedy().but(beam_search=BeamSearch(3), n=3) for _ in range(3)]
    alone = world.get_cold(requests)
    together = world.get_all([*requests, *(world.any() for _ in range(6))])[:3]
    for request, left, right in zip(requests, alone, together, strict=True):
        scores = [completion.finished.score or 0.0 for completion in left.completions]
        if min(a - b for a, b in itertools.pairwise(scores)) > TOLERANCE:
            for due, got in zip(left.completions, right.completions, strict=True):
                yield Comparison(due.token_ids, got.token_ids, what="beams")
        beside_others = [completion.finished.score or 0.0 for completion in right.completions]
        yield Comparison(True, _is_close(scores, beside_others), what="scores")
        best = left.completions[0].token_ids
        whole = Request([*request.prompt, *best], request.options).but(
            beam_search=None, n=1, max_tokens=1, prompt_logprobs=0
        )
        returned = [entry.logprob for entry in world.get(whole).started.prompt_logprobs][-len(best) :]
        yield Comparison(True, _is_close([sum(returned) / len(best)], scores[:1]), what=f"{scores[0]} of {returned}")


@relation
def the_text_of_the_tokens(world: World) -> Iterator[Comparison]:
    for request in (world.any(), world.sampled(temperature=3.0)):
        got = world.get(request)
        yield Comparison(world.text_of(got.token_ids), got.text, what="decoded at once")


def _is_close(left: Sequence[float], right: Sequence[float]) -> bool:
    return len(left) == len(right) and all(
        abs(a - b) < TOLERANCE * max(1, len(left)) for a, b in zip(left, right, strict=True)
    )

"""Constrained completions over scheduler, wire and engine in one process: disturbed as undisturbed, token for token.

Disturbed by preemption with recompute and with swap, by plans ahead of results, by plans for several steps, by a resume
or a migration from every token on, and by masks that are late. Every text is valid under its constraint.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import llguidance
import pytest
from tokenizers import Tokenizer

from control_plane.constraints.compile_process import compiled
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import Completion, Constraint, FinishReason, Request, RequestId, Sampling, Vocabulary
from data_plane import plan
from data_plane.config import WorkerConfig
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from tests.data_plane.constraints.lanes import DrawnLanes, in_time
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import Completions, Served, serve
from tests.makers import make_checkpoint, make_tokenizer

END, NUM_VOCABULARY, MAX_TOKENS = 0, 256, 70
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["cat", "dog"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PATTERN = "[a-f]{6}-[0-9]{5,9}"
FORMS: list[tuple[str, Any]] = [("json_schema", json.dumps(SCHEMA)), ("regex", PATTERN)]
ROOMY = SchedulerSettings(max_step_tokens=64)


@dataclass(frozen=True)
class Rig:
    """An engine with room for all, one with little, the requests, and what they get undisturbed."""

    roomy: TorchEngine
    small: TorchEngine  # 26 blocks of 8 tokens; one request takes up to 24
    checkpoint: Path
    tokenizer: Tokenizer
    requests: list[Request]
    undisturbed: Completions

    def check(self, completions: Completions) -> None:
        """Every completion is the undisturbed one."""
        assert completions.keys() == self.undisturbed.keys()
        for key, served in completions.items():
            assert served.token_ids == self.undisturbed[key].token_ids, key
            assert served.finish_reason is self.undisturbed[key].finish_reason


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("rig") / "model", "llama")
    text = (make_tokenizer(checkpoint) / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = Vocabulary("v", text, NUM_VOCABULARY, (END,))
    reader = llguidance.LLTokenizer(text, n_vocab=NUM_VOCABULARY, eos_token=[END])
    grammars = [compiled({"kind": kind, "value": value}, reader) for kind, value in FORMS]
    drawn = Sampling(temperature=1.0, seed=7)
    samplings = [Sampling(), drawn, replace(drawn, seed=8, repetition_penalty=0.5)]
    requests = [
        Request(
            RequestId(number),
            tuple(range(5 + number, 15 + 2 * number)),
            MAX_TOKENS,
            sampling=samplings[number % 3],
            stop_token_ids=frozenset({END}),
            num_samples=2 if number == 4 else 1,
            constraint=Constraint(f"g{number % 2}", grammars[number % 2], vocabulary),
        )
        for number in range(6)
    ]
    # Plain requests between them: what is constrained and what is not shares steps.
    requests += [replace(requests[1], request_id=RequestId(6), constraint=None, stop_token_ids=frozenset())]
    roomy = build_engine(worker_config(checkpoint), lanes=in_time())
    undisturbed: Completions = {}
    for request in requests:
        undisturbed |= serve(roomy, [request], [], ROOMY)[0]
    small = build_engine(small_config(checkpoint), lanes=in_time())
    return Rig(roomy, small, checkpoint, Tokenizer.from_str(text), requests, undisturbed)


def small_config(checkpoint: Path) -> WorkerConfig:
    return worker_config(checkpoint, num_blocks=26, host_kv_bytes=32 * 4096, max_model_len=100)


class CountingEngine:
    """An engine that counts the rows that sit out steps."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.capacities, self.slots = engine.capacities, engine.slots
        self.num_waits = 0

    def submit(self, step: plan.StepPlan) -> plan.PendingStep:
        return plan.DoneStep(self.execute(step))

    def execute(self, step: plan.StepPlan) -> plan.StepOutput:
        output = self._engine.execute(step)
        self.num_waits += len(output.waiting_rows)
        return output

    def read_vocabulary(self, vocabulary: plan.Vocabulary) -> None:
        self._engine.read_vocabulary(vocabulary)

    def reset(self) -> None:
        self._engine.reset()


def test_every_text_follows_its_constraint(rig: Rig) -> None:
    """Complete ones are valid; those that max_tokens cut, most of them whitespace, are a beginning of a valid one."""
    num_complete = 0
    for (number, _), served in rig.undisturbed.items():
        constraint = rig.requests[number].constraint
        if constraint is None:
            continue
        reader = llguidance.LLTokenizer(constraint.vocabulary.tokenizer, n_vocab=NUM_VOCABULARY, eos_token=[END])
        text = rig.tokenizer.decode([token for token in served.token_ids if token != END])
        if served.finish_reason is not FinishReason.STOP_TOKEN:
            assert llguidance.LLMatcher(reader, constraint.grammar).consume_tokens(served.token_ids)
        elif number % 2 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert re.fullmatch(PATTERN, text)
        num_complete += served.finish_reason is FinishReason.STOP_TOKEN
    assert num_complete >= 3


@pytest.mark.parametrize("chunk", [7, 64])
def test_recomputed_requests_go_on_with_their_tokens(rig: Rig, chunk: int) -> None:
    completions, stats = serve(rig.small, rig.requests, [], SchedulerSettings(max_step_tokens=chunk))
    assert stats.num_preemptions > stats.num_swapped_out == 0
    rig.check(completions)


@pytest.mark.parametrize("chunk", [7, 64])
def test_swapped_requests_go_on_with_their_tokens(rig: Rig, chunk: int) -> None:
    settings = SchedulerSettings(max_step_tokens=chunk, swap_us_per_block=0.0)
    completions, stats = serve(rig.small, rig.requests, [], settings, num_host_blocks=32)
    assert stats.num_swapped_out > 0
    rig.check(completions)


@pytest.mark.parametrize(("plan_depth", "max_steps"), [(1, 1), (4, 1), (2, 4)])
@pytest.mark.parametrize("is_small", [False, True])
def test_plans_ahead_of_results_change_no_token(rig: Rig, plan_depth: int, max_steps: int, is_small: bool) -> None:
    engine = rig.small if is_small else rig.roomy
    completions, _ = serve(engine, rig.requests, [], ROOMY, plan_depth=plan_depth, max_steps=max_steps)
    rig.check(completions)


@pytest.mark.parametrize("number", range(4))
def test_a_resume_from_every_token_goes_on_with_the_same_ones(rig: Rig, number: int) -> None:
    whole = rig.undisturbed[number, 0].token_ids
    for num_known in range(1, len(whole)):
        resumed = replace(rig.requests[number], generated_token_ids=tuple(whole[:num_known]))
        completions, _ = serve(rig.roomy, [resumed], [], ROOMY)
        assert completions[number, 0].token_ids == whole[num_known:]


def test_samples_that_migrate_go_on_with_their_tokens(rig: Rig) -> None:
    """As after the loss of a worker: each sample with what it generated so far."""
    request = rig.requests[4]
    wholes = [rig.undisturbed[4, index].token_ids for index in range(2)]
    for num_known in (1, 3, 6):
        known = tuple(Completion(tuple(whole[:num_known])) for whole in wholes)
        completions, _ = serve(rig.roomy, [replace(request, completions=known)], [], ROOMY)
        assert [completions[4, index].token_ids for index in range(2)] == [whole[num_known:] for whole in wholes]


@pytest.mark.parametrize("is_slow", [False, True])
def test_samples_that_migrate_while_rows_sit_out_steps_go_on_with_their_tokens(rig: Rig, is_slow: bool) -> None:
    """From every token on, beside requests that sit out steps, too; of the samples of one request, each by itself."""
    engine = CountingEngine(build_engine(worker_config(rig.checkpoint), lanes=DrawnLanes(2, 0.3, is_slow=is_slow)))
    wholes = [rig.undisturbed[4, index].token_ids for index in range(2)]
    for num_known in range(1, min(len(whole) for whole in wholes), 4):
        known = tuple(Completion(tuple(whole[:num_known])) for whole in wholes)
        moved = replace(rig.requests[4], completions=known)
        completions, _ = serve(engine, [moved, rig.requests[0], rig.requests[6]], [], ROOMY, plan_depth=3)
        assert [completions[4, index].token_ids for index in range(2)] == [whole[num_known:] for whole in wholes]
        for number in (0, 6):
            assert completions[number, 0].token_ids == rig.undisturbed[number, 0].token_ids
    assert engine.num_waits > 20


def test_a_resume_that_does_not_follow_the_constraint_ends_alone(rig: Rig) -> None:
    wrong = replace(rig.requests[1], generated_token_ids=(90, 91, 92))
    completions, _ = serve(rig.roomy, [wrong, rig.requests[0]], [], ROOMY)
    assert completions[1, 0].finish_reason is FinishReason.CONSTRAINT_FAILED and not completions[1, 0].token_ids
    assert completions[0, 0].token_ids == rig.undisturbed[0, 0].token_ids


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize(("plan_depth", "max_steps"), [(1, 1), (4, 1), (2, 4)])
@pytest.mark.parametrize("size", ["roomy", "recomputed", "swapped"])
def test_rows_that_sit_out_steps_get_the_same_tokens(
    rig: Rig, plan_depth: int, max_steps: int, size: str, is_slow: bool
) -> None:
    config = worker_config(rig.checkpoint) if size == "roomy" else small_config(rig.checkpoint)
    engine = CountingEngine(build_engine(config, lanes=DrawnLanes(plan_depth, 0.4, is_slow=is_slow)))
    settings = SchedulerSettings(max_step_tokens=16, swap_us_per_block=0.0)
    completions, stats = serve(
        engine,
        rig.requests,
        [],
        settings,
        plan_depth=plan_depth,
        max_steps=max_steps,
        num_host_blocks=32 if size == "swapped" else 0,
    )
    assert engine.num_waits > 20
    assert (stats.num_preemptions > 0, stats.num_swapped_out > 0) == (size != "roomy", size == "swapped")
    rig.check(completions)


@pytest.mark.parametrize("is_slow", [False, True])
def test_options_of_a_request_hold_where_rows_sit_out_steps(rig: Rig, is_slow: bool) -> None:
    """min_tokens, a bias, penalties, log-probabilities of both kinds, samples, and a resume."""
    first, second = rig.requests[0], rig.requests[1]
    plain = Sampling(temperature=1.0, seed=3)
    samplings = [
        replace(plain, min_tokens=14),
        replace(plain, logit_bias=((60, 4.0), (61, -3.0))),
        replace(plain, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
        replace(plain, num_logprobs=2, num_prompt_logprobs=1),
    ]
    requests = [
        replace(request, request_id=RequestId(number), sampling=sampling, num_samples=1 + number % 2)
        for number, (request, sampling) in enumerate(
            (request, each) for request in (first, second) for each in samplings
        )
    ]
    known = tuple(rig.undisturbed[1, 0].token_ids[:3])
    requests.append(replace(second, request_id=RequestId(len(requests)), generated_token_ids=known))
    expected: Completions = {}
    for request in requests:
        expected |= serve(rig.roomy, [request], [], ROOMY)[0]
    engine = CountingEngine(build_engine(worker_config(rig.checkpoint), lanes=DrawnLanes(5, 0.3, is_slow=is_slow)))
    completions, _ = serve(engine, requests, [], ROOMY)
    assert engine.num_waits > 20
    assert completions.keys() == expected.keys()
    for key, served in completions.items():
        assert replace(served, logprobs=[]) == replace(expected[key], logprobs=[]), key
        # torch's product of a layer as small as this one's rounds otherwise for a row alone than for four rows.
        assert numbers_of(served) == pytest.approx(numbers_of(expected[key]), rel=1e-5), key


def numbers_of(served: Served) -> list[float]:
    """Every token of the log-probabilities, with its rank and number."""
    candidates = [[each.token_id, each.rank, each.logprob, *itertools.chain(*each.top)] for each in served.logprobs]
    return [float(number) for number in itertools.chain(*candidates)]

"""Speculative decoding: what an engine returns that drafts is what an engine returns that does not, step by step.

Plans have 1 to 4 steps, as control planes send them. A draft shows in no result, only in the counts of drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import llguidance
import numpy as np
import pytest
import torch
from motet.v1 import types_pb2

from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.engine.speculative.draft_row import DraftRow
from data_plane.engine.speculative.pass_costs import PassCosts
from data_plane.engine.speculative.speculation import MANY_STEPS
from data_plane.models.loader import LoadedModel
from data_plane.plan import NewRow, RowConstraint, RowSampling, StepOutput, StepPlan, Vocabulary
from tests.data_plane.constraints.lanes import in_time
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.planner import GREEDY, array, make_plan
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_adapter, make_tokenizer

BLOCK = 4
BLOCKS_OF_ROW = 24
LOOP = [7, 8, 9, 10, 11] * 4


@dataclass
class Request:
    """One row of a run, and what came of it."""

    prompt: list[int]
    sampling: RowSampling = GREEDY
    slot: int | None = None
    constraint: RowConstraint | None = None
    active_from: int = 0
    tokens: list[int] = field(default_factory=list)

    def new_row(self, row: int) -> NewRow:
        known = [*self.prompt, *self.tokens]
        first = row * BLOCKS_OF_ROW
        return NewRow(
            row=row,
            token_ids=array(known),
            num_prompt_tokens=len(self.prompt),
            num_computed_tokens=0,
            block_ids=array(range(first, first + -(-len(known) // BLOCK))),
            slot=self.slot,
            slot_generation=0 if self.slot is None else 1,
            sampling=self.sampling,
            constraint=self.constraint,
            active_from=self.active_from,
        )


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, TorchEngine]:
    """One that drafts and one that does not, with the same two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [make_adapter(folder / str(seed), checkpoint, seed=seed) for seed in (1, 2)]
    built = []
    for speculative in ("ngram", "off"):
        engine = build_engine(worker_config(checkpoint, block_size=BLOCK, speculative=speculative), lanes=in_time())
        for slot, adapter in enumerate(adapters):
            packed = pack(adapter, engine.capacities.model_fingerprint)
            engine.slots.load(slot, 1, packed.digest, packed)
        built.append(engine)
    return built[0], built[1]


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Raises the logit of the token that goes on with LOOP, so that drafts are accepted."""
    logits_of = LoadedModel.logits

    def use(strength: float) -> None:
        def changed(model: LoadedModel, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            logits = logits_of(model, ids, positions, kept)
            following = 7 + (ids[kept] - 6) % 5
            logits[torch.arange(len(kept)), following] += strength
            return logits

        monkeypatch.setattr(LoadedModel, "logits", changed)

    return use


def run(
    engine: TorchEngine,
    requests: list[Request],
    *,
    num_steps: int,
    seed: int,
    preempts: bool = True,
    pauses: bool = True,
) -> tuple[list[StepOutput], list[Request]]:
    """Every step's output. Plan lengths, pauses and preemptions depend on the seed alone."""
    rng = random.Random(seed)
    requests = [replace(request, tokens=[]) for request in requests]
    rows = list(range(len(requests)))
    outputs: list[StepOutput] = []

    def execute(plan: StepPlan) -> None:
        outputs.append(output := engine.execute(plan))
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            requests[row].tokens.append(token)
        for row in output.failed_rows.tolist():
            requests[row].tokens.append(0)  # the worker counts a token for it

    engine_rows = [request.new_row(row) for row, request in enumerate(requests)]
    execute(make_plan(1, new=engine_rows, prefills=[(row, len(requests[row].prompt)) for row in rows]))
    held = {row: len(new.block_ids) for row, new in enumerate(engine_rows)}
    paused: list[int] = []
    while len(outputs) < num_steps:
        step_id, num_more = len(outputs) + 1, rng.randrange(4)
        victim = rng.choice(rows) if preempts and rng.random() < 0.15 and not paused else None
        new = [] if victim is None else [requests[victim].new_row(victim)]
        if victim is not None:  # preempted by recompute
            num_more, held[victim] = 0, len(new[0].block_ids)
        appended = []
        for row in rows:
            while held[row] * BLOCK < len(requests[row].prompt) + len(requests[row].tokens) + num_more:
                appended.append((row, row * BLOCKS_OF_ROW + held[row]))
                held[row] += 1
        resumed = paused
        paused = [row for row in rows[1:] if row not in resumed and row != victim and pauses and rng.random() < 0.1]
        freed = [] if victim is None else [victim]
        prefills = [(entry.row, len(entry.token_ids)) for entry in new]
        plan = make_plan(
            step_id, freed=freed, new=new, appended=appended, prefills=prefills, paused=paused, resumed=resumed
        )
        execute(replace(plan, num_more=num_more))
        for index in range(num_more):
            execute(StepPlan(step_id + 1 + index, num_more=num_more - 1 - index))
    engine.execute(make_plan(len(outputs) + 1, freed=rows))
    return outputs, requests


def assert_same(drafted: list[StepOutput], plain: list[StepOutput]) -> None:
    assert len(drafted) == len(plain)
    for one, other in zip(drafted, plain, strict=True):
        for name in ("rows", "token_ids", "failed_rows", "unconstrained_rows"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), f"step {one.step_id}: {name}")
        assert [entry.row for entry in one.sampled_logprobs] == [entry.row for entry in other.sampled_logprobs]
        for mine, its in zip(one.sampled_logprobs, other.sampled_logprobs, strict=True):
            assert (mine.first_position, mine.token_ids.tolist()) == (its.first_position, its.token_ids.tolist())
            np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=1e-4)
            np.testing.assert_allclose(mine.top_logprobs, its.top_logprobs, atol=1e-4)


def compare(
    engines: tuple[TorchEngine, TorchEngine], requests: list[Request], *, seed: int, num_steps: int = 48
) -> tuple[int, int]:
    """Drafted and accepted tokens of a run that equals the run without drafts."""
    drafted, _ = run(engines[0], requests, num_steps=num_steps, seed=seed)
    plain, _ = run(engines[1], requests, num_steps=num_steps, seed=seed)
    assert_same(drafted, plain)
    assert sum(output.num_drafted for output in plain) == 0
    return sum(output.num_drafted for output in drafted), sum(output.num_accepted for output in drafted)


def any_sampling(rng: random.Random) -> RowSampling:
    """Settings of every kind."""
    banned = array(sorted(rng.sample(range(2, 20), 3)))
    return RowSampling(
        temperature=rng.choice([0.0, 0.0, 0.4, 1.0]),
        top_k=rng.choice([0, 1, 20]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(2**31),
        repetition_penalty=rng.choice([1.0, 1.1]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        num_logprobs=rng.choice([None, 0, 3]),
        logprobs_mode=rng.choice([types_pb2.LOGPROBS_MODE_RAW, types_pb2.LOGPROBS_MODE_PROCESSED]),
        biased_token_ids=array([9, 30]) if rng.random() < 0.3 else None,
        biases=None,
        min_tokens=8,
        banned_token_ids=banned,
    )


@pytest.mark.parametrize("seed", range(6))
def test_every_setting_gives_the_same_results(
    engines: tuple[TorchEngine, TorchEngine], echo: Callable[[float], None], seed: int
) -> None:
    echo(6.0)
    rng = random.Random(seed)
    requests = []
    for number in range(6):
        sampling = any_sampling(rng)
        if number % 2:  # sampled at all positions of a pass at once
            sampling = replace(sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
            sampling = replace(sampling, num_logprobs=None)
        if sampling.biased_token_ids is not None:
            sampling = replace(sampling, biases=np.array([1.5, -2.0], dtype=np.float32))
        if rng.random() < 0.4:
            sampling = replace(sampling, min_tokens=0, banned_token_ids=None)
        slot = rng.choice([None, 0, 1])
        prompt = LOOP[: rng.randrange(3, len(LOOP))]
        active_from = rng.randrange(len(prompt)) if slot is not None and rng.random() < 0.3 else 0
        requests.append(Request(prompt, sampling, slot, active_from=active_from))
    drafted, accepted = compare(engines, requests, seed=seed)
    assert drafted > accepted > 0, "nothing was accepted, or nothing was rejected"


@pytest.mark.parametrize(("exponent", "is_drafting"), [(0.0, True), (1.0, False)])
def test_auto_drafts_where_a_pass_with_drafts_is_cheap(
    checkpoint: Path,
    engines: tuple[TorchEngine, TorchEngine],
    echo: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    exponent: float,
    is_drafting: bool,
) -> None:
    """Passes that take the same time for any number of tokens, and passes whose time grows with it."""
    echo(8.0)

    def time_s(_: PassCosts, num_tokens: int, *, has_adapters: bool, is_verifying: bool = False) -> float:
        assert not has_adapters
        return float(num_tokens) ** exponent

    monkeypatch.setattr(PassCosts, "time_s", time_s)
    engine = build_engine(worker_config(checkpoint, block_size=BLOCK, speculative="auto"))
    requests = [Request(LOOP), Request(LOOP[:13])]
    auto, _ = run(engine, requests, num_steps=70, seed=4)
    plain, _ = run(engines[1], requests, num_steps=70, seed=4)
    assert_same(auto, plain)
    assert (sum(output.num_accepted for output in auto) > 20) is is_drafting
    assert (sum(output.num_drafted for output in auto) > 0) is is_drafting
    stats = engine.stats()
    assert (stats.num_drafted, stats.num_accepted) == (
        sum(output.num_drafted for output in auto),
        sum(output.num_accepted for output in auto),
    )


@pytest.mark.parametrize(("exponent", "num_looked_up"), [(0.0, 1), (0.9, 4)])
def test_auto_looks_no_further_where_one_row_without_drafts_decides(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, exponent: float, num_looked_up: int
) -> None:
    """A row without drafts needs every step. Where a pass of this row alone is cheap, the others may still gain."""
    looked_up: list[int] = []

    def look_up(row: DraftRow) -> list[int]:
        looked_up.append(row.num_tokens)
        return []

    def time_s(_: PassCosts, num_tokens: int, *, has_adapters: bool, is_verifying: bool = False) -> float | None:
        return None if is_verifying else float(num_tokens) ** exponent

    monkeypatch.setattr(DraftRow, "look_up", look_up)
    monkeypatch.setattr(PassCosts, "time_s", time_s)
    engine = build_engine(worker_config(checkpoint, block_size=BLOCK, speculative="auto"))
    rows = [Request(LOOP).new_row(row) for row in range(4)]
    engine.execute(make_plan(1, new=rows, prefills=[(row, len(LOOP)) for row in range(4)]))
    engine.execute(replace(make_plan(2, appended=[(row, row * BLOCKS_OF_ROW + 5) for row in range(4)]), num_more=3))
    assert len(looked_up) == num_looked_up


@pytest.mark.parametrize("seed", range(3))
def test_auto_changes_no_result_whatever_it_measures(
    checkpoint: Path, engines: tuple[TorchEngine, TorchEngine], echo: Callable[[float], None], seed: int
) -> None:
    echo(6.0)
    engine = build_engine(worker_config(checkpoint, block_size=BLOCK, speculative="auto"))
    requests = [Request(LOOP[: 20 - row], replace(GREEDY, temperature=row / 4, seed=row)) for row in range(5)]
    auto, _ = run(engine, requests, num_steps=70, seed=seed)
    plain, _ = run(engines[1], requests, num_steps=70, seed=seed)
    assert_same(auto, plain)


@pytest.mark.parametrize("num_right", range(4))
def test_a_rejection_at_every_position(
    engines: tuple[TorchEngine, TorchEngine], monkeypatch: pytest.MonkeyPatch, num_right: int
) -> None:
    """Drafts of 3 tokens whose first `num_right` are right, at every offset of a block."""
    plain, requests = run(engines[1], [Request(LOOP, slot=0)], num_steps=40, seed=3)
    known = [*LOOP, *requests[0].tokens, 2, 2, 2, 2]

    def look_up(row: DraftRow) -> list[int]:
        right = known[row.num_tokens : row.num_tokens + 3]
        return [token if index < num_right else token ^ 1 for index, token in enumerate(right)]

    monkeypatch.setattr(DraftRow, "look_up", look_up)
    drafted, _ = run(engines[0], [Request(LOOP, slot=0)], num_steps=40, seed=3)
    assert_same(drafted, plain)
    num_drafted = sum(output.num_drafted for output in drafted)
    num_accepted = sum(output.num_accepted for output in drafted)
    assert num_drafted > 0
    assert num_accepted == num_drafted if num_right == 3 else num_accepted < num_drafted
    assert (num_accepted == 0) == (num_right == 0)


def test_forced_tokens_of_a_grammar_are_accepted(engines: tuple[TorchEngine, TorchEngine], tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path / "tokenizer", vocab_size=256)
    tokenizer = (directory / "tokenizer.json").read_text(encoding="utf-8")
    num_tokens = engines[0].capacities.vocab_size
    grammar = llguidance.LLMatcher.grammar_from_lark(
        'start: ("alpha" | "beta") " and a long text that is forced" /[a-z]+/'
    )
    constraint = RowConstraint(grammar, grammar, Vocabulary("v", tokenizer, num_tokens, (0,)))
    sampling = RowSampling(temperature=1.0, top_k=0, top_p=1.0, seed=5)
    requests = [Request([5, 9, 31], sampling, constraint=constraint), Request(LOOP, sampling, slot=1)]
    drafted, accepted = compare(engines, requests, seed=1, num_steps=36)
    assert accepted >= 8 and drafted >= accepted


def test_rows_that_are_not_finite_fail_in_the_same_steps(
    engines: tuple[TorchEngine, TorchEngine], monkeypatch: pytest.MonkeyPatch, echo: Callable[[float], None]
) -> None:
    echo(6.0)
    logits_of = LoadedModel.logits

    def changed(model: LoadedModel, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        logits = logits_of(model, ids, positions, kept)
        logits[positions[kept] == 30] = torch.nan
        return logits

    monkeypatch.setattr(LoadedModel, "logits", changed)
    requests = [Request(LOOP), Request(LOOP[:9])]
    plain, _ = run(engines[1], requests, num_steps=12, seed=2)
    drafted, _ = run(engines[0], requests, num_steps=12, seed=2)
    assert any(len(output.failed_rows) for output in plain)
    assert_same(drafted, plain)


def test_drafts_stay_within_the_plan(engines: tuple[TorchEngine, TorchEngine], echo: Callable[[float], None]) -> None:
    """A plan of one step drafts nothing. At the end of a plan no result is left, and rows are as plans know them."""
    echo(100.0)
    engine = engines[0]
    engine.execute(make_plan(1, new=[Request(LOOP).new_row(0)], prefills=[(0, len(LOOP))]))
    assert engine.execute(make_plan(2, appended=[(0, 5), (0, 6)])).num_drafted == 0
    outputs = [engine.execute(StepPlan(3 + index, num_more=3 - index)) for index in range(4)]
    assert [(output.num_drafted, output.num_accepted) for output in outputs] == [(3, 3), (0, 0), (0, 0), (0, 0)]
    assert [output.token_ids.tolist() for output in outputs] == [[9], [10], [11], [7]]
    assert engine.inspect(0).num_computed == len(LOOP) + 5
    engine.execute(make_plan(7, freed=[0]))


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_worker_says_that_plans_leave_no_room_for_drafts(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, num_more: int
) -> None:
    engine = build_engine(worker_config(checkpoint, block_size=64, max_model_len=512, speculative="auto"))
    engine.execute(make_plan(1, new=[replace(Request(LOOP).new_row(0), block_ids=array(range(8)))], prefills=[(0, 20)]))
    engine.execute(StepPlan(2, num_more=num_more))
    for step_id in range(3, MANY_STEPS + 9):
        engine.execute(StepPlan(step_id))
        if step_id == MANY_STEPS:
            assert caplog.text.count("no drafts") == 0
    assert caplog.text.count("give the control plane --min-plan-steps 4") == (num_more == 0)


@pytest.mark.parametrize("is_short_of", ["tokens", "logits"])
def test_drafts_stay_within_the_token_budget_and_the_logits_that_a_pass_keeps(
    checkpoint: Path, echo: Callable[[float], None], is_short_of: str
) -> None:
    echo(100.0)
    budget = 5 if is_short_of == "tokens" else 50
    engine = build_engine(worker_config(checkpoint, token_budget=budget, max_rows=2, speculative="ngram"))
    if is_short_of == "logits":
        of_two = 2 * 4 * engine.capacities.vocab_size
        engine = TorchEngine(
            engine.model,
            engine.kv_cache,
            engine.arena,
            engine.capacities,
            prompt_logits_bytes=of_two,
            speculative="ngram",
        )
    for row in range(2):
        new = replace(Request(LOOP[:10]).new_row(row), block_ids=array([2 * row, 2 * row + 1]))
        engine.execute(make_plan(2 * row, new=[new], prefills=[(row, 4)], paused=[0] if row else []))
        engine.execute(make_plan(2 * row + 1, prefills=[(row, 5)]))
        engine.execute(make_plan(2 * row + 2, prefills=[(row, 1)]))
    engine.execute(make_plan(7, resumed=[0]))
    outputs = [engine.execute(StepPlan(8 + index, num_more=2 - index)) for index in range(3)]
    # Two rows with two drafts each are six tokens, four of them drafts.
    assert [output.num_drafted for output in outputs] == [2, 0, 0]

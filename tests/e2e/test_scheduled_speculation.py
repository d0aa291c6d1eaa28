"""Drafts over scheduler, wire and engine in one process: every completion is that of a worker which does not draft.

Disturbed by preemption with recompute and with swap, by plans ahead of results, and by a resume or a migration from
every token on. One batch has plain rows, two adapters, several samples, penalties, biases, log-probabilities and
constraints that force tokens. Plans stand for up to 4 steps, and max_tokens ends some completions within a draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import llguidance
import pytest
import torch

from control_plane.constraints.compile_process import compiled
from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.stats import SchedulerStats
from control_plane.scheduler.types import Completion, Constraint, FinishReason, Request, RequestId, Sampling, Vocabulary
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.models.loader import LoadedModel
from tests.data_plane.constraints.lanes import in_time
from tests.data_plane.engine.test_constrained_drafts import WheneverLanes
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import Completions, IngestedAdapter, ingested, serve
from tests.makers import make_adapter, make_checkpoint, make_tokenizer

END, NUM_VOCABULARY = 0, 256
LOOP = (17, 18, 19, 20, 21) * 3
ROOMY = SchedulerSettings(max_step_tokens=64)
GRAMMAR = 'start: ("alpha" | "beta") " and a long text that is forced" /[a-z]+/'
ALL_KINDS = [
    Sampling(num_logprobs=2),
    Sampling(temperature=0.8, seed=4),
    Sampling(temperature=0.6, top_k=30, top_p=0.9, seed=5, repetition_penalty=1.1, frequency_penalty=0.1),
    Sampling(logit_bias=((9, 1.5), (30, -2.0)), min_tokens=9, num_logprobs=0),
]


@dataclass(frozen=True)
class Rig:
    """An engine that drafts with room for all, one that drafts with little room, and what is true without drafts."""

    checkpoint: Path
    roomy: TorchEngine
    small: TorchEngine  # 24 blocks of 8 tokens
    adapters: list[IngestedAdapter]
    requests: list[Request]
    undisturbed: Completions  # of an engine that does not draft, each request alone

    def serve(
        self, engine: TorchEngine, settings: SchedulerSettings, *, plan_depth: int = 2, num_host_blocks: int = 0
    ) -> tuple[SchedulerStats, int]:
        """Serve and check all requests; the drafts accepted."""
        counted = Counted(engine)
        completions, stats = serve(
            engine,
            self.requests,
            self.adapters,
            settings,
            plan_depth=plan_depth,
            max_steps=4,
            num_host_blocks=num_host_blocks,
        )
        assert completions.keys() == self.undisturbed.keys()
        for key, served in completions.items():
            expected = self.undisturbed[key]
            assert (served.token_ids, served.finish_reason) == (expected.token_ids, expected.finish_reason), key
            assert [entry.logprob for entry in served.logprobs] == pytest.approx(
                [entry.logprob for entry in expected.logprobs], abs=1e-4
            )
        return stats, counted.take()


class Counted:
    """Counts the drafts that an engine accepts."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._before = engine.stats().num_accepted

    def take(self) -> int:
        """Since the beginning."""
        return self._engine.stats().num_accepted - self._before


@pytest.fixture(scope="module", autouse=True)
def _echo() -> Iterator[None]:
    """Raises the logit of the token that goes on with LOOP, so that most drafts are accepted and some are not."""
    logits_of = LoadedModel.logits

    def changed(model: LoadedModel, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        logits = logits_of(model, ids, positions, kept)
        logits[torch.arange(len(kept)), 17 + (ids[kept] - 16) % 5] += 7
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedModel, "logits", changed)
        yield


def make_requests(adapters: list[IngestedAdapter], constraint: Constraint) -> list[Request]:
    """One of each kind of sampling, every second one with an adapter; then samples, stop tokens and constraints."""
    requests = [
        Request(
            RequestId(number),
            LOOP[number:],
            21 + number,
            adapter=(None, adapters[0].ref, adapters[1].ref)[number % 3],
            sampling=sampling,
        )
        for number, sampling in enumerate(ALL_KINDS)
    ]
    drawn = Sampling(temperature=0.3, seed=4)
    several = replace(requests[0], request_id=RequestId(4), sampling=drawn, num_samples=3, max_tokens=18)
    # LOOP goes on with 17 to 21 most of the time: this one ends within the first draft that reaches its 9th token.
    stopped = replace(
        requests[3],
        request_id=RequestId(5),
        adapter=adapters[0].ref,
        stop_token_ids=frozenset({19, END}),
        max_tokens=30,
    )
    forced = Request(RequestId(6), (5, 9, 31), 44, sampling=Sampling(temperature=1.0, seed=5), constraint=constraint)
    both = replace(forced, request_id=RequestId(7), adapter=adapters[1].ref, stop_token_ids=frozenset({END}))
    return [*requests, several, stopped, forced, both]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, _echo: None) -> Rig:
    directory = tmp_path_factory.mktemp("rig")
    checkpoint = make_checkpoint(directory / "model", "llama")
    base = BaseModel.load(checkpoint)
    adapters = [ingested(make_adapter(directory / f"{seed}", checkpoint, seed=seed), base) for seed in (3, 4)]
    text = (make_tokenizer(checkpoint) / "tokenizer.json").read_text(encoding="utf-8")
    reader = llguidance.LLTokenizer(text, n_vocab=NUM_VOCABULARY, eos_token=[END])
    grammar = compiled({"kind": "lark", "value": GRAMMAR}, reader)
    requests = make_requests(adapters, Constraint("g", grammar, Vocabulary("v", text, NUM_VOCABULARY, (END,))))
    plain = build_engine(worker_config(checkpoint), lanes=in_time())
    undisturbed: Completions = {}
    for request in requests:
        undisturbed |= serve(plain, [request], adapters, ROOMY)[0]
    roomy = build_engine(worker_config(checkpoint, speculative="ngram"), lanes=in_time())
    tight = {"num_blocks": 24, "host_kv_bytes": 32 * 4096, "max_model_len": 100}
    small = build_engine(worker_config(checkpoint, speculative="ngram", **tight), lanes=in_time())
    return Rig(checkpoint, roomy, small, adapters, requests, undisturbed)


def test_completions_are_worth_comparing(rig: Rig) -> None:
    """They differ, they end in every way, and the grammar forces most tokens of what follows it."""
    ends = {served.finish_reason for served in rig.undisturbed.values()}
    assert ends == {FinishReason.LENGTH, FinishReason.STOP_TOKEN}
    assert len({tuple(served.token_ids) for served in rig.undisturbed.values()}) >= 9
    stopped = rig.undisturbed[5, 0].token_ids
    assert len(stopped) >= 9 and stopped[-1] in (19, END), "min_tokens held nothing off"


@pytest.mark.parametrize("plan_depth", [1, 2, 4])
def test_plans_ahead_of_results_change_no_token(rig: Rig, plan_depth: int) -> None:
    _, accepted = rig.serve(rig.roomy, ROOMY, plan_depth=plan_depth)
    assert accepted > 30


@pytest.mark.parametrize("chunk", [7, 64])
def test_recomputed_requests_go_on_with_their_tokens(rig: Rig, chunk: int) -> None:
    stats, accepted = rig.serve(rig.small, SchedulerSettings(max_step_tokens=chunk))
    assert stats.num_preemptions > stats.num_swapped_out == 0
    assert accepted > 0


@pytest.mark.parametrize("chunk", [7, 64])
def test_swapped_requests_go_on_with_their_tokens(rig: Rig, chunk: int) -> None:
    settings = SchedulerSettings(max_step_tokens=chunk, swap_us_per_block=0.0)
    stats, accepted = rig.serve(rig.small, settings, num_host_blocks=32)
    assert stats.num_swapped_out > 0
    assert accepted > 0


@pytest.mark.parametrize("is_slow", [False, True])
def test_masks_that_come_late_change_no_token(rig: Rig, is_slow: bool) -> None:
    """Rows sit out steps of plans in which others are ahead; some are preempted meanwhile."""
    lanes = WheneverLanes(0, is_slow=is_slow)
    engine = build_engine(
        worker_config(rig.checkpoint, num_blocks=24, max_model_len=100, speculative="ngram"), lanes=lanes
    )
    stats, accepted = rig.serve(engine, ROOMY)
    assert stats.num_preemptions > 0
    assert (accepted > 0) is not is_slow, "a slow grammar among the rows of a step ends its drafts"


@pytest.mark.parametrize("number", [0, 3, 6])
def test_a_resume_from_every_token_goes_on_with_the_same_ones(rig: Rig, number: int) -> None:
    whole = rig.undisturbed[number, 0].token_ids
    counted = Counted(rig.roomy)
    for num_known in range(1, len(whole)):
        resumed = replace(rig.requests[number], generated_token_ids=tuple(whole[:num_known]))
        completions, _ = serve(rig.roomy, [resumed], rig.adapters, ROOMY, max_steps=4)
        assert completions[number, 0].token_ids == whole[num_known:]
    assert counted.take() > 0


def test_samples_that_migrate_go_on_with_their_tokens(rig: Rig) -> None:
    """As after the loss of a worker: each sample with what it generated so far."""
    wholes = [rig.undisturbed[4, index].token_ids for index in range(3)]
    counted = Counted(rig.roomy)
    for num_known in (1, 2, 3, 6, 11):
        known = tuple(Completion(tuple(whole[:num_known])) for whole in wholes)
        migrated = replace(rig.requests[4], completions=known)
        completions, _ = serve(rig.roomy, [migrated], rig.adapters, ROOMY, max_steps=4)
        assert [completions[4, index].token_ids for index in range(3)] == [whole[num_known:] for whole in wholes]
    assert counted.take() > 0


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_ends_a_completion_within_a_draft(rig: Rig, max_tokens: int) -> None:
    request = replace(rig.requests[0], max_tokens=max_tokens)
    completions, _ = serve(rig.roomy, [request], rig.adapters, ROOMY, max_steps=4)
    assert completions[0, 0].token_ids == rig.undisturbed[0, 0].token_ids[:max_tokens]
    assert completions[0, 0].finish_reason is FinishReason.LENGTH

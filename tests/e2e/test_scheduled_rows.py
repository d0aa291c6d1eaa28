"""Adapters with rows and vocabularies of their own, as PEFT has them: through ingest, scheduler, wire and engine.

Whole distributions over each adapter's own vocabulary are compared, over eviction, preemption by both ways, migration
and prefix hits, and what is drawn is what the distribution of PEFT's logits allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from motet.v1 import types_pb2

from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import BeamSearch, FinishReason, Request, RequestId, Sampling
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.errors import PlanRefused
from tests.data_plane.engine.test_oracle import worker_config
from tests.data_plane.engine.test_token_rows import FORMS, PeftModelOf, make_form
from tests.e2e.distributions import TOLERANCE
from tests.e2e.scheduled import IngestedAdapter, Served, ingested, serve
from tests.makers import make_checkpoint, make_prompt
from tests.oracle import MIN_GAP

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*save_embedding_layers",
    "ignore:.*ensure_weight_tying",
    "ignore:.*embedding layer has been resized",
)
BASE_TOKENS, NUM_TOKENS = 256, 8
MODES = {"raw": types_pb2.LOGPROBS_MODE_RAW, "processed": types_pb2.LOGPROBS_MODE_PROCESSED}
NAMES = ["both saved", "tokens", "resized", "resized, saved", "resized, tokens", "smaller", "plain"]
SIZES: dict[str | None, int] = {name: FORMS[name].get("resize", BASE_TOKENS) for name in NAMES} | {None: BASE_TOKENS}


class Model:
    """A checkpoint with adapters, and PEFT's model of each."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint = make_checkpoint(directory / "model", "llama")
        base_model = BaseModel.load(self.checkpoint)
        self.adapters: dict[str, IngestedAdapter] = {}
        self.truth: dict[str | None, PeftModelOf] = {None: PeftModelOf(self.checkpoint, None)}
        for seed, name in enumerate(NAMES):
            path = make_form(directory / f"adapter {seed}", self.checkpoint, seed=seed, **FORMS[name])
            self.adapters[name] = ingested(path, base_model)
            self.truth[name] = PeftModelOf(self.checkpoint, path, FORMS[name].get("resize"))

    def engine(self, *, num_adapters: int = len(NAMES), **sizes: Any) -> TorchEngine:
        room = num_adapters * max(adapter.ref.arena_bytes for adapter in self.adapters.values())
        return build_engine(
            worker_config(
                self.checkpoint, **({"num_slots": num_adapters, "arena_bytes": room, "max_model_len": 100} | sizes)
            )
        )

    def request(
        self, number: int, name: str | None, prompt: Sequence[int], max_tokens: int = NUM_TOKENS, **fields: Any
    ) -> Request:
        fields.setdefault("sampling", Sampling(temperature=0.0, num_logprobs=SIZES[name]))
        ref = None if name is None else self.adapters[name].ref
        return Request(RequestId(number), tuple(prompt), max_tokens, adapter=ref, arrival_s=float(number), **fields)

    def logprobs(self, name: str | None, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """PEFT's of every generated position, [tokens, the adapter's vocabulary]."""
        logits = self.truth[name].logits([*prompt, *token_ids])[len(prompt) - 1 : -1, : SIZES[name]]
        return logits.double().log_softmax(-1)

    def check(self, name: str | None, prompt: Sequence[int], served: Served) -> int:
        """Compare a greedy completion's distributions with PEFT's, and its clear choices. Returns a count of these."""
        expected, num_clear = self.logprobs(name, prompt, served.token_ids), 0
        assert len(served.logprobs) == len(served.token_ids)
        for entry, due, token in zip(served.logprobs, expected, served.token_ids, strict=True):
            found = torch.full((SIZES[name],), float("nan"), dtype=torch.float64)
            for token_id, logprob in entry.top:
                found[token_id] = logprob
            assert float((found - due).abs().max()) <= TOLERANCE, name
            top = due.topk(2)
            if float(top.values[0] - top.values[1]) >= MIN_GAP:
                assert token == int(top.indices[0]), name
                num_clear += 1
        return num_clear


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("rows"))


def prompt_of(name: str | None, seed: int, length: int) -> list[int]:
    """With changed tokens, and with the new ones of the adapter."""
    prompt = make_prompt(seed, length, vocab_size=250)
    for place, token_id in enumerate([5, 9, *range(BASE_TOKENS, SIZES[name])][:length]):
        prompt[place] = token_id
    return prompt


# The arena holds two of the adapters and blocks are few: slots are used again, requests preempted by both ways.
SETTINGS = [
    (SchedulerSettings(swap_us_per_block=1e9, max_step_tokens=24), 0, 1),
    (SchedulerSettings(swap_us_per_block=0.0, max_step_tokens=24), 64, 1),
    (SchedulerSettings(policy=Policy.PREFILL_FIRST), 0, 4),
]


@pytest.mark.parametrize(("settings", "num_host_blocks", "max_steps"), SETTINGS)
def test_distributions_are_those_of_peft_over_eviction_and_preemption(
    model: Model, settings: SchedulerSettings, num_host_blocks: int, max_steps: int
) -> None:
    engine = model.engine(num_adapters=2, num_blocks=14, host_kv_bytes=num_host_blocks << 14)
    names: list[str | None] = [None, *NAMES] * 2
    prompts = [prompt_of(name, place, 9 + 5 * (place % 4)) for place, name in enumerate(names)]
    requests = [
        model.request(place, name, prompt, tenant=f"tenant {place % 2}")
        for place, (name, prompt) in enumerate(zip(names, prompts, strict=True))
    ]
    served, stats = serve(
        engine,
        requests,
        list(model.adapters.values()),
        settings,
        num_host_blocks=num_host_blocks and engine.capacities.num_host_blocks,
        max_steps=max_steps,
    )
    assert stats.num_preemptions > 0 and (stats.num_swapped_out > 0) is (num_host_blocks > 0)
    pairs = zip(names, prompts, strict=True)
    num_clear = sum(model.check(name, prompt, served[place, 0]) for place, (name, prompt) in enumerate(pairs))
    assert num_clear > 0.8 * NUM_TOKENS * len(requests)


def test_a_request_goes_on_with_its_own_tokens_on_another_worker(model: Model) -> None:
    """As one whose worker was lost: with new tokens of its adapter behind its prompt."""
    first, second = model.engine(), model.engine(num_adapters=2)
    adapters = list(model.adapters.values())
    for place, name in enumerate(["resized", "resized, saved", "resized, tokens", "both saved"]):
        prompt, new = prompt_of(name, place, 12), SIZES[name] - 1
        biased = Sampling(temperature=0.0, num_logprobs=0, logit_bias=((new, 1000.0),))
        begun = serve(first, [model.request(1, name, prompt, 3, sampling=biased)], adapters, SchedulerSettings())[0][
            1, 0
        ]
        assert begun.token_ids == [new] * 3
        request = model.request(2, name, prompt)
        served, _ = serve(
            second, [replace(request, generated_token_ids=tuple(begun.token_ids))], adapters, SchedulerSettings()
        )
        assert model.check(name, [*prompt, *begun.token_ids], served[2, 0]) > 0
        assert len(served[2, 0].token_ids) == NUM_TOKENS - 3


def test_equal_tokens_share_their_blocks_within_an_adapter_and_never_across(model: Model) -> None:
    engine = model.engine(num_blocks=120, block_size=4)
    prompt = [5, 9, *make_prompt(1, 30, vocab_size=250)]
    adapters = list(model.adapters.values())

    def hits(*names: str | None) -> int:
        requests = [model.request(place, name, prompt, 3) for place, name in enumerate(names)]
        served, stats = serve(engine, requests, adapters, SchedulerSettings(max_step_tokens=8))
        for place, name in enumerate(names):
            model.check(name, prompt, served[place, 0])
        return stats.prefix_hit_tokens

    least = len(prompt) - 8  # the last step of the request before may be under way
    for name in ("both saved", "tokens", "resized, tokens"):
        assert hits(name, name) >= least
        assert hits(name, None) == hits(None, name) == hits(name, "plain") == 0
    assert hits("both saved", "tokens", "resized", "resized, tokens", "smaller") == 0


@pytest.mark.parametrize("name", ["resized, saved", "resized, tokens", "smaller", "both saved"])
def test_beam_search_finds_what_transformers_finds_with_the_adapters_vocabulary(model: Model, name: str) -> None:
    prompt, width, ends = prompt_of(name, 3, 11), 3, [SIZES[name] - 1, 7]
    request = model.request(
        1, name, prompt, sampling=Sampling(), beam=BeamSearch(width, 1.0), stop_token_ids=frozenset(ends)
    )
    served, _ = serve(model.engine(), [request], list(model.adapters.values()), SchedulerSettings())
    generated = model.truth[name].peft.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=ends,
        pad_token_id=1_000_000,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = [[t for t in row if t != 1_000_000] for row in generated.sequences[:, len(prompt) :].tolist()]
    assert [served[1, index].token_ids for index in range(width)] == tokens
    scores = [served[1, index].score for index in range(width)]
    assert scores == pytest.approx(generated.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_samples_are_drawn_from_the_adapters_vocabulary_with_its_log_probabilities(model: Model, mode: str) -> None:
    """Two completions with a seed, top-k, top-p and a bias on a new token, and the log-probabilities of both kinds."""
    name, temperature, bias, top_k, top_p = "resized, saved", 0.7, 4.0, 12, 0.9
    new, size = SIZES[name] - 1, SIZES[name]
    engine, adapters = model.engine(), list(model.adapters.values())
    drawn_new = 0
    for seed in range(6):
        prompt = prompt_of(name, seed, 10)
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            logit_bias=((new, bias),),
            num_logprobs=size,
            logprobs_mode=MODES[mode],
        )
        request = model.request(seed, name, prompt, sampling=sampling, num_samples=2)
        served, _ = serve(engine, [request], adapters, SchedulerSettings())
        again, _ = serve(engine, [request, model.request(99, None, [7, 8])], adapters, SchedulerSettings())
        for index in range(2):
            found = served[seed, index]
            assert found.token_ids == again[seed, index].token_ids, "a seed gives the same tokens in every batch"
            logits = model.truth[name].logits([*prompt, *found.token_ids])[len(prompt) - 1 : -1].double()
            for entry, row, token in zip(found.logprobs, logits, found.token_ids, strict=True):
                processed = _processed(row, new, bias, temperature, top_k, top_p)
                due = processed if mode == "processed" else row.log_softmax(-1)
                assert processed[token] > -torch.inf, "a token that top-k and top-p leave out"
                assert entry.logprob == pytest.approx(float(due[token]), abs=2 * TOLERANCE)
                drawn_new += token == new
        assert served[seed, 0].token_ids != served[seed, 1].token_ids
    assert drawn_new > 0, "the bias brings the new token about"


def _processed(row: torch.Tensor, new: int, bias: float, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Log-probabilities behind bias, temperature, top-k and top-p, in the order of docs/protocol.md."""
    logits = row.clone()
    logits[new] += bias
    logits /= temperature
    kept = torch.full_like(logits, -torch.inf)
    top = logits.topk(top_k)
    before = top.values.softmax(-1).cumsum(-1) - top.values.softmax(-1)
    chosen = before < top_p
    kept[top.indices[chosen]] = top.values[chosen]
    return kept.log_softmax(-1)


def test_a_new_token_that_ends_sequences_ends_those_of_its_adapter(model: Model) -> None:
    name = "resized"
    end = SIZES[name] - 1
    prompt = prompt_of(name, 2, 9)
    sampling = Sampling(temperature=0.0, logit_bias=((end, 1000.0),))
    stopping = model.request(1, name, prompt, sampling=sampling, stop_token_ids=frozenset([end]))
    later = replace(stopping, request_id=RequestId(2), sampling=replace(sampling, min_tokens=3))
    served, _ = serve(model.engine(), [stopping, later], list(model.adapters.values()), SchedulerSettings())
    assert (served[1, 0].token_ids, served[1, 0].finish_reason) == ([end], FinishReason.STOP_TOKEN)
    assert served[2, 0].token_ids[3:] == [end] and end not in served[2, 0].token_ids[:3]


@pytest.mark.parametrize("name", [None, "plain", "resized", "smaller"])
def test_tokens_of_another_adapter_are_refused_by_the_worker(model: Model, name: str | None) -> None:
    """The server refuses them by the field (tests/control_plane/test_served_companions.py); a plan has no way round."""
    request = model.request(1, name, [5, SIZES[name]])
    with pytest.raises(PlanRefused, match="outside"):
        serve(model.engine(), [request], list(model.adapters.values()), SchedulerSettings())

"""Every kind of adapter under everything that can happen to a request, in batches with all other kinds and base rows.

Whole distributions, hence greedy tokens too, are compared with transformers and PEFT on the same checkpoint. The kinds
are those of tests/adapter_kinds.py; a kind, a field or a place in docs/adapters.md that has no case fails here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft import kinds as registered
from control_plane.registry.peft.config_fields import FIELDS, Use
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import (
    AdapterUse,
    Combination,
    Composition,
    Pooling,
    PoolingKind,
    Request,
    RequestId,
    Sampling,
    StepPlan,
)
from data_plane.adapters import kinds as served_kinds
from data_plane.adapters.format.manifest import read_manifest
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import AdapterSource
from tests.adapter_kinds import CONFIG, NUM_LABELS, PEFT_WARNINGS, SIZES, VOCAB_SIZE, Kind, Made, kinds_of, make
from tests.data_plane.engine.test_oracle import worker_config
from tests.data_plane.engine.test_token_rows import PeftModelOf
from tests.e2e.distributions import TOLERANCE
from tests.e2e.scheduled import Completions, IngestedAdapter, Served, ingested, reported_by, serve
from tests.e2e.test_scheduled_pooling import check_close, classes_of
from tests.makers import make_checkpoint, make_prompt, make_tokenizer
from tests.oracle import MIN_GAP, Oracle

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("llama", "mixtral")
NUM_TOKENS = 6
BASE = "base"
# PEFT's combinations of adapters that it can combine; the scale of each.
COMBINED: dict[str, tuple[Combination, dict[str, float]]] = {
    "combined, cat": (Combination.CAT, {"lora": 0.7, "rslora": -0.5, "one layer": 1.5, "all linears": 1.0}),
    "combined, linear": (Combination.LINEAR, {"lora": 0.6, "same rank": -0.9}),
    "scaled": (Combination.CAT, {"rslora": 0.4}),
    "off": (Combination.CAT, {"lora": 0.0}),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # PEFT makes forty adapters first
    pytest.mark.filterwarnings(*PEFT_WARNINGS),
]


@dataclass
class World:
    """A checkpoint, adapters of every kind, and what is true of each."""

    checkpoint: Path
    kinds: dict[str, Kind]
    made: dict[str, Made]
    adapters: dict[str, IngestedAdapter]
    truths: dict[str, PeftModelOf]
    combined: Oracle

    @property
    def names(self) -> list[str]:
        return [BASE, *self.adapters, *COMBINED]

    @cached_property
    def largest(self) -> int:
        return max(adapter.ref.arena_bytes for adapter in self.adapters.values())

    def vocab_size(self, name: str) -> int:
        return self.kinds[name].vocab_size if name in self.kinds else VOCAB_SIZE

    def engine(self, *, num_adapters: int, **settings: Any) -> TorchEngine:
        """With slots, and bytes, for so many of the adapters."""
        sizes = {"num_slots": num_adapters, "arena_bytes": num_adapters * self.largest, "max_model_len": 100}
        return build_engine(worker_config(self.checkpoint, **(sizes | {"max_adapter_model_len": 100} | settings)))

    def prompt(self, name: str, seed: int, length: int) -> tuple[int, ...]:
        """With tokens that the kind changes, or that it alone has."""
        prompt = make_prompt(seed, length, vocab_size=250)
        prompt[0], prompt[-1] = 9, 5
        kind = self.kinds.get(name)
        if kind is not None and "resize" in kind.form:
            prompt[1] = kind.vocab_size - 1
        if kind is not None and kind.invocation:
            prompt[2:2] = kind.invocation
        return tuple(prompt)

    def request(self, number: int, name: str, prompt: tuple[int, ...], **fields: Any) -> Request:
        """A greedy one with the log-probabilities of every token."""
        ref, composition, active_from = None, None, 0
        if name in COMBINED:
            combination, scales = COMBINED[name]
            uses = tuple(AdapterUse(self.adapters[each].ref, scale) for each, scale in scales.items())
            composition, ref = Composition(uses, combination), uses[0].ref
        elif name != BASE:
            ref, active_from = self.adapters[name].ref, 2 if self.kinds[name].invocation else 0
        request = Request(
            RequestId(number),
            prompt,
            NUM_TOKENS,
            adapter=ref,
            composition=composition,
            active_from=active_from,
            sampling=Sampling(temperature=0.0, num_logprobs=self.vocab_size(name)),
            arrival_s=float(number),
        )
        return replace(request, **fields)

    def logits(self, name: str, token_ids: tuple[int, ...]) -> torch.Tensor:
        if name in COMBINED:
            return self.combined.logits(token_ids, name)
        return self.truths[name].logits(token_ids)

    def check(self, name: str, prompt: tuple[int, ...], served: Served) -> int:
        """Compare a completion's distributions and tokens with PEFT's. How many tokens are clear of rounding."""
        size, num_clear = self.vocab_size(name), 0
        assert len(served.token_ids) == len(served.logprobs) > 0, name
        logits = self.logits(name, (*prompt, *served.token_ids))[len(prompt) - 1 : -1, :size].double()
        for place, (entry, due) in enumerate(zip(served.logprobs, logits.log_softmax(-1), strict=True)):
            found = torch.full((size,), float("nan"), dtype=torch.float64)
            token_ids, logprobs = zip(*entry.top, strict=True)
            found[list(token_ids)] = torch.tensor(logprobs, dtype=torch.float64)
            assert float((found - due).abs().max()) <= TOLERANCE, (name, place)
            top = due.topk(2)
            if float(top.values[0] - top.values[1]) >= MIN_GAP:
                assert served.token_ids[place] == int(top.indices[0]), (name, place)
                num_clear += 1
        return num_clear

    def check_all(self, jobs: dict[int, tuple[str, tuple[int, ...]]], served: Completions) -> None:
        num_clear = sum(self.check(*job, served[number, 0]) for number, job in jobs.items())
        assert num_clear > 0.9 * sum(len(served[number, 0].token_ids) for number in jobs)


def make_world(directory: Path, arch: str, **sizes: Any) -> World:
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch, **SIZES[arch], **sizes))
    kinds = kinds_of(arch)
    kinds["same rank"] = kinds["lora"]  # a second one, for combinations
    made = {
        name: make(kind, directory / f"{seed}", checkpoint, seed) for seed, (name, kind) in enumerate(kinds.items())
    }
    base_model, reported = BaseModel.load(checkpoint), reported_by(build_engine(worker_config(checkpoint)))
    adapters = {name: ingested(each.served, base_model, reported) for name, each in made.items()}
    truths = {
        name: PeftModelOf(each.checkpoint, each.peft, kinds[name].form.get("resize")) for name, each in made.items()
    }
    truths[BASE] = PeftModelOf(checkpoint, None)
    members = {each for _, scales in COMBINED.values() for each in scales}
    combined = Oracle(checkpoint, {name: each.served for name, each in made.items() if name in members})
    for name, (combination, scales) in COMBINED.items():
        combined.combine(name, scales, combination.value)
    return World(checkpoint, kinds, made, adapters, truths, combined)


@pytest.fixture(scope="module", params=ARCHS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    torch.set_num_threads(1)
    yield make_world(tmp_path_factory.mktemp("kinds"), request.param)


# ---- nothing is without a case ----


def test_every_kind_field_and_place_of_the_document_has_a_case(tmp_path: Path) -> None:
    """What registry and worker can serve, and what docs/adapters.md accepts, stands in tests/adapter_kinds.py."""
    configs, worker_kinds, places = list[dict[str, Any]](), set[str](), set[str]()
    for arch in ARCHS:
        checkpoint = make_tokenizer(make_checkpoint(tmp_path / arch, arch, **SIZES[arch]))
        base_model, reported = BaseModel.load(checkpoint), reported_by(build_engine(worker_config(checkpoint)))
        for seed, kind in enumerate(kinds_of(arch).values()):
            made = make(kind, tmp_path / f"{arch} {seed}", checkpoint, seed)
            adapter = ingested(made.served, base_model, reported)
            manifest = read_manifest(adapter.info.manifest, adapter.info.digest)
            worker_kinds |= {type(module.kind).__name__ for chunk in manifest.chunks for module in chunk.modules}
            places.add(kind.place)
            if (path := (made.pushed or made.served) / CONFIG).exists():
                configs.append(json.loads(path.read_text("utf-8")))
    assert worker_kinds == {type(kind).__name__ for kind in served_kinds.KINDS}
    for flag in registered.FLAGS:
        assert any(config.get(flag) for config in configs), f"no kind has {flag}"
    plain = {"bias": "none", "init_lora_weights": True, "target_modules": None}
    for field in FIELDS:
        if field.use is Use.READ:
            values = [config.get(field.name) for config in configs]
            assert any(value and value != plain.get(field.name) for value in values), f"no kind sets {field.name}"
    document = (ROOT / "docs/adapters.md").read_text("utf-8")
    table = document.partition("## Accepted\n")[2].partition("\n### ")[0]
    rows = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")}
    assert rows - {"what"} <= places, "a row of docs/adapters.md that no kind has"
    for place in places - rows:
        assert f"\n{place}\n" in document, f"{place} is not in docs/adapters.md"


# ---- what may happen to a request ----


@pytest.mark.parametrize("lora_form", ["native", "torch"], indirect=True)
@pytest.mark.usefixtures("lora_form")
def test_every_kind_has_the_distributions_of_peft_in_one_batch(world: World) -> None:
    """Prompts of two lengths of every kind, in chunks beside decoding rows; and the vectors and classes of each."""
    engine = world.engine(num_adapters=len(world.adapters), max_rows=64, num_blocks=600)
    jobs = {
        number: (name, world.prompt(name, number, (4, 17)[number % 2]))
        for number, name in enumerate([*world.names, *reversed(world.names)])
    }
    requests = [world.request(number, *job, arrival_s=0.0) for number, job in jobs.items()]
    pooled = {
        len(jobs) + number: (name, world.prompt(name, 7, 12))
        for number, name in enumerate(world.adapters)
        if not world.kinds[name].invocation
    }
    for number, (name, prompt) in pooled.items():
        labels = NUM_LABELS if world.kinds[name].is_classifier else 0
        request = world.request(number, name, prompt, max_tokens=1, arrival_s=0.0, sampling=Sampling())
        requests.append(replace(request, pooling=Pooling(PoolingKind.LAST, labels)))
    served, _ = serve(engine, requests, list(world.adapters.values()), SchedulerSettings(max_step_tokens=90))
    world.check_all(jobs, served)
    for number, (name, prompt) in pooled.items():
        made = world.made[name]
        if world.kinds[name].is_classifier:
            due = classes_of(world.checkpoint, made.served, prompt, NUM_LABELS)
        else:
            due = world.truths[name].hidden(prompt)
        check_close(served[number, 0].pooled, due, "float32", name)


RECOMPUTE = SchedulerSettings(swap_us_per_block=1e9, max_step_tokens=24)
SWAP = SchedulerSettings(swap_us_per_block=0.0, max_step_tokens=24)
# How a request that was preempted goes on, and how far plans are ahead of results.
SETTINGS = [
    pytest.param(RECOMPUTE, 0, 1, id="recompute"),
    pytest.param(SWAP, 64, 1, id="swap"),
    pytest.param(SchedulerSettings(policy=Policy.PREFILL_FIRST), 0, 4, id="steps ahead"),
]


@pytest.mark.parametrize(("settings", "num_host_blocks", "max_steps"), SETTINGS)
def test_every_kind_is_evicted_and_loaded_again(
    world: World,
    settings: SchedulerSettings,
    num_host_blocks: int,
    max_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots and bytes for four adapters, and waves of requests: each slot is used again, by other kinds.

    The second wave is of adapters that are long gone. It takes the slots of those that the first one left.
    """
    engine = world.engine(num_adapters=4, num_blocks=14, host_kv_bytes=num_host_blocks << 14)
    waves = [world.names, ["dora", "lora bias", "ranks", "half"], world.names]
    names = [name for wave in waves for name in wave]
    jobs = {number: (name, world.prompt(name, number, 9 + 5 * (number % 4))) for number, name in enumerate(names)}
    requests = [world.request(number, *job, tenant=f"tenant {number % 2}") for number, job in jobs.items()]
    first, second = len(waves[0]), len(waves[0]) + len(waves[1])
    loads, load = Counter[str](), engine.slots.load

    def count_loads(slot: int, generation: int, digest: str, source: AdapterSource) -> None:
        loads[digest] += 1
        load(slot, generation, digest, source)

    monkeypatch.setattr(engine.slots, "load", count_loads)
    served, _ = serve(
        engine,
        requests[:first],
        list(world.adapters.values()),
        settings,
        num_host_blocks=num_host_blocks and engine.capacities.num_host_blocks,
        max_steps=max_steps,
        then=[requests[first:second], requests[second:]],
    )
    once = [name for name, adapter in world.adapters.items() if loads[adapter.info.digest] < 2]
    assert not once, f"loaded once only: {once}"
    world.check_all(jobs, served)


def test_every_kind_goes_on_after_it_was_preempted(world: World) -> None:
    """Beside a request of the base model, with blocks for one of the two at their end: the later one has to go.

    It computes its tokens again on one model, and its blocks are swapped out and in on the other.
    """
    num_host_blocks = 64 if "experts" in world.kinds else 0
    engine = world.engine(
        num_adapters=5, num_blocks=7, max_model_len=56, max_adapter_model_len=56, host_kv_bytes=num_host_blocks << 14
    )
    jobs = {0: (BASE, world.prompt(BASE, 0, 20))}
    for number, name in enumerate(world.names, start=1):
        jobs[1] = (name, world.prompt(name, number, 20 - 3 * (name == "activated")))
        num_begun = Counter[int]()

        def count_rows(plan: StepPlan, begun: Counter[int] = num_begun) -> None:
            begun.update(int(row.request_id) for row in plan.new_rows)

        served, stats = serve(
            engine,
            [world.request(place, *job, max_tokens=14) for place, job in jobs.items()],
            list(world.adapters.values()),
            SWAP if num_host_blocks else RECOMPUTE,
            num_host_blocks=num_host_blocks and engine.capacities.num_host_blocks,
            on_plan=count_rows,
        )
        assert num_begun[1] > 1 and (stats.num_swapped_out > 0) is (num_host_blocks > 0), f"{name} was not preempted"
        world.check_all(jobs, served)


def test_every_kind_goes_on_with_its_own_tokens_on_another_worker(world: World) -> None:
    """As when a worker is lost: the other computes the prompt and the tokens so far again, in other slots."""
    adapters = list(world.adapters.values())
    first = world.engine(num_adapters=len(adapters), max_rows=64, num_blocks=600)
    other = world.engine(num_adapters=5, max_rows=64, num_blocks=600)
    jobs = {number: (name, world.prompt(name, number, 11)) for number, name in enumerate(world.names)}
    begun, _ = serve(
        first, [world.request(n, *job, max_tokens=3) for n, job in jobs.items()], adapters, SchedulerSettings()
    )
    moved = {number: tuple(begun[number, 0].token_ids) for number in jobs}
    assert {len(tokens) for tokens in moved.values()} == {3}
    requests = [world.request(number, *job, generated_token_ids=moved[number]) for number, job in jobs.items()]
    served, _ = serve(other, requests, adapters, SchedulerSettings(max_step_tokens=40))
    assert {len(served[number, 0].token_ids) for number in jobs} == {NUM_TOKENS - 3}
    world.check_all(jobs, begun)
    world.check_all({number: (name, (*prompt, *moved[number])) for number, (name, prompt) in jobs.items()}, served)

"""Adapters on experts and routers, from their files through the registry's ingest and the real engine.

The truth is transformers with PEFT where PEFT loads the file, else the model with merged weights. Base rows, adapters
on linears and all forms on experts share each batch; in a second round every slot holds another adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import Request, RequestId, Sampling
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from tests.data_plane.engine.expert_files import merged, write_one_by_one
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import Completions, IngestedAdapter, ingested, reported_by, serve
from tests.makers import make_adapter, make_checkpoint, make_prompt
from tests.oracle import GreedyCompletion, Oracle

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:.*target_parameters",
    "ignore:.*did not match any targeted",
)

ARCHS = ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "olmoe")
ROUTERS = {"gpt_oss": "router"}  # others: gate
NUM_TOKENS = 5
PROMPT_LENGTHS = (1, 6, 23)
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Of log-probabilities in float32: sums of another order, and W + B A, which PEFT rounds before it multiplies.
TOLERANCE = 2e-4
ROOM = 160 << 10  # bytes of an arena that holds a few of the adapters


@dataclass(frozen=True)
class Mixture:
    """A checkpoint, its engine, and adapters with what is true of each."""

    checkpoint: Path
    base_model: BaseModel
    engine: TorchEngine
    adapters: dict[str, IngestedAdapter]
    oracles: dict[str, Oracle]  # "" is the base model; an oracle may know its adapter as "adapter" or have it merged

    def name_in_oracle(self, name: str) -> str:
        return "" if name in ("", "merged") or name.startswith("one by one") else "adapter"


def fused_forms(arch: str) -> dict[str, dict[str, Any]]:
    """Adapters that PEFT itself makes."""
    router = f"{ROUTERS.get(arch, 'gate')}.weight"
    forms: dict[str, dict[str, Any]] = {
        "linears": {"targets": ["q_proj", "v_proj"], "rank": 8},
        "fused": {"targets": ["o_proj"], "target_parameters": FUSED, "rank": 4},
        "down": {"targets": [], "target_parameters": ["mlp.experts.down_proj"], "rank": 9, "rslora": True},
        "ranks": {
            "targets": [],
            "target_parameters": ["gate_up_proj"],
            "rank_pattern": {"layers.1.mlp.experts.gate_up_proj": 2},
            "alpha_pattern": {"experts.gate_up_proj": 5},
        },
        "choice": {"targets": ["k_proj"], "target_parameters": [router], "rank": 4},
        "all": {"targets": [], "target_parameters": [*FUSED, router], "rank": 3},
    }
    if arch == "qwen2_moe":
        forms["one column"] = {"targets": ["shared_expert_gate", "up_proj"], "rank": 4}
    return forms


def make_mixture(directory: Path, arch: str, **settings: Any) -> Mixture:
    checkpoint = make_checkpoint(directory / "model", arch)
    base_model = BaseModel.load(checkpoint)
    engine = build_engine(worker_config(checkpoint, num_slots=12, **settings))
    reported = reported_by(engine)
    paths = {
        name: make_adapter(directory / name, checkpoint, seed=seed, **form)
        for seed, (name, form) in enumerate(fused_forms(arch).items())
    }
    oracles = {"": Oracle(checkpoint, {})}
    oracles |= {name: Oracle(checkpoint, {"adapter": path}) for name, path in paths.items()}
    one_by_one: dict[str, dict[str, Any]] = {
        "one by one": {"linears": ["q_proj"]},
        "one by one, some": {"experts": [0, 3], "parts": ["up_proj", "down_proj"], "use_rslora": True, "rank": 9},
    }
    routers = [ROUTERS.get(arch, "gate"), *(["shared_expert_gate"] if arch == "qwen2_moe" else [])]
    one_by_one["one by one, routers"] = {"parts": [], "linears": routers, "use_dora": True, "rank": 5}
    one_by_one["one by one, all"] = {"linears": ["o_proj", *routers], "rank": 3, "use_rslora": True}
    if arch == "gpt_oss":
        one_by_one["one by one, all"] |= {"parts": ["gate_up_proj", "down_proj"]}
        one_by_one["one by one"] = {"parts": ["gate_up_proj", "down_proj"], "linears": ["q_proj"]}
    else:
        one_by_one["one by one, dora"] = {"use_dora": True, "linears": ["v_proj"]}
    for seed, (name, form) in enumerate(one_by_one.items(), start=20):
        paths[name] = write_one_by_one(directory / name, checkpoint, seed=seed, **form)
        oracles[name] = Oracle(merged(directory / f"{name} merged", checkpoint, paths[name]), {})
    adapters = {name: ingested(path, base_model, reported) for name, path in paths.items()}
    return Mixture(checkpoint, base_model, engine, adapters, oracles)


def load(engine: TorchEngine, slot: int, generation: int, adapter: IngestedAdapter) -> None:
    used = engine.slots.used_bytes()
    engine.slots.load(slot, generation, adapter.info.digest, adapter)
    assert engine.slots.used_bytes() - used == adapter.info.arena_bytes


def check_tokens(mixture: Mixture) -> None:
    """Two rounds of mixed batches, in the second of which every slot has another adapter."""
    prompts = [make_prompt(seed, length) for seed, length in enumerate(PROMPT_LENGTHS)]
    names, engine = list(mixture.adapters), mixture.engine
    completions: dict[tuple[int, str], GreedyCompletion] = {
        (index, name): mixture.oracles[name].greedy(prompt, NUM_TOKENS, mixture.name_in_oracle(name))
        for index, prompt in enumerate(prompts)
        for name in ["", *names]
    }
    assert len({tuple(completions[2, name].token_ids) for name in ["", *names]}) > len(names) // 2, "no effect"
    for generation in (1, 2):
        slots: dict[str, int | None] = {"": None}
        for slot, name in enumerate(names[generation - 1 :] + names[: generation - 1]):
            if generation > 1:
                engine.slots.evict(slot, generation - 1)
            load(engine, slot, generation, mixture.adapters[name])
            slots[name] = slot
        pairs = [
            (Job(prompts[index], NUM_TOKENS, slots[name], generation), name, completion)
            for (index, name), completion in completions.items()
            if completion.is_decisive
        ]
        assert len(pairs) >= 0.6 * len(completions)
        Planner(engine, chunk=7, max_running=9).run([job for job, _, _ in pairs])
        for job, name, completion in pairs:
            assert job.tokens == completion.token_ids, (name, len(job.prompt), generation)
    engine.reset()
    assert engine.slots.used_bytes() == 0


@pytest.mark.parametrize(
    ("arch", "lora_form"),
    [(arch, "native") for arch in ARCHS] + [("gpt_oss", "torch"), ("mixtral", "torch")],
    indirect=["lora_form"],
)
@pytest.mark.usefixtures("lora_form")
def test_experts_and_routers_generate_as_peft(arch: str, tmp_path: Path) -> None:
    check_tokens(make_mixture(tmp_path, arch))


def test_peft_writes_what_names_experts_one_by_one(tmp_path: Path) -> None:
    """Where PEFT loads such a file on transformers 5, its logits are those of the merged weights."""
    for arch in ("mixtral", "qwen3_moe", "olmoe"):
        directory = tmp_path / arch
        checkpoint = make_checkpoint(directory / "model", arch)
        adapter = write_one_by_one(directory / "adapter", checkpoint, linears=["q_proj"])
        prompt = make_prompt(1, 12)
        truth = Oracle(merged(directory / "merged", checkpoint, adapter), {}).logits(prompt)
        found = Oracle(checkpoint, {"adapter": adapter}).logits(prompt, "adapter")
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=ARCHS)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    torch.set_num_threads(1)
    return make_mixture(tmp_path_factory.mktemp("mixture"), request.param)


def test_log_probabilities_are_those_of_peft(mixture: Mixture) -> None:
    """All adapters in one batch."""
    requests = requests_of(mixture)
    completions, _ = serve(mixture.engine, requests, list(mixture.adapters.values()), SchedulerSettings())
    check_logprobs(mixture, requests, completions)


@pytest.mark.parametrize("num_host_blocks", [0, 16], ids=["recompute", "swap"])
def test_preempted_requests_and_evicted_adapters_go_on_as_peft(tmp_path: Path, num_host_blocks: int) -> None:
    """12 blocks of 8 tokens and an arena for a few of the adapters: both are taken away and come back."""
    torch.set_num_threads(1)
    settings = {"num_blocks": 12, "host_kv_bytes": 16 * 4096, "max_model_len": 64}
    mixture = make_mixture(tmp_path, "qwen2_moe", **settings, arena_bytes=ROOM)
    assert sum(adapter.info.arena_bytes for adapter in mixture.adapters.values()) > 1.5 * ROOM
    requests = requests_of(mixture, num_tokens=14)
    swaps = SchedulerSettings(swap_us_per_block=0.0)
    completions, stats = serve(
        mixture.engine, requests, list(mixture.adapters.values()), swaps, num_host_blocks=num_host_blocks
    )
    assert stats.num_preemptions > 0 and (stats.num_swapped_out > 0) == bool(num_host_blocks)
    check_logprobs(mixture, requests, completions)


def test_a_request_that_moves_to_another_worker_goes_on_as_peft(mixture: Mixture) -> None:
    """The other worker computes the prompt and the tokens so far again, with the adapter in another slot."""
    prompt, num_tokens = make_prompt(3, 9), 6
    other = build_engine(worker_config(mixture.checkpoint, num_slots=12))
    for slot, (name, adapter) in enumerate(mixture.adapters.items()):
        mixture.engine.reset()
        load(mixture.engine, slot, 1, adapter)
        first = Job(prompt, 3, slot, 1)
        Planner(mixture.engine, chunk=64).run([first])
        load(other, 11 - slot, 7, adapter)
        second = Job(first.known, num_tokens - 3, 11 - slot, 7)
        Planner(other, chunk=5).run([second])
        agreed = mixture.oracles[name].num_agreed(prompt, [*first.tokens, *second.tokens], mixture.name_in_oracle(name))
        assert agreed > num_tokens // 2, name
    mixture.engine.reset()


def test_a_row_has_the_same_bits_alone_and_beside_others(mixture: Mixture) -> None:
    """Log-probabilities of the base and of each adapter, alone and in one batch with all others."""
    adapters = list(mixture.adapters.values())
    requests = requests_of(mixture, num_tokens=4)
    together, _ = serve(mixture.engine, requests, adapters, SchedulerSettings())
    for request in requests:
        alone, _ = serve(mixture.engine, [request], adapters, SchedulerSettings())
        (one, beside) = (found[request.request_id, 0] for found in (alone, together))
        assert one.token_ids == beside.token_ids
        assert [entry.logprob for entry in one.logprobs] == [entry.logprob for entry in beside.logprobs]


def requests_of(mixture: Mixture, num_tokens: int = NUM_TOKENS) -> list[Request]:
    """A greedy request for the base and for each adapter, with log-probabilities, prompts of several lengths."""
    return [
        Request(
            RequestId(number),
            tuple(make_prompt(number, (3, 17, 9)[number % 3])),
            num_tokens,
            adapter=mixture.adapters[name].ref if name else None,
            sampling=Sampling(num_logprobs=0),
        )
        for number, name in enumerate(["", *mixture.adapters])
    ]


def check_logprobs(mixture: Mixture, requests: Sequence[Request], completions: Completions) -> None:
    for request, name in zip(requests, ["", *mixture.adapters], strict=True):
        served, prompt = completions[request.request_id, 0], request.prompt_token_ids
        oracle, in_oracle = mixture.oracles[name], mixture.name_in_oracle(name)
        assert oracle.num_agreed(prompt, served.token_ids, in_oracle) > len(served.token_ids) // 2, name
        rows = oracle.logits([*prompt, *served.token_ids], in_oracle)[len(prompt) - 1 : -1].log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(rows, served.token_ids, strict=True)]
        assert [entry.logprob for entry in served.logprobs] == pytest.approx(expected, abs=TOLERANCE), name


def test_a_module_with_one_column_does_not_narrow_the_pages(tmp_path: Path) -> None:
    """Pages have the columns that divide all other widths: 64, 48, 32 and the heads' 16, not 1."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen2_moe")
    engine = build_engine(worker_config(checkpoint))
    assert any(target.out_features == 1 for target in engine.arena.table.targets)
    assert engine.arena.table.pages.shape[2] == 16

"""Rows that combine adapters, or scale one, give what PEFT's add_weighted_adapter gives, beside all other rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from control_plane.registry.model.base_model import BaseModel
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.errors import PlanRefused
from data_plane.plan import RowAdapter, RowAdapters, RowLogprobs, RowSampling
from tests.data_plane.engine.planner import Job, Planner, make_plan
from tests.data_plane.engine.test_oracle import QUERY_VALUE, worker_config
from tests.e2e.scheduled import ingested
from tests.kernels.tolerances import assert_close
from tests.makers import make_adapter, make_checkpoint, make_prompt
from tests.oracle import GreedyCompletion, Oracle

# PEFT saves the base's embedding and head beside adapters on them, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")

NUM_TOKENS = 6
# Log-probabilities down to -40 or so, over a model of two layers.
MAGNITUDE = 10.0
PROMPT_LENGTHS = (1, 6, 23)

# Name of the combination: PEFT's combination_type, scale of each adapter.
COMBINATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "two": ("cat", {"all": 0.7, "some": 0.3}),
    "other order": ("cat", {"some": 1.0, "all": 1.0}),
    "four": ("cat", {"all": 0.5, "some": -0.5, "rs": 1.5, "odd": 1.0}),
    "sum of products": ("linear", {"all": 0.7, "same rank": 0.6}),
    "negative": ("linear", {"same rank": -0.8, "all": 1.3, "third": 0.25}),
    "scaled": ("cat", {"rs": 0.4}),
    "turned round": ("cat", {"all": -1.0}),
    "off": ("cat", {"all": 0.0}),
}


def forms(arch: str) -> dict[str, dict[str, Any]]:
    some = QUERY_VALUE.get(arch, ["q_proj", "v_proj"])
    last: dict[str, Any] = {} if arch == "gpt2" else {"targets": ["q_proj", "embed_tokens", "lm_head"]}
    return {
        "all": {"rank": 8},
        "some": {"rank": 4, "alpha": 8, "targets": some},
        "rs": {"rank": 16, "alpha": 8, "rslora": True},
        "odd": {"rank": 5, **last},
        "same rank": {"rank": 8, "alpha": 4, "targets": some},
        "third": {"rank": 8, "alpha": 12, **last},
    }


@dataclasses.dataclass
class Served:
    """An engine with adapters, and what combinations of them must generate."""

    engine: TorchEngine
    oracle: Oracle
    prompts: list[list[int]]
    names: list[str]
    adapters: dict[str, Any]
    further: dict[str, Oracle]  # of adapters that no combination has: PEFT may not load them beside others
    slots: dict[str, int] = dataclasses.field(default_factory=dict)
    generation: int = 0

    def load(self, *, first: int) -> None:
        """Put every adapter in another slot than before."""
        for slot in self.slots.values():
            self.engine.slots.evict(slot, self.generation)
        self.generation += 1
        order = self.names[first:] + self.names[:first]
        self.slots = {name: slot for slot, name in enumerate(order)}
        for name, slot in self.slots.items():
            adapter = self.adapters[name]
            self.engine.slots.load(slot, self.generation, adapter.info.digest, adapter)

    def row(self, combination: str | None, scales: dict[str, float]) -> RowAdapters:
        members = tuple(RowAdapter(self.slots[name], self.generation, scale) for name, scale in scales.items())
        return RowAdapters(members, is_linear=combination == "linear")

    def job(self, index: int, name: str | None, **settings: Any) -> Job:
        """One prompt with a combination, an adapter alone or the base model."""
        prompt = self.prompts[index]
        if name in COMBINATIONS:
            adapters = self.row(*COMBINATIONS[name])
            return Job(prompt, NUM_TOKENS, adapters.members[0].slot, self.generation, adapters=adapters, **settings)
        return Job(prompt, NUM_TOKENS, self.slots[name] if name else None, self.generation, **settings)

    def greedy(self, index: int, name: str | None) -> GreedyCompletion:
        return self.oracle.greedy(self.prompts[index], NUM_TOKENS, name)


def serve(
    arch: str,
    directory: Path,
    device: str = "cpu",
    further: Mapping[str, dict[str, Any]] | None = None,
    sizes: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Served:
    """`further`: forms of adapters that no combination has."""
    checkpoint = make_checkpoint(directory / "model", arch, **(sizes or {}))
    paths = {
        name: make_adapter(directory / name, checkpoint, seed=seed, **form)
        for seed, (name, form) in enumerate((forms(arch) | dict(further or {})).items())
    }
    base_model, further = BaseModel.load(checkpoint), further or {}
    adapters = {name: ingested(path, base_model) for name, path in paths.items()}
    oracle = Oracle(checkpoint, {name: path for name, path in paths.items() if name not in further})
    oracles = {name: Oracle(checkpoint, {name: paths[name]}) for name in further}
    for name, (combination, scales) in COMBINATIONS.items():
        oracle.combine(name, scales, combination)
    engine = build_engine(worker_config(checkpoint, device=device, **settings))
    prompts = [make_prompt(seed, length) for seed, length in enumerate(PROMPT_LENGTHS)]
    return Served(engine, oracle, prompts, list(adapters), adapters, oracles)


@pytest.mark.parametrize(("arch", "lora_form"), [("llama", "native"), ("gpt2", "torch")], indirect=["lora_form"])
@pytest.mark.usefixtures("lora_form")
def test_combinations_generate_as_peft_beside_all_other_rows(arch: str, tmp_path: Path) -> None:
    check_tokens(serve(arch, tmp_path))


def check_tokens(served: Served) -> None:
    """Combinations, single adapters and the base in mixed batches, over slot reuse and preemption."""
    everybody = [None, *served.names, *COMBINATIONS]
    truth = {(index, name): served.greedy(index, name) for index in range(len(served.prompts)) for name in everybody}
    assert len({tuple(truth[2, name].token_ids) for name in everybody}) > len(everybody) // 2, "no effect"
    for first in (0, 2):
        served.load(first=first)
        pairs = [(served.job(*key), key, truth[key]) for key in truth if truth[key].is_decisive]
        assert len(pairs) >= 0.6 * len(truth)
        Planner(served.engine, chunk=7, max_running=9).run([job for job, _, _ in pairs], preempt_at=4)
        for job, key, completion in pairs:
            assert job.tokens == completion.token_ids, (key, first)
    assert served.engine.num_scaled_columns == 0, "a column is held by no row"


def test_logits_of_combinations_are_pefts(tmp_path: Path) -> None:
    served = serve("llama", tmp_path)
    served.load(first=1)
    jobs = {
        name: served.job(2, name, sampling=RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, num_logprobs=256))
        for name in (None, "all", *COMBINATIONS)
    }
    planner = Planner(served.engine, chunk=64)
    new = [planner.admit(job) for job in jobs.values()]
    plan = make_plan(1, new=new, prefills=[(job.row, len(job.prompt)) for job in jobs.values()])
    output = served.engine.execute(plan)
    by_row = {logprobs.row: logprobs for logprobs in output.sampled_logprobs}
    for name, job in jobs.items():
        check_logits(served, by_row[job.row], job.prompt, name)


def check_logits(served: Served, found: RowLogprobs, token_ids: list[int], name: str | None) -> None:
    """The log-probabilities of what follows the tokens are PEFT's."""
    ours = np.full(256, np.nan, dtype=np.float32)
    ours[found.top_token_ids[0]] = found.top_logprobs[0]
    truth = served.further.get(name or "", served.oracle).logits(token_ids, name)[-1].log_softmax(-1)
    assert_close(torch.from_numpy(ours), truth, magnitude=MAGNITUDE)


def test_a_combination_of_another_generation_is_refused(tmp_path: Path) -> None:
    served = serve("llama", tmp_path)
    served.load(first=0)
    adapters = served.row("cat", {"all": 1.0, "some": 1.0})
    stale = RowAdapters((adapters.members[0], dataclasses.replace(adapters.members[1], generation=9)))
    job = Job(served.prompts[1], 2, stale.members[0].slot, served.generation, adapters=stale)
    with pytest.raises(PlanRefused, match="generation 1, the plan names generation 9"):
        Planner(served.engine, chunk=8).run([job])


def test_rows_share_the_column_of_a_scale(tmp_path: Path) -> None:
    served = serve("llama", tmp_path)
    served.load(first=0)
    planner = Planner(served.engine, chunk=64)
    jobs = [served.job(index, name) for index in (0, 1) for name in ("two", "scaled", "four", "off")]
    served.engine.execute(make_plan(1, new=[planner.admit(job) for job in jobs]))
    # two: 0.7 and 0.3; scaled: 0.4; four: 0.5, -0.5, 1.5, and 1, which needs none; off: 0
    assert served.engine.num_scaled_columns == 7
    served.engine.execute(make_plan(2, freed=[job.row for job in jobs[:4]]))
    assert served.engine.num_scaled_columns == 7
    served.engine.execute(make_plan(3, freed=[job.row for job in jobs[4:]]))
    assert served.engine.num_scaled_columns == 0

"""Activated adapters (aLoRA) from their files through ingest, scheduler, wire and engine, as PEFT computes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from control_plane.errors import InvalidAdapter
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.versions.invocation import last_occurrence
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import Request, RequestId, Sampling
from data_plane.engine.build import build_engine
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.distributions import TOLERANCE
from tests.e2e.scheduled import ingested, serve
from tests.makers import make_adapter, make_checkpoint, make_prompt
from tests.oracle import MIN_GAP

pytestmark = [  # PEFT's, of LoRA biases: nothing is merged, and they are 1-D
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:Adapter '.*LoRA tensor"),
]
NUM_TOKENS = 6
INVOCATIONS = {"first": [201, 17, 202], "second": [33], "biased": [201, 17]}  # "plain" has none


class Truth:
    """PEFT with all adapters. `generate` finds the invocation tokens itself."""

    def __init__(self, checkpoint: Path, paths: dict[str, Path]) -> None:
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
        names = list(paths)
        self._model = PeftModel.from_pretrained(base, str(paths[names[0]]), adapter_name=names[0]).eval()
        for name in names[1:]:
            self._model.load_adapter(str(paths[name]), adapter_name=name)

    def generated(self, name: str | None, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the log-probabilities [tokens, vocabulary] that each was chosen from."""
        ids = torch.tensor([list(prompt)])
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        results = {"output_logits": True, "return_dict_in_generate": True}
        if name is None:
            with self._model.disable_adapter(), torch.no_grad():
                found = self._model.get_base_model().generate(**inputs, **options, **results)  # type: ignore[operator]  # every model has it
        else:
            self._model.set_adapter(name)
            with torch.no_grad():
                found = self._model.generate(**inputs, **options, **results)
        logits = torch.stack(found.logits).squeeze(1).double()
        return found.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1)


def prompt_of(name: str | None, seed: int, length: int) -> list[int]:
    """Half of the prompts have the invocation twice; the last one counts."""
    tokens = INVOCATIONS.get(name or "", [])
    body = make_prompt(seed, length)
    return [*body[:3], *(tokens if seed % 2 else []), *body[3:], *tokens, *make_prompt(seed + 50, seed % 3)]


# The arena holds two of the four adapters, and blocks are few: slots are used again, requests preempted by both ways.
SETTINGS = [
    (SchedulerSettings(swap_us_per_block=1e9, max_step_tokens=24), 0, 1),
    (SchedulerSettings(swap_us_per_block=0.0, max_step_tokens=24), 64, 1),
    (SchedulerSettings(policy=Policy.PREFILL_FIRST), 0, 4),
]


@pytest.mark.parametrize(("settings", "num_host_blocks", "max_steps"), SETTINGS)
def test_activated_adapters_have_the_distributions_of_peft_in_mixed_batches(
    settings: SchedulerSettings, num_host_blocks: int, max_steps: int, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    base_model = BaseModel.load(checkpoint)
    paths = {
        "first": make_adapter(tmp_path / "1", checkpoint, seed=1, alora_invocation_tokens=INVOCATIONS["first"]),
        "second": make_adapter(
            tmp_path / "2", checkpoint, seed=2, rank=5, rslora=True, alora_invocation_tokens=INVOCATIONS["second"]
        ),
        "biased": make_adapter(
            tmp_path / "3", checkpoint, seed=3, lora_bias=True, alora_invocation_tokens=INVOCATIONS["biased"]
        ),
        "plain": make_adapter(tmp_path / "4", checkpoint, seed=4),
    }
    adapters = {name: ingested(path, base_model) for name, path in paths.items()}
    assert {name: list(each.info.alora_invocation_tokens) for name, each in adapters.items()} == {
        "plain": [],
        **INVOCATIONS,
    }
    room = 2 * max(each.ref.arena_bytes for each in adapters.values())
    engine = build_engine(
        worker_config(
            checkpoint,
            arena_bytes=room,
            num_blocks=14,
            max_model_len=100,
            num_slots=2,
            host_kv_bytes=num_host_blocks << 14,
        )
    )
    truth, vocab_size = Truth(checkpoint, paths), engine.capacities.vocab_size
    requests, expected = [], []
    names: list[str | None] = [None, *adapters]
    for place, name in enumerate([*names, *names, *names]):
        prompt = prompt_of(name, place, 8 + 5 * (place % 4))
        start = last_occurrence(prompt, INVOCATIONS.get(name or "", []) or prompt)
        expected.append(truth.generated(name, prompt))
        requests.append(
            Request(
                RequestId(place),
                tuple(prompt),
                NUM_TOKENS,
                adapter=None if name is None else adapters[name].ref,
                active_from=start or 0,
                sampling=Sampling(temperature=0.0, num_logprobs=vocab_size),
                arrival_s=float(place),
                tenant=f"tenant {place % 2}",
            )
        )
    served, stats = serve(
        engine,
        requests,
        list(adapters.values()),
        settings,
        num_host_blocks=num_host_blocks and engine.capacities.num_host_blocks,
        max_steps=max_steps,
    )
    assert stats.num_preemptions > 0
    num_compared = 0
    for place, (tokens, logprobs) in enumerate(expected):
        for position, token in enumerate(tokens):
            entry = served[place, 0].logprobs[position]
            found = torch.full((vocab_size,), float("nan"), dtype=torch.float64)
            for token_id, logprob in entry.top:
                found[token_id] = logprob
            assert float((found - logprobs[position]).abs().max()) <= TOLERANCE, (place, position)
            top = logprobs[position].topk(2).values
            if float(top[0] - top[1]) < MIN_GAP:
                break  # rounding may choose another token
            assert served[place, 0].token_ids[position] == token
            num_compared += 1
    assert num_compared > len(requests) * NUM_TOKENS // 2


def test_the_prefix_is_shared_with_the_base_and_with_other_activated_adapters(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    base_model = BaseModel.load(checkpoint)
    paths = {
        name: make_adapter(
            tmp_path / name, checkpoint, seed=seed, alora_invocation_tokens=INVOCATIONS[name] if seed else None
        )
        for seed, name in enumerate(["plain", "first", "second"])
    }
    adapters = {name: ingested(path, base_model) for name, path in paths.items()}
    engine = build_engine(worker_config(checkpoint, num_blocks=60, block_size=4, max_model_len=100))
    shared = make_prompt(1, 32)
    truth = Truth(checkpoint, paths)
    step_tokens = 8
    settings = SchedulerSettings(max_step_tokens=step_tokens)

    def hits(*names: str | None) -> int:
        """Tokens from the prefix cache, of requests one behind the other."""
        requests = []
        for place, name in enumerate(names):
            prompt = [*shared, *INVOCATIONS.get(name or "", []), 7]
            requests.append(
                Request(
                    RequestId(place),
                    tuple(prompt),
                    NUM_TOKENS,
                    adapter=None if name is None else adapters[name].ref,
                    active_from=len(shared) if name in INVOCATIONS else 0,
                    sampling=Sampling(temperature=0.0),
                    arrival_s=float(place),
                )
            )
        served, stats = serve(engine, requests, list(adapters.values()), settings)
        for place, name in enumerate(names):
            assert served[place, 0].token_ids == truth.generated(name, requests[place].prompt_token_ids)[0]
        return stats.prefix_hit_tokens

    least = len(shared) - step_tokens  # the last step of the request before may be under way
    assert hits(None, "first") >= least
    assert hits("first", None) >= least
    assert hits(None, "first", "second") >= 2 * least
    assert hits(None, "plain") == hits("plain", "first") == 0, "an adapter that acts on all tokens has keys of its own"


def test_a_new_version_shares_the_prefix_and_nothing_behind_its_tokens(tmp_path: Path) -> None:
    """One slot, so each version takes the slot of the one before it; the prompts are equal."""
    checkpoint, tokens = make_checkpoint(tmp_path / "model", "llama"), [33]
    base_model = BaseModel.load(checkpoint)
    paths = {
        name: make_adapter(tmp_path / name, checkpoint, seed=seed, alora_invocation_tokens=tokens)
        for seed, name in enumerate(["old", "new"])
    }
    adapters = {name: ingested(path, base_model) for name, path in paths.items()}
    engine = build_engine(worker_config(checkpoint, num_blocks=60, block_size=4, max_model_len=100, num_slots=1))
    shared = make_prompt(1, 24)
    prompt = [*shared, *tokens, *make_prompt(2, 20)]
    order = ["old", "new", "old"]
    requests = [
        Request(
            RequestId(place),
            tuple(prompt),
            NUM_TOKENS,
            adapter=adapters[name].ref,
            active_from=len(shared),
            sampling=Sampling(temperature=0.0),
            arrival_s=float(place),
        )
        for place, name in enumerate(order)
    ]
    served, stats = serve(engine, requests, list(adapters.values()), SchedulerSettings(max_step_tokens=8))
    truth = Truth(checkpoint, paths)
    expected = {name: truth.generated(name, prompt)[0] for name in paths}
    assert expected["old"] != expected["new"]
    assert [served[place, 0].token_ids for place in range(len(order))] == [expected[name] for name in order]
    # The third request may find all of the first one's prompt; the second finds the prefix alone.
    assert len(shared) <= stats.prefix_hit_tokens <= len(shared) + len(prompt)


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers")
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"targets": ["q_proj", "embed_tokens"]}, "LoRA on the embedding"),
        ({"targets": ["q_proj", "lm_head"]}, "LoRA on the head"),
        ({"targets": ["q_proj"], "trainable_token_indices": [7]}, "rows of its own"),
        ({"targets": ["q_proj"], "modules_to_save": ["lm_head"]}, "rows of its own"),
    ],
)
def test_activated_adapters_on_embedding_head_and_rows_are_refused_by_name(
    form: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    path = make_adapter(tmp_path / "adapter", checkpoint, **form)
    ingested(path, BaseModel.load(checkpoint))
    config = json.loads((path / "adapter_config.json").read_text()) | {"alora_invocation_tokens": [5]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidAdapter, match=f"alora_invocation_tokens: is set, and the adapter has {words}"):
        ingested(path, BaseModel.load(checkpoint))

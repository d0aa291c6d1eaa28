"""Combined and activated adapters through the scheduler, the plan's wire form and the real engine, as PEFT has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import (
    AdapterRef,
    AdapterUse,
    Combination,
    Composition,
    Request,
    RequestId,
    Sampling,
)
from data_plane.engine.build import build_engine
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import ingested, serve
from tests.makers import make_adapter, make_checkpoint, make_prompt
from tests.oracle import Oracle

NUM_TOKENS = 8
INVOCATION = [201, 17, 202]
# The arena holds two of the three adapters; blocks are few, so requests are preempted, by both ways.
SETTINGS = [
    (SchedulerSettings(swap_us_per_block=1e9), 0, 1),
    (SchedulerSettings(swap_us_per_block=0.0), 64, 1),
    (SchedulerSettings(policy=Policy.PREFILL_FIRST), 0, 4),
]


@pytest.mark.parametrize(("settings", "num_host_blocks", "max_steps"), SETTINGS)
def test_combinations_generate_as_peft_over_eviction_and_preemption(
    settings: SchedulerSettings, num_host_blocks: int, max_steps: int, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    base_model = BaseModel.load(checkpoint)
    paths = {name: make_adapter(tmp_path / name, checkpoint, seed=seed) for seed, name in enumerate("abc")}
    adapters = {name: ingested(path, base_model) for name, path in paths.items()}
    refs = {name: AdapterRef(each.info.digest, each.info.arena_bytes) for name, each in adapters.items()}
    room = 2 * max(ref.arena_bytes for ref in refs.values())
    engine = build_engine(
        worker_config(
            checkpoint,
            arena_bytes=room,
            num_blocks=14,
            max_model_len=100,
            num_slots=3,
            host_kv_bytes=num_host_blocks << 14,
        )
    )
    oracle = Oracle(checkpoint, paths)
    combined: dict[str, tuple[Combination, dict[str, float]]] = {
        "ab": (Combination.CAT, {"a": 0.7, "b": 0.5}),
        "bc": (Combination.LINEAR, {"c": 0.6, "b": -0.9}),
        "ca": (Combination.LINEAR, {"a": 1.0, "c": 0.3}),
        "scaled": (Combination.CAT, {"b": 0.5}),
    }
    for name, (combination, scales) in combined.items():
        oracle.combine(name, scales, combination.value)
    requests, truth = [], {}
    order: list[str | None] = [*combined, "a", None, *combined, "c", *combined]
    for place, chosen in enumerate(order):
        prompt = make_prompt(place, 5 + 4 * (place % 5))
        completion = oracle.greedy(prompt, NUM_TOKENS, chosen)
        composition = None
        if chosen is not None and chosen in combined:
            combination, scales = combined[chosen]
            composition = Composition(tuple(AdapterUse(refs[each], s) for each, s in scales.items()), combination)
        requests.append(
            Request(
                RequestId(place),
                tuple(prompt),
                NUM_TOKENS,
                adapter=composition.uses[0].ref if composition else refs[chosen] if chosen else None,
                composition=composition,
                sampling=Sampling(temperature=0.0),
                arrival_s=float(place),
                tenant=f"tenant {place % 2}",
            )
        )
        truth[place] = completion
    served, stats = serve(
        engine,
        requests,
        list(adapters.values()),
        settings,
        num_host_blocks=num_host_blocks and engine.capacities.num_host_blocks,
        max_steps=max_steps,
    )
    assert stats.num_preemptions > 0
    decisive = [place for place, completion in truth.items() if completion.is_decisive]
    assert len(decisive) > len(truth) // 2
    for place in decisive:
        assert served[place, 0].token_ids == truth[place].token_ids, requests[place].composition


def test_an_activated_adapter_generates_as_peft_and_shares_the_prefix(tmp_path: Path) -> None:
    """Mixed with plain adapters and the base, in chunks."""
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    path = make_adapter(tmp_path / "plain", checkpoint, seed=3)
    adapter = ingested(path, BaseModel.load(checkpoint))
    ref = AdapterRef(adapter.info.digest, adapter.info.arena_bytes)
    config = json.loads((path / "adapter_config.json").read_text()) | {"alora_invocation_tokens": INVOCATION}
    (path / "adapter_config.json").write_text(json.dumps(config))
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    activated = PeftModel.from_pretrained(base, str(path)).eval()
    shared = make_prompt(1, 29)
    prompts = [
        [*shared, *INVOCATION, 5, 6],
        [*shared[:3], *INVOCATION, *shared[3:], *INVOCATION],  # the last occurrence counts
        [*INVOCATION, 9, 10],
        [*shared, *INVOCATION, 8],
    ]
    truth = [
        activated.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    engine = build_engine(worker_config(checkpoint, num_blocks=40, block_size=4, max_model_len=100))
    settings = SchedulerSettings(max_step_tokens=9)
    requests = [Request(RequestId(0), tuple(shared), 2, sampling=Sampling(temperature=0.0))]
    for index, prompt in enumerate(prompts):
        active_from = (
            len(prompt)
            - 1
            - next(at for at in range(len(prompt)) if prompt[len(prompt) - 1 - at :][: len(INVOCATION)] == INVOCATION)
        )
        requests.append(
            Request(
                RequestId(index + 1),
                tuple(prompt),
                NUM_TOKENS,
                adapter=ref,
                active_from=active_from,
                sampling=Sampling(temperature=0.0),
                arrival_s=float(index + 1),
            )
        )
    served, stats = serve(engine, requests, [adapter], settings)
    for index, expected in enumerate(truth):
        assert served[index + 1, 0].token_ids == expected, index
    assert stats.prefix_hit_tokens > 0

"""Versions that a training run pushes from memory, against PEFT on the same checkpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from motet import Client, InvalidArgument, PushedVersion
from safetensors.torch import load_file

from tests.e2e.harness import System, active_version
from tests.e2e.traffic import prompts
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

PROMPT = list(prompts([9], vocab_size=256, seed=3)[0])
NUM_TOKENS = 8
STEPS = ("step-1", "step-2", "step-3")
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "64", "--max-rows", "8"]
WORKER_FLAGS += ["--max-model-len", "64", "--num-slots", "4", "--arena-bytes", "64MiB"]


@dataclass(frozen=True)
class Trained:
    """A running system with one worker, and adapters as three steps of a training run left them."""

    system: System
    client: Client
    oracle: Oracle
    directories: dict[str, Path]

    def push(self, step: str, name: str = "policy") -> PushedVersion:
        directory = self.directories[step]
        config = json.loads((directory / "adapter_config.json").read_text("utf-8"))
        return self.client.adapters.push(name, config, load_file(directory / "adapter_model.safetensors"))

    def tokens(self, adapter: str, **options: Any) -> list[int]:
        stream = self.client.generate(
            PROMPT, adapter=adapter, max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=120.0, **options
        )
        return list(stream.result().completions[0].token_ids)

    def expected(self, step: str) -> list[int]:
        return list(self.oracle.greedy(PROMPT, NUM_TOKENS, step).token_ids)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    directory = tmp_path_factory.mktemp("push")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    directories = {
        step: make_adapter(directory / step, checkpoint, rank=4, targets=["q_proj", "down_proj"], seed=seed)
        for seed, step in enumerate(STEPS)
    }
    with System(checkpoint, directory) as system:
        system.start_worker(flags=WORKER_FLAGS)
        yield Trained(system, system.client(), Oracle(checkpoint, directories), directories)


@pytest.mark.slow
def test_each_push_is_what_new_requests_get_and_a_running_stream_keeps_its_version(trained: Trained) -> None:
    assert len({tuple(trained.expected(step)) for step in STEPS}) == 3
    first = trained.push("step-1")
    assert first.num_workers == 1 and active_version(first.adapter).number == 1
    assert 0 < first.receive_s + first.pack_s + first.cache_s + first.load_s <= first.visible_s + 1e-3
    assert first.visible_s <= first.durable_s
    assert trained.tokens("policy") == trained.expected("step-1")
    stream = trained.client.generate(PROMPT, adapter="policy", max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=120.0)
    chunks = iter(stream)
    next(chunks)
    for step in STEPS[1:]:
        pushed = trained.push(step)
        assert pushed.num_workers == 1, "it goes where the version before it is"
        assert trained.tokens("policy") == trained.expected(step)
    for _ in chunks:
        pass
    assert list(stream.result().completions[0].token_ids) == trained.expected("step-1")
    assert trained.tokens("policy", adapter_digest=active_version(first.adapter).digest) == trained.expected("step-1")


@pytest.mark.slow
def test_a_push_is_the_version_that_an_upload_of_the_same_files_is_and_survives_a_restart(trained: Trained) -> None:
    uploaded = trained.client.adapters.register("uploaded", trained.directories["step-2"])
    pushed = trained.push("step-2", "pushed")
    assert active_version(pushed.adapter).digest == active_version(uploaded).digest
    again = trained.push("step-2", "pushed")
    assert active_version(again.adapter).number == 1 and len(list(trained.client.adapters.versions("pushed"))) == 1
    trained.system.control_plane.kill()
    trained.system.start_control_plane()
    assert active_version(trained.client.adapters.get("pushed")).digest == active_version(pushed.adapter).digest
    assert trained.tokens("pushed") == trained.expected("step-2")


@pytest.mark.slow
def test_a_push_that_is_refused_changes_nothing_and_names_what_is_wrong(trained: Trained) -> None:
    trained.push("step-1", "kept")
    weights = load_file(trained.directories["step-2"] / "adapter_model.safetensors")
    config = json.loads((trained.directories["step-2"] / "adapter_config.json").read_text("utf-8"))
    name = next(iter(weights))
    with pytest.raises(InvalidArgument, match="NaN"):
        trained.client.adapters.push("kept", config, {**weights, name: weights[name] * float("nan")})
    with pytest.raises(InvalidArgument, match=r"header\.adapter_id"):
        trained.client.adapters.push("no such/name", config, weights)
    with pytest.raises(InvalidArgument, match="int64"):
        trained.client.adapters.push("kept", config, {name: weights[name].long()})
    with pytest.raises(InvalidArgument, match="empty"):
        trained.client.adapters.push("kept", config, {})
    assert trained.tokens("kept") == trained.expected("step-1")


@pytest.mark.slow
def test_pushes_of_two_runs_at_once_are_both_served(trained: Trained) -> None:
    threads = [threading.Thread(target=trained.push, args=(step, f"run-{step}")) for step in STEPS[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in STEPS[:2]:
        assert trained.tokens(f"run-{step}") == trained.expected(step)

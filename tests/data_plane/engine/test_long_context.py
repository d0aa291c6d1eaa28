"""Long-context adapters rotate by tables of their own, and nobody else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import CONFIG_FILE
from control_plane.scheduler.errors import ContextNeverFits
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import AdapterRef, Request, RequestId
from data_plane.engine.build import build_engine
from data_plane.errors import AdapterMismatch, ConfigError
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.distributions import check_distributions
from tests.e2e.scheduled import IngestedAdapter, ingested, serve
from tests.makers import make_adapter, make_checkpoint, make_prompt
from tests.oracle import Oracle

PROMPTS = [make_prompt(seed, length) for seed, length in enumerate((1, 9, 40))]
ORIGINAL = {"original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear of another factor": {"rope_type": "linear", "factor": 8.0},
    "another base": {"rope_type": "default", "rope_theta": 5e5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
}


def scaled_checkpoint(directory: Path, checkpoint: Path, parameters: Mapping[str, Any]) -> Path:
    """The same weights with another rotary embedding: what the adapter was trained on."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    own = {name: value for name, value in config["rope_parameters"].items() if name != "rope_type"}
    config["rope_parameters"] = own | dict(parameters)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def with_fields(directory: Path, source: Path, **fields: Any) -> Path:
    """A copy of an adapter whose configuration has further fields."""
    shutil.copytree(source, directory)
    config = json.loads((directory / CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps(config | fields))
    return directory


def check_scalings(directory: Path, arch: str, names: list[str]) -> None:
    checkpoint = make_checkpoint(directory / "model", arch)
    base_model = BaseModel.load(checkpoint)
    plain = make_adapter(directory / "plain", checkpoint, seed=1)
    oracles: dict[str | None, Oracle] = {None: Oracle(checkpoint, {"plain": plain})}
    oracles["plain"] = oracles[None]
    adapters = {"plain": ingested(plain, base_model)}
    for number, name in enumerate(names):
        trained = make_adapter(directory / f"trained {number}", checkpoint, seed=2 + number % 2, scale_b=0.2)
        oracles[name] = Oracle(
            scaled_checkpoint(directory / f"scaled {number}", checkpoint, SCALINGS[name]), {name: trained}
        )
        served = with_fields(directory / f"served {number}", trained, rope_scaling=SCALINGS[name])
        adapters[name] = ingested(served, base_model)
    engine = build_engine(worker_config(checkpoint))
    logits = {name: oracles[name].logits(PROMPTS[2], name if name in adapters else None) for name in [None, *adapters]}
    for name in names:  # the scaling matters: the adapter alone gives other logits
        alone = Oracle(checkpoint, {"alone": directory / f"trained {names.index(name)}"}).logits(PROMPTS[2], "alone")
        assert float((alone - logits[name]).abs().max()) > 0.01, name
    check_distributions(engine, adapters, lambda name, ids: oracles[name].logits(ids, name), PROMPTS)


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("llama", list(SCALINGS)),
        ("phi", ["linear", "another base"]),  # rotates half of a head
        ("gpt_neox", ["linear", "yarn"]),
        ("qwen3", ["linear", "llama3"]),  # norms its heads
        ("mixtral", ["linear"]),
    ],
)
def test_tokens_and_logits_are_those_of_the_model_with_that_scaling(
    tmp_path: Path, arch: str, names: list[str]
) -> None:
    check_scalings(tmp_path, arch, names)


def test_a_slot_that_is_used_again_has_the_models_rotation(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    base_model = BaseModel.load(checkpoint)
    plain = make_adapter(tmp_path / "plain", checkpoint)
    long = with_fields(tmp_path / "long", plain, context_length=2048)
    adapters: dict[str, IngestedAdapter] = {"plain": ingested(plain, base_model), "long": ingested(long, base_model)}
    assert adapters["long"].info.context_length == 2048
    assert adapters["long"].info.digest != adapters["plain"].info.digest
    engine = build_engine(worker_config(checkpoint))

    def tokens(name: str, generation: int) -> list[int]:
        engine.slots.load(0, generation, adapters[name].info.digest, adapters[name])
        job = Job(PROMPTS[2], 8, 0, generation)
        Planner(engine, chunk=7).run([job])
        engine.slots.evict(0, generation)
        return job.tokens

    found = [tokens(name, generation) for generation, name in enumerate(("plain", "long", "plain"), 1)]
    assert found[0] == found[2] != found[1]


def test_a_model_without_a_rotary_embedding_refuses_such_an_adapter(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "gemma3")  # its layers rotate in two ways
    adapter = ingested(make_adapter(tmp_path / "plain", checkpoint), BaseModel.load(checkpoint))
    document = json.loads(adapter.info.manifest) | {
        "rope": {"context_length": 2048, "parameters": {"rope_type": "linear", "factor": 4.0}}
    }
    manifest = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    engine = build_engine(worker_config(checkpoint))
    digest = sha256(manifest).hexdigest()

    class Source:
        def open(self, _: str) -> Any:
            return manifest, iter(adapter.chunks)

    with pytest.raises(AdapterMismatch, match="rotate in several ways"):
        engine.slots.load(0, 1, digest, Source())
    assert engine.slots.used_bytes() == 0


def test_requests_may_be_as_long_as_the_adapter_was_trained_for(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", max_position_embeddings=64)
    base_model = BaseModel.load(checkpoint)
    plain = make_adapter(tmp_path / "plain", checkpoint, scale_b=0.2)
    long = ingested(with_fields(tmp_path / "long", plain, context_length=256), base_model)
    scaled = scaled_checkpoint(tmp_path / "scaled", checkpoint, {"rope_type": "linear", "factor": 4.0})
    oracle = Oracle(scaled, {"long": plain})
    engine = build_engine(worker_config(checkpoint, max_model_len=64, max_adapter_model_len=200))
    assert (engine.capacities.max_model_len, engine.capacities.max_adapter_model_len) == (64, 200)
    prompt = make_prompt(3, 190)
    (served,) = serve(engine, [request(prompt, 10, long.ref)], [long], SchedulerSettings())[0].values()
    assert oracle.num_agreed(prompt, served.token_ids, "long") >= 5
    with pytest.raises(ContextNeverFits, match="200 tokens"):
        serve(engine, [request(prompt, 11, long.ref)], [long], SchedulerSettings())
    for adapter in (None, ingested(plain, base_model).ref):
        with pytest.raises(ContextNeverFits, match="64 tokens"):
            serve(engine, [request(prompt[:60], 5, adapter)], [], SchedulerSettings())


def test_a_model_that_cannot_scale_refuses_the_flag(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "gpt2")
    with pytest.raises(ConfigError, match="--max-adapter-model-len: this model has no rotary embedding"):
        build_engine(worker_config(checkpoint, max_adapter_model_len=600))


def request(prompt: list[int], max_tokens: int, adapter: AdapterRef | None) -> Request:
    return Request(request_id=RequestId(1), prompt_token_ids=tuple(prompt), max_tokens=max_tokens, adapter=adapter)

"""What the verifying process computes of adapters of every kind, against PEFT on the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from contract.fingerprint import NOT_QUANTIZED
from control_plane.adapters.verifier import largest_difference, tolerance_of
from control_plane.registry.model.base_model import BaseModel
from data_plane import verify
from data_plane.engine.build import build_engine
from tests.data_plane.engine import expert_files
from tests.data_plane.engine.test_fp8_weights import rounding
from tests.data_plane.engine.test_long_context import SCALINGS, scaled_checkpoint, with_fields
from tests.data_plane.engine.test_oracle import worker_config
from tests.data_plane.engine.test_token_rows import FORMS, FORMS_OF_MODELS, TIED_ONLY, WARNINGS, PeftModelOf, make_form
from tests.data_plane.models.checkpoint.write_fixtures import EXPECTED, FIXTURES, PROMPT as FIXTURE_PROMPT
from tests.e2e.scheduled import IngestedAdapter, ingested, reported_by
from tests.e2e.test_scheduled_activation import Truth
from tests.makers import make_adapter, make_checkpoint, make_classifier, make_prompt
from tests.oracle import Oracle

pytestmark = pytest.mark.filterwarnings(
    *WARNINGS,
    "ignore:.*have invalid shape",
    "ignore:Setting `save_embedding_layers`",
)
TOLERANCE = 2e-4  # of a log-probability: sums of another order over two layers
PROMPT = make_prompt(7, 21, vocab_size=250)
Logits = Callable[[Sequence[int]], torch.Tensor]


def merged(
    directory: Path,
    checkpoint: Path,
    adapter: IngestedAdapter,
    *prompts: tuple[Sequence[int], int],
    quantization: str = NOT_QUANTIZED,
) -> Any:
    """The result of the process for prompts, each with the tokens before those on which the adapter acts."""
    directory.mkdir()
    (directory / "manifest.json").write_bytes(adapter.info.manifest)
    for index, chunk in enumerate(adapter.chunks):
        (directory / str(index)).write_bytes(chunk)
    described = [{"token_ids": list(ids), "active_from": active_from} for ids, active_from in prompts]
    (directory / "prompts.json").write_text(json.dumps(described))
    assert verify.main([str(checkpoint), str(directory), quantization]) == 0
    return json.loads((directory / "result.json").read_text())


def expected(logits: torch.Tensor, token_ids: Sequence[int]) -> list[float]:
    rows = logits[:-1].double().log_softmax(-1)
    found: list[float] = rows.gather(1, torch.tensor(list(token_ids[1:]))[:, None]).flatten().tolist()
    return found


def close(values: list[float]) -> object:
    return pytest.approx(values, abs=TOLERANCE)


def of_checkpoint(checkpoint: Path) -> Logits:
    return PeftModelOf(checkpoint, None).logits


@pytest.mark.parametrize(
    ("arch", "is_tied", "form"),
    FORMS_OF_MODELS,
)
def test_rows_of_embedding_and_head_are_merged(arch: str, is_tied: bool, form: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", arch, tie_word_embeddings=is_tied)
    fields = (FORMS | TIED_ONLY)[form]
    path = make_form(tmp_path / "adapter", checkpoint, **fields)
    prompt = list(PROMPT)
    for place, token_id in enumerate([5, 9, 7, *range(256, fields.get("resize", 256))]):
        prompt[2 * place + 1] = token_id
    result = merged(tmp_path / "work", checkpoint, ingested(path, BaseModel.load(checkpoint)), (prompt, 0))
    assert result["merged"][0] == close(
        expected(PeftModelOf(checkpoint, path, fields.get("resize")).logits(prompt), prompt)
    )
    known = [token_id % 256 for token_id in prompt]
    assert result["base"][0] == close(expected(of_checkpoint(checkpoint)(known), known))


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_experts_and_routers_are_merged(arch: str, is_fused: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", arch)
    modules = reported_by(build_engine(worker_config(checkpoint)))
    path, of_truth = expert_files.adapter_and_truth(tmp_path, checkpoint, is_fused=is_fused)
    truth = PeftModelOf(*of_truth).logits(PROMPT)
    adapter = ingested(path, BaseModel.load(checkpoint), modules)
    assert any(".experts." in name for name in adapter.info.target_modules)
    result = merged(tmp_path / "work", checkpoint, adapter, (PROMPT, 0))
    assert result["merged"][0] == close(expected(truth, PROMPT))
    assert result["merged"][0] != close(result["base"][0])


@pytest.mark.parametrize("name", SCALINGS)
def test_an_adapter_rotates_as_it_was_trained(name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    trained = make_adapter(tmp_path / "trained", checkpoint, scale_b=0.2)
    served = with_fields(tmp_path / "served", trained, rope_scaling=SCALINGS[name])
    result = merged(tmp_path / "work", checkpoint, ingested(served, BaseModel.load(checkpoint)), (PROMPT, 0))
    scaled = scaled_checkpoint(tmp_path / "scaled", checkpoint, SCALINGS[name])
    assert result["merged"][0] == close(expected(PeftModelOf(scaled, trained).logits(PROMPT), PROMPT))
    assert result["merged"][0] != close(expected(PeftModelOf(checkpoint, trained).logits(PROMPT), PROMPT))


def test_an_activated_adapter_acts_from_its_invocation_tokens_on(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    invocation = [201, 17]
    path = make_adapter(tmp_path / "adapter", checkpoint, alora_invocation_tokens=invocation)
    prompts = [[*PROMPT[:9], *invocation, *PROMPT[9:]], [*invocation, *PROMPT]]
    adapter = ingested(path, BaseModel.load(checkpoint))
    result = merged(tmp_path / "work", checkpoint, adapter, (prompts[0], 9), (prompts[1], 0))
    truth = Truth(checkpoint, {"activated": path})
    for prompt, found in zip(prompts, result["merged"], strict=True):
        # PEFT's generate finds the invocation tokens; what follows the last token is what it says of all before.
        for end in (len(prompt) - 1, len(prompt) - 3):
            _, logprobs = truth.generated("activated", prompt[:end])
            assert found[end - 1] == pytest.approx(float(logprobs[0, prompt[end]]), abs=TOLERANCE)
    assert result["merged"][0][:8] == close(result["base"][0][:8])


@pytest.mark.parametrize("form", ["nf4_double", "compressed"])
def test_an_adapter_is_merged_into_dequantised_weights(form: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / form
    adapter = ingested(checkpoint / "adapter", BaseModel.load(checkpoint, "float32"))
    result = merged(tmp_path / "work", checkpoint, adapter, (FIXTURE_PROMPT, 0))
    truth = load_file(checkpoint / EXPECTED)
    assert result["base"][0] == close(expected(truth["base"], FIXTURE_PROMPT))
    assert result["merged"][0] == close(expected(truth["adapter"], FIXTURE_PROMPT))


def test_a_score_head_is_left_out_and_its_adapter_merged(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    path = make_classifier(tmp_path / "adapter", checkpoint, target_modules=["q_proj"])
    result = merged(tmp_path / "work", checkpoint, ingested(path, BaseModel.load(checkpoint)), (PROMPT, 0))
    assert result["merged"][0] != close(result["base"][0])


def test_what_cannot_be_merged_is_refused_by_name_and_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    adapter = ingested(make_adapter(tmp_path / "adapter", checkpoint), BaseModel.load(checkpoint))
    small = AutoModelForCausalLM.from_pretrained(checkpoint)
    del small.model.layers[1].self_attn.q_proj
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: small)
    monkeypatch.setattr(verify, "logprobs", lambda *_, **__: [])
    directory = tmp_path / "work"
    with pytest.raises(AssertionError):
        merged(directory, checkpoint, adapter, (PROMPT, 0))
    refusal = (directory / "refusal.txt").read_text()
    assert refusal.startswith("model.layers.1.self_attn.q_proj is not a module") and str(tmp_path) not in refusal


@pytest.mark.parametrize("form", ["lora", "dora"])
def test_over_fp8_weights_the_adapter_is_added_to_what_the_codes_stand_for(form: str, tmp_path: Path) -> None:
    """Against PEFT on rounded weights. What is served has rounded inputs too, and lies within the tolerance."""
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    path = make_adapter(tmp_path / form, checkpoint, rank=8, seed=1, use_dora=form == "dora")
    linears = [
        f"model.layers.{layer}.{name}_proj"
        for layer in range(2)
        for name in (*(f"self_attn.{one}" for one in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
    ]
    exact, served = (
        Oracle(checkpoint, {form: path}, prepare=rounding(linears, of_inputs=of_inputs)) for of_inputs in (False, True)
    )
    adapter = ingested(path, BaseModel.load(checkpoint))
    result = merged(tmp_path / "work", checkpoint, adapter, (PROMPT, 0), quantization="fp8")
    plain = merged(tmp_path / "plain", checkpoint, adapter, (PROMPT, 0))
    assert result["base"][0] == close(expected(exact.logits(PROMPT), PROMPT))
    assert result["merged"][0] == close(expected(exact.logits(PROMPT, form), PROMPT))
    base = largest_difference([expected(served.logits(PROMPT), PROMPT)], result["base"])
    assert result["base_rounded"][0] == close(expected(served.logits(PROMPT), PROMPT))
    assert (plain["base_rounded"], plain["merged_rounded"]) == (plain["base"], plain["merged"])
    roundings = [largest_difference(result[f"{name}_rounded"], result[name]) for name in ("base", "merged")]
    tolerance = tolerance_of("float32", base, base_rounding=roundings[0], rounding=roundings[1])
    error = largest_difference([expected(served.logits(PROMPT, form), PROMPT)], result["merged"])
    assert error <= tolerance < largest_difference(result["base"], result["merged"])
    # The rounding of weights, which is not a mistake of the adapter's serving, is not in the error.
    assert base < largest_difference([expected(served.logits(PROMPT), PROMPT)], plain["base"])

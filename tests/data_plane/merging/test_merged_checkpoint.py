"""`motet convert merge` writes what PEFT's merge_and_unload gives, and transformers and Motet serve it as a base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from motet.cli.exits import OK, REFUSED
from motet.cli.main import main
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data_plane.engine.build import build_engine
from data_plane.merging import checkpoint as merging
from data_plane.models.checkpoint.shards import Shard, StoredTensor, write_shard
from tests.data_plane.engine import expert_files
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.data_plane.engine.test_token_rows import (
    BOTH,
    FORMS,
    FORMS_OF_MODELS,
    TIED_ONLY,
    WARNINGS,
    PeftModelOf,
    make_form,
)
from tests.data_plane.models.checkpoint.write_fixtures import FIXTURES
from tests.makers import make_adapter, make_checkpoint, make_classifier, make_prompt

pytestmark = pytest.mark.filterwarnings(
    *WARNINGS,
    "ignore:Setting `save_embedding_layers`",
    "ignore:.*fan_in_fan_out",
    "ignore:.*the targeted layer of type Linear has no bias",
    "ignore:.*have invalid shape",
)
PROMPT = make_prompt(7, 21, vocab_size=250)
# Of float32 weights up to about 1, and of logits up to about 10: sums in another order.
WEIGHT_ERROR, LOGIT_ERROR = 2e-6, 2e-3


def merge(adapter: Path, base: Path, out: Path) -> int:
    return main(["convert", "merge", str(adapter), str(out), "--base-model", str(base)])


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def merged_by_peft(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    from peft import PeftModel

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()


def logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(input_ids=torch.tensor([prompt])).logits[0].float()
    return found


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("llama", {}),
    "rsLoRA": ("mistral", {"rslora": True}),
    "ranks": ("llama", {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 5.0}}),
    "DoRA": ("llama", {"use_dora": True}),
    "LoRA bias": ("qwen2", {"targets": ["q_proj", "v_proj"], "lora_bias": True}),
    "trained biases": ("qwen2", {"targets": ["q_proj", "up_proj"], "bias": "lora_only"}),
    "all biases": ("opt", {"targets": ["fc1"], "bias": "lora_only"}),
    "fan in, fan out": ("gpt2", {"targets": ["c_attn", "c_proj"]}),
    "DoRA on Conv1D": ("gpt2", {"targets": ["c_attn"], "use_dora": True}),
    "embedding and head": ("llama", {"targets": ["q_proj", *BOTH]}),
    "DoRA on embedding": ("llama", {"targets": ["q_proj", "embed_tokens"], "use_dora": True}),
    "both saved": ("llama", {"targets": ["q_proj"], "modules_to_save": BOTH}),
    "tokens": ("llama", {"targets": ["q_proj"], "trainable_token_indices": {"embed_tokens": [9, 5], "lm_head": [7]}}),
    "fused linears": ("phi3", {}),
    "one linear of query, key and value": ("gpt_neox", {"targets": ["query_key_value", "lm_head"]}),
    "factors": ("granite", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_that_of_pefts_merge(kind: str, tmp_path: Path) -> None:
    arch, fields = KINDS[kind]
    sizes: dict[str, Any] = {} if arch == "gpt2" else {"tie_word_embeddings": False}
    base = make_checkpoint(tmp_path / "base", arch, **sizes)
    adapter = make_adapter(tmp_path / "adapter", base, **fields)
    assert merge(adapter, base, tmp_path / "out") == OK
    expected, before = merged_by_peft(base, adapter), AutoModelForCausalLM.from_pretrained(base)
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    of_peft, of_base = expected.state_dict(), before.state_dict()
    changed = 0
    for name, weight in found.state_dict().items():
        torch.testing.assert_close(weight, of_peft[name], rtol=0, atol=WEIGHT_ERROR, msg=name)
        if torch.equal(of_peft[name], of_base[name]):
            assert torch.equal(weight, of_base[name]), f"{name} is not one that the adapter changes"
        changed += not torch.equal(weight, of_base[name])
    assert changed
    assert logits(found, PROMPT) == pytest.approx(logits(expected, PROMPT), abs=LOGIT_ERROR)


@pytest.mark.parametrize(
    ("arch", "is_tied", "form"),
    FORMS_OF_MODELS,
)
def test_rows_and_vocabularies_are_those_of_the_adapter(arch: str, is_tied: bool, form: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", arch, tie_word_embeddings=is_tied)
    fields = (FORMS | TIED_ONLY)[form]
    adapter = make_form(tmp_path / "adapter", base, **fields)
    assert merge(adapter, base, tmp_path / "out") == OK
    prompt, size = list(PROMPT), fields.get("resize", 256)
    for place, token_id in enumerate([5, 9, 7, *range(256, size)]):
        prompt[2 * place + 1] = token_id
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.config.vocab_size == len(found.get_input_embeddings().weight) == size
    of_peft = PeftModelOf(base, adapter, fields.get("resize")).logits(prompt)
    assert logits(found, prompt) == pytest.approx(of_peft, abs=LOGIT_ERROR)
    names = tensors(tmp_path / "out").keys()
    assert ("lm_head.weight" in names) == (found.config.tie_word_embeddings is False)
    if form in ("plain", "resized", "tied"):
        assert found.config.tie_word_embeddings is is_tied, "both have the same rows"


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_experts_and_routers_are_merged(arch: str, is_fused: bool, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", arch)
    adapter, of_truth = expert_files.adapter_and_truth(tmp_path, base, is_fused=is_fused)
    truth = PeftModelOf(*of_truth).logits(PROMPT)
    assert merge(adapter, base, tmp_path / "out") == OK
    assert tensors(tmp_path / "out").keys() == tensors(base).keys()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert logits(found, PROMPT) == pytest.approx(truth, abs=LOGIT_ERROR)
    assert logits(found, PROMPT) != pytest.approx(PeftModelOf(base, None).logits(PROMPT), abs=10 * LOGIT_ERROR)


def test_an_adapter_on_a_router_is_merged(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3_moe")
    adapter = make_adapter(tmp_path / "adapter", base, targets=["q_proj"], target_parameters=["mlp.gate.weight"])
    assert merge(adapter, base, tmp_path / "out") == OK
    expected = merged_by_peft(base, adapter).model.layers[1].mlp.gate.weight
    torch.testing.assert_close(
        tensors(tmp_path / "out")["model.layers.1.mlp.gate.weight"], expected.data, rtol=0, atol=WEIGHT_ERROR
    )


def test_a_bfloat16_weight_is_the_exact_one_rounded_once(tmp_path: Path) -> None:
    base, rounded = make_checkpoint(tmp_path / "exact"), tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(rounded)
    adapter = make_adapter(tmp_path / "adapter", rounded)
    assert merge(adapter, rounded, tmp_path / "out") == OK
    name = "model.layers.0.self_attn.q_proj"
    weights, own = load_file(adapter / "adapter_model.safetensors"), tensors(rounded)[f"{name}.weight"]
    a, b = (weights[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    exact = own.double() + 2.0 * b @ a  # alpha 16 of rank 8
    found = tensors(tmp_path / "out")[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    assert (found == exact.to(torch.bfloat16)).float().mean() > 0.999  # the sums are float32 before they are rounded
    # PEFT rounds the product first, then the sum.
    of_peft = merged_by_peft(rounded, adapter, torch.bfloat16).model.layers[0].self_attn.q_proj.weight.double()
    assert (found.double() - exact).abs().max() <= (of_peft - exact).abs().max() < 2**-6


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
def test_motet_serves_the_result_as_a_base_model(arch: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", arch)
    adapter = make_adapter(tmp_path / "adapter", base, targets=["c_attn"] if arch == "gpt2" else "all-linear")
    assert merge(adapter, base, tmp_path / "out") == OK
    engine = build_engine(worker_config(tmp_path / "out"))
    jobs = [Job(make_prompt(seed, 9, vocab_size=250), 8) for seed in range(3)]
    Planner(engine, chunk=7).run(jobs)
    oracle = PeftModelOf(base, adapter)
    assert sum(oracle.check(job.prompt, job.tokens, arch) for job in jobs) >= 18


def test_files_and_shards_are_the_bases_and_the_adapters_own_take_their_place(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", max_shard_size="100KB")
    (base / "LICENSE.txt").write_text("licence")
    (base / "pytorch_model.bin").write_bytes(b"pickle")
    adapter = make_adapter(tmp_path / "adapter", base, targets=["q_proj"])
    (adapter / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert merge(adapter, base, tmp_path / "out") == OK
    left = {path.name for path in base.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == left | {"chat_template.jinja"}
    own = json.loads((base / "generation_config.json").read_text())
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == own | {"temperature": 0.25}
    indexes = [json.loads((place / "model.safetensors.index.json").read_text()) for place in (base, tmp_path / "out")]
    assert indexes[0]["weight_map"] == indexes[1]["weight_map"]
    assert indexes[0]["metadata"]["total_size"] == indexes[1]["metadata"]["total_size"]
    before, after = tensors(base), tensors(tmp_path / "out")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)
    }


def test_a_checkpoint_without_the_heads_prefix_is_merged(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "gpt2")
    adapter = make_adapter(tmp_path / "adapter", base, targets=["c_attn"])
    renamed = {name.removeprefix("transformer."): value for name, value in tensors(base).items()}
    save_file(renamed, base / "model.safetensors", {"format": "pt"})
    assert merge(adapter, base, tmp_path / "out") == OK
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert logits(found, PROMPT) == pytest.approx(PeftModelOf(base, adapter).logits(PROMPT), abs=LOGIT_ERROR)


def test_what_exists_is_never_written_over_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_checkpoint(tmp_path / "base", max_shard_size="100KB")
    adapter = make_adapter(tmp_path / "adapter", base)
    (tmp_path / "out").mkdir()
    assert merge(adapter, base, tmp_path / "out") == REFUSED
    assert "exists; name a directory that does not" in capsys.readouterr().err
    (tmp_path / "out").rmdir()
    written: list[Path] = []

    def full(path: Path, *arguments: Any) -> None:
        written.append(path)
        if len(written) == 3:
            raise OSError("no space left on device")
        write_shard(path, *arguments)

    monkeypatch.setattr(merging, "write_shard", full)
    with pytest.raises(OSError, match="no space left"):
        merge(adapter, base, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def _forms_that_cannot_be_merged(directory: Path, base: Path) -> Iterator[tuple[Path, str]]:
    yield (
        make_adapter(directory / "alora", base, targets=["q_proj"], alora_invocation_tokens=[3, 4]),
        "alora_invocation_tokens: an activated LoRA acts from these tokens on",
    )
    scaled = make_adapter(directory / "scaled", base, targets=["q_proj"])
    config = json.loads((scaled / "adapter_config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (scaled / "adapter_config.json").write_text(json.dumps(config))
    yield scaled, "rope_scaling: the adapter has its own rotary embedding"
    yield make_classifier(directory / "score", base, target_modules=["q_proj"]), "no place for a score head"
    yield (
        make_adapter(directory / "bias", base, targets=["q_proj"], lora_bias=True),
        "model.layers.0.self_attn.q_proj has a bias, and the base model has none there",
    )
    other = make_adapter(directory / "other", base, targets=["q_proj"])
    config = json.loads((other / "adapter_config.json").read_text()) | {"peft_type": "LOHA"}
    (other / "adapter_config.json").write_text(json.dumps(config))
    yield other, "peft_type"


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_checkpoint(tmp_path / "base")
    for adapter, words in _forms_that_cannot_be_merged(tmp_path / "adapters", base):
        assert merge(adapter, base, tmp_path / "out") == REFUSED, words
        assert words in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == {"base", "adapters"}


def test_a_value_that_the_bases_type_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, half = make_checkpoint(tmp_path / "base"), tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16).save_pretrained(half)
    adapter = make_adapter(tmp_path / "adapter", half, targets=["q_proj"], alpha=8, scale_b=1e7)
    assert merge(adapter, half, tmp_path / "out") == REFUSED
    assert "q_proj.weight: a merged value is not finite in the base's type F16" in capsys.readouterr().err


def test_a_quantised_base_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge(FIXTURES / "nf4" / "adapter", FIXTURES / "nf4", tmp_path / "out") == REFUSED
    assert "model.layers.0.mlp.down_proj.weight is quantised (U8)" in capsys.readouterr().err


def test_an_adapter_of_another_model_and_a_broken_base_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, other = make_checkpoint(tmp_path / "base"), make_checkpoint(tmp_path / "other", hidden_size=32)
    adapter = make_adapter(tmp_path / "adapter", base)
    assert merge(adapter, other, tmp_path / "out") == REFUSED
    assert "shape" in capsys.readouterr().err
    shutil.copytree(base, tmp_path / "cut")
    (tmp_path / "cut" / "config.json").unlink()
    assert merge(adapter, tmp_path / "cut", tmp_path / "out") == REFUSED
    assert "config.json" in capsys.readouterr().err


def test_a_written_file_is_what_the_library_writes(tmp_path: Path) -> None:
    content = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "a": torch.arange(3, dtype=torch.float32),
        "c": torch.tensor(7, dtype=torch.int64),
        "d": torch.zeros(0, 4),
        "e": torch.tensor([1, 2, 3], dtype=torch.uint8),
    }
    save_file(content, tmp_path / "theirs.safetensors", {"format": "pt"})
    shard = Shard(tmp_path / "theirs.safetensors")
    path = tmp_path / "ours.safetensors"
    write_shard(path, shard.tensors, shard.metadata, lambda tensor: shard.read(tensor.name))
    assert path.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert StoredTensor("b", "BF16", (2, 3)) in shard.tensors
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("b"), content["b"])

"""Checkpoints that load, and those that are refused by name before they compute wrongly."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data_plane.config import CPU_TOKEN_BUDGET
from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.layers.lora_linear import LoraLinear
from data_plane.models import loader
from data_plane.models.loader import LoadedModel, load_model
from data_plane.plan import TargetKind
from tests.makers import make_checkpoint

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def save(directory: Path, model_type: str, **settings: object) -> Path:
    """A random checkpoint of any model type that transformers knows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return directory


def load(directory: Path, dtype: str = "auto", **limits: Any) -> LoadedModel:
    return load_model(directory, dtype, torch.device("cpu"), max_step_tokens=CPU_TOKEN_BUDGET, **limits)


@pytest.mark.parametrize("is_tied", [False, True])
def test_every_linear_and_the_embedding_take_adapters(tmp_path: Path, is_tied: bool) -> None:
    loaded = load(make_checkpoint(tmp_path, "llama", tie_word_embeddings=is_tied))
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    kinds = {target.name: target.kind for target in loaded.targets()}
    assert kinds.pop("model.embed_tokens") is TargetKind.EMBEDDING
    assert kinds.pop("lm_head") is TargetKind.HEAD
    assert set(kinds.values()) == {TargetKind.LINEAR}
    assert kinds.keys() == {f"model.layers.{i}.self_attn.{p}" for i in range(2) for p in projections} | {
        f"model.layers.{i}.mlp.{p}" for i in range(2) for p in ("gate_proj", "up_proj", "down_proj")
    }
    assert (loaded.context_limit, loaded.probe.vocab_size, loaded.dtype) == (512, 256, torch.float32)


def test_router_that_is_a_linear_of_its_own_kind_is_left_alone(tmp_path: Path) -> None:
    """phimoe's derives from Linear, and its forward returns more than a product."""
    experts = {"num_local_experts": 4, "intermediate_size": 32, "num_key_value_heads": 4, "sliding_window": None}
    loaded = load(save(tmp_path, "phimoe", **SIZES, **experts, max_position_embeddings=64))
    router = loaded.model.get_submodule("model.layers.0.mlp.router")
    assert not isinstance(router, LoraLinear)
    assert not router.weight.is_meta
    assert [target.name for target in loaded.targets() if target.kind is TargetKind.LINEAR] == [
        f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in ("q", "k", "v", "o")
    ]


def test_sharded_checkpoint_with_tied_embeddings_loads_whole(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen2", max_shard_size="100KB", tie_word_embeddings=True)
    assert (checkpoint / "model.safetensors.index.json").is_file()
    loaded = load(checkpoint)
    model, base = loaded.model, loaded.base_weights()
    expected = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    # A DecoderStack holds all layers in the place of the first.
    named = ((name.replace("layers.0.layers.", "layers."), value) for name, value in model.state_dict().items())
    weights = {name: value for name, value in named if not value.is_meta}
    for target in loaded.targets():
        weight, bias = base.weight(target.name), base.bias(target.name)
        assert isinstance(weight, torch.Tensor) and weight.shape == (target.out_features, target.in_features)
        weights[f"{target.name}.weight"] = weight.T if target.kind is TargetKind.EMBEDDING else weight
        if bias is not None:
            weights[f"{target.name}.bias"] = bias
    assert {name: torch.equal(weights[name], tensor) for name, tensor in expected.items()} == dict.fromkeys(
        expected, True
    )
    head = model.get_output_embeddings()
    assert head.weight is model.get_input_embeddings().weight


def test_a_head_of_its_own_is_packed(tmp_path: Path) -> None:
    head = load(make_checkpoint(tmp_path, "llama")).model.get_output_embeddings()
    assert isinstance(head, LoraLinear)
    assert head.packed is not None
    assert [target.name for target in head.targets] == ["lm_head"]


@pytest.mark.parametrize(
    ("requested", "got"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_dtype_is_the_checkpoints_or_what_was_requested(tmp_path: Path, requested: str, got: torch.dtype) -> None:
    loaded = load(make_checkpoint(tmp_path, "llama"), requested)
    assert loaded.dtype == got
    assert loaded.model.get_input_embeddings().weight.dtype == got


@pytest.mark.parametrize(
    ("model_type", "settings", "says"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, "bloom: 0 of 2 layers .* ALiBi"),
        ("falcon", SIZES | {"alibi": True}, "falcon: ALiBi"),
        ("falcon", SIZES | {"alibi": False}, "falcon: its code does not call transformers' attention interface"),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64}, "mpt: 0 of 2 layers"),
        (
            "mamba",
            {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4},
            "mamba: 0 of 2 layers",
        ),
    ],
)
def test_model_that_attends_otherwise_is_refused_by_name(
    tmp_path: Path, model_type: str, settings: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(save(tmp_path, model_type, **settings))


def test_mask_that_attention_does_not_receive_is_refused(tmp_path: Path) -> None:
    """gemma3 with bidirectional attention builds another mask and calls attention all the same."""
    checkpoint = make_checkpoint(tmp_path, "gemma3", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="gemma3_text"):
        load(checkpoint)


CHUNKED = {
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "no_rope_layers": [1, 1],
    "attention_chunk_size": 48,
    "max_position_embeddings": 512,
}


def test_chunked_attention_is_served_up_to_the_chunk_that_the_refusal_names(tmp_path: Path) -> None:
    """Inside of one chunk it is causal attention. What the refusal advises works."""
    checkpoint = save(tmp_path, "llama4_text", **SIZES, **CHUNKED)
    refused: list[dict[str, Any]] = [{}, {"max_model_len": 49}, {"kv_tokens": 400}]
    for limits in refused:
        with pytest.raises(UnsupportedModel, match=r"not see position .*; lower --max-model-len to 48$"):
            load(checkpoint, **limits)
    assert load(checkpoint, max_model_len=48).context_limit == 512
    assert len(load(checkpoint, kv_tokens=40).probe.attention_layers) == 2


def test_chunked_attention_that_also_looks_at_places_gets_no_advice_that_would_not_work(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, "llama4_text", **(SIZES | CHUNKED | {"no_rope_layers": [1, 0]}))
    refused: list[dict[str, Any]] = [{}, {"max_model_len": 48}]
    for limits in refused:
        with pytest.raises(UnsupportedModel, match="computed with the token's place in the batch") as refusal:
            load(checkpoint, **limits)
        assert "--max-model-len" not in str(refusal.value)


def test_a_length_that_config_does_not_name_is_requested_only_where_it_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama")
    monkeypatch.setattr("data_plane.models.loader.context_limit", lambda config, requested: None)
    with pytest.raises(ConfigError, match=r"names no longest context .*; give --max-model-len"):
        load(checkpoint)
    assert load(checkpoint, max_model_len=64).context_limit == 64
    mamba = save(tmp_path / "mamba", "mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)
    refused: list[dict[str, Any]] = [{}, {"max_model_len": 64}]
    for limits in refused:
        with pytest.raises(UnsupportedModel, match="recurrent"):
            load(mamba, **limits)


def test_code_that_fails_on_packed_tokens_is_reported_with_its_module(tmp_path: Path) -> None:
    """A router that chooses more experts than there are; torch says no more than "k out of range"."""
    moe = {"num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8}
    checkpoint = save(tmp_path, "qwen3_moe", **SIZES, **moe, num_key_value_heads=2)
    with pytest.raises(UnsupportedModel, match=r"in model\.layers\.0\.mlp\.gate \(Qwen3MoeTopKRouter\): "):
        load(checkpoint)


def test_weights_of_another_shape_than_the_configuration_are_reported_by_name(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    with pytest.raises(
        ConfigError, match=r"mlp\.down_proj\.weight has the shape \[64, 128\], config\.json makes it \[64, 96\]"
    ):
        load(checkpoint)


def test_linears_that_keep_their_weight_transposed_take_adapters(tmp_path: Path) -> None:
    """GPT-2's Conv1D; that its adapters compute as PEFT's is shown by the engine's oracle."""
    loaded = load(make_checkpoint(tmp_path, "gpt2"))
    shapes = {target.name: (target.in_features, target.out_features) for target in loaded.targets()}
    assert shapes["transformer.h.0.attn.c_attn"] == (64, 192)
    assert shapes["transformer.h.1.mlp.c_proj"] == (256, 64)
    assert len(shapes) == 2 * 4 + 2
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    weight = loaded.base_weights().weight("transformer.h.1.mlp.c_proj")
    assert isinstance(weight, torch.Tensor) and torch.equal(weight, plain.transformer.h[1].mlp.c_proj.weight.T)


def test_missing_weight_is_refused_rather_than_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = make_checkpoint(tmp_path, "llama")
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing keys: model.layers.1.mlp.up_proj.weight"):
        load(checkpoint)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    (checkpoint / "model.safetensors").unlink()
    torch.save({}, checkpoint / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(checkpoint)


def test_code_of_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("has_bfloat16", "has_native", "dtype", "is_reported"),
    [(0, 0, "bfloat16", 1), (1, 0, "bfloat16", 0), (0, 1, "bfloat16", 0), (0, 0, "float32", 0)],
)
def test_bfloat16_that_torch_emulates_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_bfloat16: int,
    has_native: int,
    dtype: str,
    is_reported: int,
) -> None:
    monkeypatch.setattr(loader, "has_native", lambda: bool(has_native))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(has_bfloat16))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    load(make_checkpoint(tmp_path, "llama"), dtype)
    assert ("--dtype float32" in caplog.text) == bool(is_reported)

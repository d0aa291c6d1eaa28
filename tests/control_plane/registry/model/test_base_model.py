"""Against what transformers writes and PEFT targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.registry.model.base_model import BaseModel, BaseModelError
from control_plane.registry.peft.ingest import CONFIG_FILE, WEIGHTS_FILE
from control_plane.registry.peft.target_modules import layer_of
from tests.control_plane.registry.rig import pack, safetensors_bytes
from tests.makers import ARCHS, make_adapter, make_checkpoint


@pytest.mark.filterwarnings("ignore")  # transformers and PEFT deprecate their own calls
@pytest.mark.parametrize("arch", ARCHS)
def test_linears_are_those_that_peft_targets_and_its_adapters_are_read(tmp_path: Path, arch: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "base", arch)
    base_model = BaseModel.load(checkpoint)
    assert base_model.linear_shapes == _linears_of_the_module_tree(checkpoint)
    outer = {name: module.linear_shape for name, module in base_model.embedding_modules.items()}
    assert outer == _linears_of_the_module_tree(checkpoint, is_embedding_module=True)
    assert (base_model.vocab_size, base_model.max_model_len, base_model.num_layers) == (256, 512, 2)
    assert (base_model.eos_token_ids, base_model.dtype) == ((0,), "float32")
    adapter = make_adapter(tmp_path / "adapter", checkpoint, rank=3, alpha=6)
    files = {name: adapter / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
    info, _ = pack(files, base_model)
    assert set(info.target_modules) == set(base_model.linear_shapes)


def _linears_of_the_module_tree(checkpoint: Path, *, is_embedding_module: bool = False) -> dict[str, tuple[int, int]]:
    """(out, in) of the decoder layers' linears, or of what lies outside of them, embedding included."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    linears = {
        name: (module.nf, module.nx) if isinstance(module, Conv1D) else (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and (layer_of(name) is None) == is_embedding_module
    }
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    return linears | ({name: (embedding.embedding_dim, embedding.num_embeddings)} if is_embedding_module else {})


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_model_has_another_name_for_clients_and_the_same_for_adapters(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    plain, fp8 = BaseModel.load(checkpoint), BaseModel.load(checkpoint, quantization="fp8")
    assert plain.served_fingerprint == plain.fingerprint == fp8.fingerprint
    assert fp8.served_fingerprint != fp8.fingerprint and len(fp8.served_fingerprint) == 64


def test_a_sharded_checkpoint_reads_the_same(tmp_path: Path) -> None:
    whole = BaseModel.load(make_checkpoint(tmp_path / "whole", "llama"))
    sharded = BaseModel.load(make_checkpoint(tmp_path / "sharded", "llama", max_shard_size="100KB"))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert sharded.linear_shapes == whole.linear_shapes
    assert sharded.embedding_modules.keys() == whole.embedding_modules.keys() == {"model.embed_tokens", "lm_head"}


def _write(directory: Path, names: dict[str, tuple[int, int]], **config: object) -> Path:
    directory.mkdir()
    defaults = {"model_type": "llama", "vocab_size": 9, "max_position_embeddings": 64, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(defaults | config))
    content = {name: np.zeros(shape, "<f4") for name, shape in names.items()}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(content))
    return directory


@pytest.mark.parametrize("prefix", ["layers.", "model.layers.", "language_model.model.layers."])
def test_layers_under_another_prefix_get_the_module_trees_names(tmp_path: Path, prefix: str) -> None:
    names = {f"{prefix}0.mlp.up_proj.weight": (8, 4), f"{prefix}0.mlp.gate.weight": (2, 4), "x.weight": (9, 4)}
    base_model = BaseModel.load(_write(tmp_path / "m", names))
    assert base_model.linear_shapes == {"model.layers.0.mlp.up_proj": (8, 4)}
    assert base_model.dtype == "bfloat16"


def test_generation_config_says_first_when_a_text_ends(tmp_path: Path) -> None:
    directory = _write(tmp_path / "m", {"layers.0.q.weight": (2, 2)}, eos_token_id=5)
    assert BaseModel.load(directory).eos_token_ids == (5,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert BaseModel.load(directory).eos_token_ids == (7, 8)


def test_layers_that_predict_further_tokens_are_not_the_decoders(tmp_path: Path) -> None:
    """As DeepSeek's and GLM's checkpoints have behind the last decoder layer."""
    names = {f"model.layers.{index}.q_proj.weight": (2, 2) for index in range(3)}
    base_model = BaseModel.load(_write(tmp_path / "m", names, num_hidden_layers=2))
    assert list(base_model.linear_shapes) == ["model.layers.0.q_proj", "model.layers.1.q_proj"]
    assert base_model.num_layers == 2


def test_layers_of_an_unknown_name_leave_the_modules_to_the_workers(tmp_path: Path) -> None:
    base_model = BaseModel.load(_write(tmp_path / "m", {"encoder.layer.0.query.weight": (2, 2)}, num_hidden_layers=1))
    assert (base_model.linear_shapes, base_model.embedding_modules, base_model.num_layers) == ({}, {}, 0)


def test_a_decoder_within_a_larger_model_leaves_the_modules_to_the_workers(tmp_path: Path) -> None:
    names = {"vision.layers.0.q.weight": (2, 2), "language_model.layers.0.q.weight": (2, 2)}
    text = {"vocab_size": 7, "max_position_embeddings": 12}
    directory = _write(tmp_path / "m", names, vocab_size=None, max_position_embeddings=None, text_config=text)
    config = json.loads((directory / "config.json").read_text())
    del config["vocab_size"]
    (directory / "config.json").write_text(json.dumps(config))
    base_model = BaseModel.load(directory)
    assert (base_model.linear_shapes, base_model.vocab_size, base_model.max_model_len) == ({}, 7, 12)


def test_lengths_of_every_name_are_read_and_none_is_needed(tmp_path: Path) -> None:
    names = {"layers.0.q.weight": (2, 2)}
    lengths: list[tuple[dict[str, Any], int | None]] = [
        ({"max_seq_len": 33}, 33),
        ({"n_positions": 34}, 34),
        ({"text_config": {"n_ctx": 35}}, 35),
        ({}, None),
    ]
    for number, (config, expected) in enumerate(lengths):
        directory = _write(tmp_path / str(number), names, **({"max_position_embeddings": None} | config))
        assert BaseModel.load(directory).max_model_len == expected
        assert BaseModel.load(directory, "float32", 16).max_model_len == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 2}, "2 layers, the checkpoint holds 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "checkpoints quantised with 'awq' are not served; use the"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"torch_dtype": "float64"}, "dtype 'float64'"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(BaseModelError, match=message):
        BaseModel.load(_write(tmp_path / "m", {"layers.0.q.weight": (2, 2)}, **change))


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    directory = _write(tmp_path / "m", {"layers.0.q.weight": (2, 2)})
    assert BaseModel.load(directory, "float32", 32).max_model_len == 32
    with pytest.raises(BaseModelError, match="--max-model-len 65"):
        BaseModel.load(directory, "float32", 65)


def test_a_directory_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"config\.json is missing"):
        BaseModel.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BaseModelError, match="safetensors"):
        BaseModel.load(tmp_path)

"""Adapters on the embedding and the head: what is packed, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.errors import InvalidAdapter
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.embedding_modules import CheckpointTensor
from control_plane.registry.peft.base_weights import is_same_weight
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.peft.safetensors_header import TensorEntry
from tests.control_plane.registry.rig import pack, safetensors_bytes, write_adapter

VOCAB, HIDDEN, RANK = 37, 16, 3
Tensors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Tensors:
    generator = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": VOCAB, "lm_head.weight": VOCAB, "model.layers.0.mlp.up_proj.weight": 24}
    return {name: generator.standard_normal((rows, HIDDEN)).astype("<f4") for name, rows in shapes.items()}


def base_model(tmp_path: Path, checkpoint: Tensors, **config: Any) -> BaseModel:
    directory = tmp_path / "base"
    directory.mkdir(exist_ok=True)
    fields = {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 64, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(fields | config))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(checkpoint))
    return BaseModel.load(directory)


def adapter(**extra: np.ndarray[Any, Any]) -> Tensors:
    """LoRA on the embedding and the head; `extra` by names with "__" for "."."""
    generator = np.random.default_rng(1)
    shapes = {
        "model.embed_tokens.lora_embedding_A": (RANK, VOCAB),
        "model.embed_tokens.lora_embedding_B": (HIDDEN, RANK),
        "lm_head.lora_A.weight": (RANK, HIDDEN),
        "lm_head.lora_B.weight": (VOCAB, RANK),
    }
    content: Tensors = {name: generator.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}
    content |= {name.replace("__", "."): values for name, values in extra.items()}
    return {f"base_model.model.{name}": values for name, values in content.items()}


def packed(tmp_path: Path, base: BaseModel, tensors: Tensors, **fields: Any) -> tuple[PackedInfo, list[bytes]]:
    config = {"r": RANK, "target_modules": ["embed_tokens", "lm_head"]} | fields
    files = write_adapter(tmp_path / "adapter", weights=safetensors_bytes(tensors), **config)
    return pack(files, base)


def refusal(tmp_path: Path, base: BaseModel, tensors: Tensors, **fields: Any) -> tuple[str, str]:
    (problem,) = problems(tmp_path, base, tensors, **fields).items()
    return problem


def problems(tmp_path: Path, base: BaseModel, tensors: Tensors, **fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidAdapter) as caught:
        packed(tmp_path, base, tensors, **fields)
    found: dict[str, str] = {}
    for violation in caught.value.violations:
        found[violation.field] = found.get(violation.field, "") + violation.description
    return found


def test_they_make_the_last_chunk(tmp_path: Path, checkpoint: Tensors) -> None:
    info, chunks = packed(tmp_path, base_model(tmp_path, checkpoint), adapter())
    (chunk,) = json.loads(info.manifest)["chunks"]
    assert chunk["name"] == "rest" and len(chunks) == 1
    head, embedding = chunk["modules"]
    assert (head["name"], head["in_features"], head["out_features"]) == ("lm_head", HIDDEN, VOCAB)
    assert "is_embedding" not in head
    assert (embedding["name"], embedding["in_features"], embedding["out_features"], embedding["is_embedding"]) == (
        "model.embed_tokens",
        VOCAB,
        HIDDEN,
        True,
    )
    # Pages of 16 columns: a vocabulary of 37 takes three of them.
    assert info.arena_bytes == 2 * 8 * (HIDDEN + 48) * 2


@pytest.mark.parametrize("is_tied", [False, True])
def test_weight_tying_is_refused_where_there_is_something_to_tie(
    tmp_path: Path, checkpoint: Tensors, is_tied: bool
) -> None:
    if is_tied:
        del checkpoint["lm_head.weight"]
    base = base_model(tmp_path, checkpoint)
    if is_tied:
        only_head = {name: values for name, values in adapter().items() if "lm_head" in name}
        refused_with = refusal(tmp_path, base, only_head, ensure_weight_tying=True, target_modules=["lm_head"])
        assert refused_with[0] == "ensure_weight_tying" and "has tensors of lm_head alone" in refused_with[1]
    else:
        assert packed(tmp_path, base, adapter(), ensure_weight_tying=True) == packed(tmp_path, base, adapter())


def test_weight_tying_has_no_effect_on_an_embedding_that_peft_does_not_tie(tmp_path: Path, checkpoint: Tensors) -> None:
    """GPT-2's wte: PEFT warns, adapts the embedding alone, and loads that."""
    del checkpoint["lm_head.weight"]
    renamed = {name.replace("embed_tokens", "wte"): values for name, values in checkpoint.items()}
    only = {name.replace("embed_tokens", "wte"): values for name, values in adapter().items() if "lm_head" not in name}
    base = base_model(tmp_path, renamed)
    plain = packed(tmp_path, base, only, target_modules=["wte"])
    assert packed(tmp_path, base, only, target_modules=["wte"], ensure_weight_tying=True) == plain


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_bases_own_weight_beside_an_adapter_changes_nothing(
    tmp_path: Path, checkpoint: Tensors, is_tied: bool
) -> None:
    """As PEFT saves it, in the adapter's dtype; a tied head has the embedding's."""
    if is_tied:
        del checkpoint["lm_head.weight"]
    base = base_model(tmp_path, checkpoint)
    embedding = checkpoint["model.embed_tokens.weight"]
    head = checkpoint.get("lm_head.weight", embedding)
    plain, _ = packed(tmp_path, base, adapter())
    rounded = (embedding.view("<u4") & np.uint32(0xFFFFFF80)).view("<f4")  # the same in bfloat16
    saved = adapter(model__embed_tokens__base_layer__weight=rounded, lm_head__base_layer__weight=head)
    assert packed(tmp_path, base, saved)[0].digest == plain.digest
    changed = head.copy()
    changed[-1, -1] *= 1.5
    info, _ = packed(tmp_path, base, adapter(lm_head__base_layer__weight=changed))
    assert info.num_rows == (2 if is_tied else 1)  # of the embedding too, where the two are tied
    found = problems(tmp_path, base, adapter(lm_head__base_layer__weight=head[:, 1:]))
    assert "expected rows of 16 values" in found["base_model.model.lm_head.base_layer.weight"]


def test_the_bases_own_bias_of_the_head_changes_nothing(tmp_path: Path, checkpoint: Tensors) -> None:
    bias = np.linspace(-1, 1, VOCAB).astype("<f4")
    saved = adapter(lm_head__base_layer__bias=bias)
    field, words = refusal(tmp_path, base_model(tmp_path, checkpoint), saved)
    assert (field, "the base model has no such bias" in words) == ("lm_head.base_layer.bias", True)
    checkpoint["lm_head.bias"] = bias
    base = base_model(tmp_path, checkpoint)
    assert packed(tmp_path, base, saved)[0].digest == packed(tmp_path, base, adapter())[0].digest
    for wrong, expected in ((bias * 2, "not the base model's own"), (bias[1:], "shape [36], expected [37]")):
        field, words = refusal(tmp_path, base, adapter(lm_head__base_layer__bias=wrong))
        assert (field.endswith("lm_head.base_layer.bias"), expected in words) == (True, True)
    field, words = refusal(tmp_path, base, adapter(model__embed_tokens__base_layer__bias=bias[:HIDDEN]))
    assert (field, "no such bias" in words) == ("model.embed_tokens.base_layer.bias", True)


def test_equal_bytes_are_the_same_weight_whatever_they_hold(tmp_path: Path) -> None:
    values = np.array([[1.0, 0.0], [np.nan, 1e6]], "<f4")
    paths = [tmp_path / name for name in ("ours", "base")]
    paths[1].write_bytes(values.tobytes())
    weight = CheckpointTensor(paths[1], "F32", (2, 2), 0)

    def is_same(ours: np.ndarray[Any, Any]) -> bool:
        paths[0].write_bytes(ours.tobytes())
        entry = TensorEntry("a", {2: "F16", 4: "F32"}[ours.itemsize], (2, 2), 0, ours.nbytes)
        with paths[0].open("rb") as file:
            return is_same_weight(file, entry, weight, "bfloat16")

    assert is_same(values)
    assert not is_same(values[::-1].copy())
    assert not is_same(values[:1])  # the file ends before the tensor does
    values[1] = 0.5, 0.25
    paths[1].write_bytes(values.tobytes())
    assert is_same(values.astype("<f2"))  # other bytes, same values
    assert not is_same(np.array([[1.0, -0.0], [0.5, 0.25]], "<f4"))


def test_what_peft_would_not_load_is_refused(tmp_path: Path, checkpoint: Tensors) -> None:
    base = base_model(tmp_path, checkpoint)
    a, b = np.zeros((RANK, VOCAB), "<f4"), np.zeros((HIDDEN, RANK), "<f4")
    cases: list[tuple[Tensors, dict[str, Any], str, str]] = [
        (adapter(lm_head__lora_embedding_A=a), {}, "lm_head.lora_embedding_A", "to a linear, which has lora_A"),
        (
            adapter(model__embed_tokens__lora_B__weight=b),
            {},
            "model.embed_tokens.lora_B",
            "to an embedding, which has lora_embedding_A",
        ),
        (adapter(model__embed_tokens__lora_embedding_A=a[:, 1:]), {}, "model.embed_tokens.lora_embedding_A", "[3, 36]"),
        (adapter(), {"lora_bias": True}, "lm_head.lora_B.bias", "is missing"),
        (adapter(lm_head__lora_B__bias=a[0]), {"lora_bias": True}, "lora_bias", "names model.embed_tokens"),
        (adapter(), {"target_modules": "all-linear"}, "target_modules", "does not name lm_head"),
        (adapter(), {"target_modules": ["embed_tokens"]}, "target_modules", "does not name lm_head"),
        (adapter(), {"modules_to_save": ["lm_head"]}, "modules_to_save", "whose weight is not in the file"),
    ]
    for tensors, fields, field, words in cases:
        assert words in problems(tmp_path, base, tensors, **fields)[field]
    only_head = {name: values for name, values in adapter().items() if "lm_head" in name}
    assert refusal(tmp_path, base, only_head)[0] == "model.embed_tokens.lora_embedding_A"


def test_a_module_that_was_trained_whole_has_no_lora(tmp_path: Path, checkpoint: Tensors) -> None:
    """PEFT leaves the names of modules_to_save out of target_modules, so the file has the weight alone."""
    base, head = base_model(tmp_path, checkpoint), np.ones((VOCAB, HIDDEN), "<f4")
    both = adapter(lm_head__weight=head)
    alone = {name: values for name, values in both.items() if "lm_head.lora" not in name}
    expected = packed(tmp_path, base, alone, target_modules=["embed_tokens"], modules_to_save=["lm_head"])
    assert packed(tmp_path, base, alone, modules_to_save=["lm_head"]) == expected
    assert refusal(tmp_path, base, both, modules_to_save=["lm_head"]) == (
        "target_modules",
        "does not name lm_head, for which there are tensors; PEFT would drop them",
    )


def test_a_base_whose_embedding_is_not_known_for_certain_takes_none(tmp_path: Path, checkpoint: Tensors) -> None:
    checkpoint["model.other.embed_tokens.weight"] = checkpoint["model.embed_tokens.weight"]
    base = base_model(tmp_path, checkpoint)
    assert base.embedding_modules == {}
    found = problems(tmp_path, base, adapter())
    tensor_names = [name for name in found if name.startswith("base_model.model.")]
    assert all(found[name].startswith("the base model has no such linear") for name in tensor_names) and tensor_names
    # The configuration names the two as well.
    assert found.keys() - tensor_names == {"target_modules"}


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (None, "names no token of model.embed_tokens, and the file has 2 trained rows; list the tokens in order"),
        ([5], "names 1 tokens of model.embed_tokens, the file has 2 rows of them"),
        ([5, -1], "has [5, -1]; a list of token ids is expected"),
    ],
)
def test_trained_rows_need_their_tokens(tmp_path: Path, checkpoint: Tensors, tokens: Any, words: str) -> None:
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((2, HIDDEN), "<f4")}
    tensors = {name: values for name, values in adapter(**rows).items() if "lora_embedding" not in name}
    found = refusal(
        tmp_path, base_model(tmp_path, checkpoint), tensors, target_modules=["lm_head"], trainable_token_indices=tokens
    )
    assert found == ("trainable_token_indices", words)

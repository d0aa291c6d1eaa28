"""Which kinds of adapters there are on each base model, and the files of one: what PEFT writes, and what is served."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.trtllm.to_rows import peft_to_trtllm
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.data_plane.engine.expert_files import merged, write_one_by_one
from tests.makers import make_adapter, make_classifier

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
VOCAB_SIZE = 256
NUM_LABELS = 3
TOOL = "<tool>"  # a token that one kind adds; its id is the last of that kind's vocabulary
BOTH = ["embed_tokens", "lm_head"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SOME = {"llama": ["q_proj", "v_proj", "down_proj"], "mixtral": ["q_proj", "v_proj", "o_proj"]}
# Rotations for contexts four times as long. transformers has no yarn for a mixtral that leaves head_dim out.
ROPE = {
    "llama": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "mixtral": {"rope_type": "linear", "factor": 4.0},
}


@dataclass(frozen=True)
class Kind:
    """How an adapter of this kind is made, and what is done to its files before they are registered."""

    form: dict[str, Any] = field(default_factory=dict)  # of make_adapter, or of what makes it instead
    is_classifier: bool = False
    is_one_by_one: bool = False  # experts, under the names of each one's own linears
    rope: dict[str, Any] | None = None  # a rotary embedding of its own
    is_body: bool = False  # trained on AutoModel, for embeddings
    is_rows: bool = False  # TensorRT-LLM's arrays
    has_tokenizer: bool = False  # of its own, with TOOL

    @property
    def vocab_size(self) -> int:
        size: int = self.form.get("resize", VOCAB_SIZE)
        return size

    @property
    def invocation(self) -> list[int]:
        """The tokens from which on it acts; empty: it always acts."""
        return list(self.form.get("alora_invocation_tokens", ()))


@dataclass(frozen=True)
class Made:
    """One adapter's files, and what is true of it."""

    served: Path  # what is registered
    pushed: Path | None  # the two files with the same digest, if there are two that have it
    checkpoint: Path  # on which the truth is computed
    peft: Path | None  # the adapter that PEFT loads there; None: it is in the checkpoint


def kinds_of(arch: str) -> dict[str, Kind]:
    """By their names, the kinds that a base model of this architecture has."""
    some = SOME[arch]
    kinds = {
        "lora": Kind({"rank": 8, "targets": some}),
        "all linears": Kind({"rank": 3}),
        "rslora": Kind({"rank": 5, "targets": some, "rslora": True}),
        "dora": Kind({"rank": 4, "targets": some, "use_dora": True}),
        "lora bias": Kind({"rank": 4, "targets": ["q_proj", "v_proj"], "lora_bias": True}),
        "embedding and head": Kind({"rank": 4, "targets": ["v_proj", *BOTH]}),
        "head saved": Kind({"rank": 4, "targets": some, "modules_to_save": ["lm_head"]}),
        "both saved": Kind({"rank": 2, "targets": some, "modules_to_save": BOTH}),
        "trained tokens": Kind({"rank": 4, "targets": some, "trainable_token_indices": [9, 5, 77]}),
        "added tokens": Kind({"rank": 4, "targets": some, "resize": 260}),
        "own tokenizer": Kind({"rank": 4, "targets": some, "resize": 257}, has_tokenizer=True),
        "one layer": Kind({"rank": 6, "targets": some, "layers_to_transform": [1]}),
        "ranks": Kind({"rank": 4, "targets": some, "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"v_proj": 3}}),
        "activated": Kind({"rank": 4, "targets": some, "alora_invocation_tokens": [201, 17, 202]}),
        "long context": Kind({"rank": 4, "targets": some, "scale_b": 0.2}, rope=ROPE[arch]),
        "score head": Kind({"rank": 4, "target_modules": some}, is_classifier=True),
        "embeddings": Kind({"rank": 6, "targets": some}, is_body=True),
        "rows": Kind({"rank": 8, "alpha": 12, "targets": ["q_proj", "v_proj"]}, is_rows=True),
        "rows with dora": Kind({"rank": 4, "targets": ["q_proj", "o_proj"], "use_dora": True}, is_rows=True),
    }
    if arch == "mixtral":
        kinds |= {
            "experts": Kind({"rank": 3, "targets": ["o_proj"], "target_parameters": FUSED}),
            "some products": Kind({"rank": 5, "targets": [], "target_parameters": FUSED[1:], "rslora": True}),
            "router": Kind({"rank": 4, "targets": ["k_proj"], "target_parameters": ["gate.weight"]}),
            "one by one": Kind({"linears": ["q_proj"]}, is_one_by_one=True),
            "one by one, dora": Kind({"use_dora": True, "linears": ["v_proj"]}, is_one_by_one=True),
            "some experts": Kind({"experts": [0, 3], "parts": ["up_proj", "down_proj"], "rank": 6}, is_one_by_one=True),
        }
    return kinds


def make(kind: Kind, directory: Path, checkpoint: Path, seed: int) -> Made:
    """Write an adapter of the kind with random weights below `directory`."""
    path = directory / "adapter"
    if kind.is_one_by_one:
        directory.mkdir()
        write_one_by_one(path, checkpoint, seed=seed, **kind.form)
        return Made(path, path, merged(directory / "merged", checkpoint, path), None)
    if kind.is_classifier:
        make_classifier(path, checkpoint, num_labels=NUM_LABELS, seed=seed, **kind.form)
        return Made(path, path, checkpoint, _without_score(path, directory / "causal"))
    make_adapter(path, checkpoint, seed=seed, **kind.form)
    if kind.rope is not None:
        trained = shutil.copytree(path, directory / "trained")
        _change_json(path / CONFIG, rope_scaling=kind.rope)
        return Made(path, path, _scaled(directory / "scaled", checkpoint, kind.rope), trained)
    if kind.is_body:
        trained = shutil.copytree(path, directory / "trained")
        _to_body(path)
        return Made(path, path, checkpoint, trained)
    if kind.is_rows:
        peft_to_trtllm(path, directory / "rows", base_model=checkpoint)
        return Made(directory / "rows", path, checkpoint, path)
    if kind.has_tokenizer:
        own = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        own.add_tokens([TOOL])
        own.save(str(path / "tokenizer.json"))
        return Made(path, None, checkpoint, path)
    return Made(path, path, checkpoint, path)


def _change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")


def _without_score(source: Path, directory: Path) -> Path:
    """A classifier's adapter as one of a model that generates: its head is left out."""
    shutil.copytree(source, directory)
    _change_json(directory / CONFIG, task_type="CAUSAL_LM", modules_to_save=None)
    tensors = load_file(directory / WEIGHTS)
    save_file({name: each for name, each in tensors.items() if ".score." not in name}, directory / WEIGHTS)
    return directory


def _scaled(directory: Path, checkpoint: Path, rope: dict[str, Any]) -> Path:
    """The same weights with another rotary embedding."""
    shutil.copytree(checkpoint, directory)
    parameters = json.loads((directory / "config.json").read_text("utf-8"))["rope_parameters"]
    _change_json(directory / "config.json", rope_parameters={"rope_theta": parameters["rope_theta"]} | rope)
    return directory


def _to_body(path: Path) -> None:
    """The names of AutoModel's modules, which lack the first part."""
    _change_json(path / CONFIG, task_type="FEATURE_EXTRACTION")
    tensors = load_file(path / WEIGHTS)
    save_file({name.replace(".model.layers.", ".layers."): each for name, each in tensors.items()}, path / WEIGHTS)

"""Which kinds of adapters there are on each base model, and the files of one: what PEFT writes, and what is served.

tests/e2e/test_every_kind.py compares each of them with PEFT under everything that can happen to a request, and
tests/hostile/churn changes them at random. A new kind is a line in `kinds_of`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.adapters.files import ROWS_ARRAY, WEIGHTS_ARRAY
from motet.trtllm.to_rows import peft_to_trtllm
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.data_plane.engine.expert_files import merged, write_one_by_one
from tests.makers import make_adapter, make_classifier, make_converted

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What PEFT says while it makes and loads these adapters.
PEFT_WARNINGS = (
    "ignore:`lora_bias=True` was passed",
    "ignore:.*merging LoRA weights won't be possible",
    "ignore:.*changes the base weights of the model",
    "ignore:.*save_embedding_layers",
    "ignore:.*embedding layer has been resized",
    "ignore:.*ensure_weight_tying",
    "ignore:Adapter '.*LoRA tensor",
    "ignore:.*have invalid shape",
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:.*target_parameters",
    "ignore:.*did not match any targeted",
    "ignore:Careful, disabling adapter layers with bias",
    "ignore:.*fan_in_fan_out is set to True",
    "ignore:Unexpected keyword arguments",
)
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
# Of the base model's configuration: biases, which adapters may train.
SIZES: dict[str, dict[str, Any]] = {"llama": {"attention_bias": True, "mlp_bias": True}, "mixtral": {}}
# Where docs/adapters.md says that an adapter is accepted: the first cell of a row, or a heading.
EXPERTS = "experts of a mixture"
BIASES = "trained biases (`bias` of `all` or `lora_only`)"
SAVED = "`modules_to_save` of embedding and head"
RESIZED = "resized embeddings, added tokens"
ROWS = "## TensorRT-LLM's format"


@dataclass(frozen=True)
class Kind:
    """How an adapter of this kind is made, and what is done to its files before they are registered."""

    place: str  # of docs/adapters.md, where it stands
    form: dict[str, Any] = field(default_factory=dict)  # of make_adapter, or of what makes it instead
    is_classifier: bool = False
    is_one_by_one: bool = False  # experts, under the names of each one's own linears
    rope: dict[str, Any] | None = None  # a rotary embedding of its own
    is_body: bool = False  # trained on AutoModel, for embeddings
    is_rows: bool = False  # TensorRT-LLM's arrays
    is_half: bool = False  # the file's tensors are bfloat16
    is_bare: bool = False  # these arrays without the files that make the way back exact
    start: str = ""  # a start that changes the base weights; PEFT converts the adapter to plain LoRA
    fields: dict[str, Any] = field(default_factory=dict)  # of the configuration, written by hand; PEFT ignores them
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

    @property
    def has_tokenizer(self) -> bool:
        return (self.served / "tokenizer.json").exists()


def kinds_of(arch: str) -> dict[str, Kind]:
    """By their names, the kinds that a base model of this architecture has."""
    some = SOME[arch]
    kinds = _kinds_of_linears(some) | _kinds_of_rows(some)
    kinds |= {
        "activated": Kind(
            "activated LoRA (`alora_invocation_tokens`)",
            {"rank": 4, "targets": some, "alora_invocation_tokens": [201, 17, 202]},
        ),
        "long context": Kind(
            "### Long contexts",
            {"rank": 4, "targets": some, "scale_b": 0.2},
            rope=ROPE[arch],
            fields={"rope_scaling" if arch == "llama" else "rope_parameters": ROPE[arch]},
        ),
        "long context, by its length": Kind(
            "### Long contexts",
            {"rank": 3, "targets": some, "scale_b": 0.2},
            rope={"rope_type": "linear", "factor": 4.0},
            fields={"context_length": 2048},
        ),
        "score head": Kind(
            "### Score heads and embedding adapters",
            {"rank": 4, "target_modules": some},
            is_classifier=True,
            fields={"id2label": {"0": "a", "1": "b", "2": "c"}, "problem_type": "single_label_classification"},
        ),
        "embeddings": Kind("### Score heads and embedding adapters", {"rank": 6, "targets": some}, is_body=True),
        "rows": Kind(ROWS, {"rank": 8, "alpha": 12, "targets": ["q_proj", "v_proj"]}, is_rows=True),
        "rows with dora": Kind(ROWS, {"rank": 4, "targets": ["q_proj", "o_proj"], "use_dora": True}, is_rows=True),
        "bare rows": Kind(
            ROWS, {"rank": 5, "alpha": 8, "targets": ["k_proj", "o_proj"], "use_dora": True}, is_rows=True, is_bare=True
        ),
    }
    return kinds | (_kinds_of_biases() if SIZES[arch] else _kinds_of_experts())


def _kinds_of_linears(some: list[str]) -> dict[str, Kind]:
    """LoRA on linears, embedding and head, in the forms that PEFT has."""
    other, modules = "other settings", "modules"
    expression, layer = {"targets": r".*\.0\.self_attn\.(q|o)_proj", "rank": 4}, {"layers_to_transform": [0]}
    return {
        "lora": Kind("LoRA, rsLoRA", {"rank": 8, "targets": some}),
        "all linears": Kind(modules, {"rank": 3, "alpha": 6}),
        "rslora": Kind("LoRA, rsLoRA", {"rank": 5, "targets": some, "rslora": True}),
        "dora": Kind("DoRA (`use_dora`), also with rsLoRA", {"rank": 4, "targets": some, "use_dora": True}),
        "rsdora of all": Kind(
            "DoRA (`use_dora`), also with rsLoRA",
            {"rank": 6, "targets": ["k_proj", *BOTH], "use_dora": True, "rslora": True},
        ),
        "lora bias": Kind("LoRA bias (`lora_bias`)", {"rank": 4, "targets": ["q_proj", "v_proj"], "lora_bias": True}),
        "embedding and head": Kind(modules, {"rank": 4, "targets": ["v_proj", *BOTH]}),
        "one layer": Kind(modules, {"rank": 6, "targets": some} | layer | {"layers_pattern": "layers"}),
        "expression": Kind(modules, expression | {"exclude_modules": r".*o_proj"}),
        "ranks": Kind(
            "ranks", {"rank": 4, "targets": some, "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"v_proj": 3}}
        ),
        "converted": Kind("starting points", {"targets": ["q_proj", "v_proj"]}, start="pissa"),
        "half": Kind("dtypes", {"rank": 4, "targets": some}, is_half=True),
        "gaussian": Kind("starting points", {"rank": 4, "targets": some, "init_lora_weights": "gaussian"}),
        "another task": Kind("tasks", {"rank": 4, "targets": some, "task_type": "QUESTION_ANS"}),
        "transposed": Kind(other, {"rank": 6, "targets": ["embed_tokens"], "fan_in_fan_out": True}),
        "tying": Kind("`ensure_weight_tying`", {"rank": 4, "targets": ["v_proj"], "ensure_weight_tying": True}),
    }


def _kinds_of_rows(some: list[str]) -> dict[str, Kind]:
    """Rows of its own for embedding and head, and tokens of its own."""
    return {
        "head saved": Kind(SAVED, {"rank": 4, "targets": some, "modules_to_save": ["lm_head"]}),
        "both saved": Kind(SAVED, {"rank": 2, "targets": some, "modules_to_save": BOTH}),
        "trained tokens": Kind(
            "`trainable_token_indices`", {"rank": 4, "targets": some, "trainable_token_indices": [9, 5, 77]}
        ),
        "added tokens": Kind(RESIZED, {"rank": 4, "targets": some, "resize": 260}),
        "added tokens, LoRA there": Kind(RESIZED, {"rank": 4, "targets": ["v_proj", *BOTH], "resize": 259}),
        "fewer tokens": Kind(RESIZED, {"rank": 4, "targets": some, "resize": 252}),
        "own tokenizer": Kind(RESIZED, {"rank": 4, "targets": some, "resize": 257}, has_tokenizer=True),
    }


def _kinds_of_biases() -> dict[str, Kind]:
    return {
        "trained biases": Kind(BIASES, {"rank": 4, "targets": ["q_proj", "o_proj"], "bias": "lora_only"}),
        "biases without LoRA": Kind(BIASES, {"rank": 2, "targets": ["down_proj"], "bias": "all"}),
        "both biases": Kind(BIASES, {"rank": 3, "targets": ["k_proj"], "bias": "lora_only", "lora_bias": True}),
        "biases and dora": Kind(BIASES, {"rank": 5, "targets": ["q_proj"], "bias": "all", "use_dora": True}),
    }


def _kinds_of_experts() -> dict[str, Kind]:
    router = "routers, a shared expert's linears and its gate"
    return {
        "experts": Kind(EXPERTS, {"rank": 3, "targets": ["o_proj"], "target_parameters": FUSED}),
        "experts, saved and new rows": Kind(
            EXPERTS,
            {"rank": 2, "targets": ["q_proj"], "target_parameters": [*FUSED, "gate.weight"]}
            | {"resize": 258, "modules_to_save": BOTH},
        ),
        "some products": Kind(EXPERTS, {"rank": 5, "targets": [], "target_parameters": FUSED[1:], "rslora": True}),
        "router": Kind(router, {"rank": 4, "targets": ["k_proj"], "target_parameters": ["gate.weight"]}),
        "one by one": Kind(EXPERTS, {"linears": ["q_proj"]}, is_one_by_one=True),
        "one by one, dora": Kind(EXPERTS, {"use_dora": True, "linears": ["v_proj"]}, is_one_by_one=True),
        "rows of experts": Kind(ROWS, {"linears": ["v_proj", "gate"]}, is_one_by_one=True, is_rows=True),
        "some experts": Kind(
            EXPERTS, {"experts": [0, 3], "parts": ["up_proj", "down_proj"], "rank": 6}, is_one_by_one=True
        ),
    }


def make(kind: Kind, directory: Path, checkpoint: Path, seed: int) -> Made:
    """Write an adapter of the kind with random weights below `directory`."""
    path = directory / "adapter"
    if kind.is_one_by_one:
        directory.mkdir()
        write_one_by_one(path, checkpoint, seed=seed, **kind.form)
        truth = merged(directory / "merged", checkpoint, path)
        return Made(_rows(kind, path, checkpoint) if kind.is_rows else path, path, truth, None)
    if kind.is_classifier:
        make_classifier(path, checkpoint, num_labels=NUM_LABELS, seed=seed, **kind.form)
        _change_json(path / CONFIG, **kind.fields)
        return Made(path, path, checkpoint, _without_score(path, directory / "causal"))
    if kind.start:
        make_converted(path, checkpoint, kind.start, seed=seed, **kind.form)
        return Made(path, path, checkpoint, path)
    make_adapter(path, checkpoint, seed=seed, **kind.form)
    if kind.is_half:
        tensors = load_file(path / WEIGHTS)
        save_file({name: each.bfloat16() for name, each in tensors.items()}, path / WEIGHTS)
    if kind.rope is not None:
        trained = shutil.copytree(path, directory / "trained")
        _change_json(path / CONFIG, **kind.fields)
        return Made(path, path, _scaled(directory / "scaled", checkpoint, kind.rope), trained)
    if kind.is_body:
        trained = shutil.copytree(path, directory / "trained")
        _to_body(path)
        return Made(path, path, checkpoint, trained)
    if kind.is_rows:
        return Made(_rows(kind, path, checkpoint), None if kind.is_bare else path, checkpoint, path)
    if kind.has_tokenizer:
        own = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        own.add_tokens([TOOL])
        own.save(str(path / "tokenizer.json"))
        return Made(path, None, checkpoint, path)
    return Made(path, path, checkpoint, path)


def _rows(kind: Kind, path: Path, checkpoint: Path) -> Path:
    """The adapter in TensorRT-LLM's arrays."""
    rows = path.parent / "rows"
    peft_to_trtllm(path, rows, base_model=checkpoint)
    for each in rows.iterdir() if kind.is_bare else ():
        if each.name not in (WEIGHTS_ARRAY, ROWS_ARRAY):
            each.unlink()
    return rows


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

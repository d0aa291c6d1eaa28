"""What each field of adapter_config.json means for serving: it is read, it changes nothing, or it is refused.

The table has every field of PEFT's LoraConfig from 0.3 on, and those that other trainers add; the list in
docs/adapters.md is written from it. A field that is not in the table and has a value is refused: it could change the
meaning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import refuse, shorten


class Use(Enum):
    """What happens to the value of a field."""

    READ = "read"  # by adapter_config.py, or by a check below
    IGNORED = "ignored"  # it changes nothing about what a trained adapter computes, whatever it holds
    REFUSED = "refused"  # unless it is empty: null, false, {} or []


@dataclass(frozen=True, slots=True)
class Field:
    """One field of adapter_config.json."""

    name: str
    use: Use
    writers: str  # the first version of PEFT, or another trainer
    meaning: str  # what is read, why it changes nothing, or why it is refused and what to do instead


_LORA = "train plain LoRA"
_MERGE = "merge the adapter and serve the result as a base model"
_LOFTQ = (
    "LoftQ changes the base weights; serve the base model that LoftQ wrote, with this field set to null, or merge the "
    "adapter into it and serve the result"
)
FIELDS = (
    # Which modules.
    Field(
        "target_modules",
        Use.READ,
        "0.3",
        "names, suffixes, `all-linear`; of an expression or null the tensors tell",
    ),
    Field("exclude_modules", Use.READ, "0.14", "names or suffixes; of an expression the tensors tell"),
    Field("layers_to_transform", Use.READ, "0.4", "the layers whose modules are adapted"),
    Field(
        "layers_pattern",
        Use.READ,
        "0.4",
        "the name before a layer's index; of an expression the tensors tell",
    ),
    Field(
        "target_parameters",
        Use.READ,
        "0.17",
        "names or suffixes of the stacked parameters of experts, and of the weights of routers",
    ),
    Field("fan_in_fan_out", Use.READ, "0.3", "either value: PEFT corrects it by the type of each module"),
    Field(
        "ensure_weight_tying",
        Use.READ,
        "0.18",
        "where embedding and head are tied, the file has the tensors of both",
    ),
    # Rank and scaling.
    Field("r", Use.READ, "0.3", "the rank"),
    Field("rank_pattern", Use.READ, "0.6", "ranks by module; of an expression the tensors tell"),
    Field("lora_alpha", Use.READ, "0.3", "alpha: the scaling is alpha / r"),
    Field("alpha_pattern", Use.READ, "0.6", "alpha by module; an expression that could decide one is refused"),
    Field("use_rslora", Use.READ, "0.8", "the scaling is alpha / sqrt(r)"),
    # Kind.
    Field("peft_type", Use.READ, "0.3", "`LORA`; other kinds are refused by name"),
    Field("task_type", Use.READ, "0.3", "any task of PEFT, or null"),
    Field("use_dora", Use.READ, "0.9", "DoRA"),
    Field("lora_bias", Use.READ, "0.14", "a bias beside the product"),
    Field("bias", Use.READ, "0.3", "`none`, `all` or `lora_only`: trained biases of linears are served"),
    Field(
        "init_lora_weights",
        Use.READ,
        "0.3",
        "starts that leave the base weights as they are; others are refused",
    ),
    Field(
        "modules_to_save",
        Use.READ,
        "0.3",
        "embedding and head; `classifier`, `score` and `qa_outputs`, which PEFT adds for some tasks",
    ),
    Field(
        "trainable_token_indices",
        Use.READ,
        "0.15",
        "the tokens whose rows were trained, of the embedding or by module",
    ),
    # Long contexts.
    Field(
        "rope_scaling", Use.READ, "transformers", "rotations of the adapter's own: linear, yarn, llama3, another base"
    ),
    Field("rope_parameters", Use.READ, "transformers", "as rope_scaling"),
    Field("context_length", Use.READ, "vLLM", "tokens that the adapter was trained for; alone: linear scaling to them"),
    # Activated LoRA.
    Field(
        "alora_invocation_tokens",
        Use.READ,
        "0.18",
        "aLoRA: the adapter acts from the last place of these ids in a prompt on",
    ),
    # These change nothing.
    Field("id2label", Use.READ, "added by hand", "the labels of a score head, as in the classifier's config.json"),
    Field("problem_type", Use.READ, "added by hand", "what a score head's logits mean, as in that file"),
    Field("auto_mapping", Use.IGNORED, "0.4", "classes for PEFT's automatic loading; never followed"),
    Field(
        "base_model_name_or_path",
        Use.IGNORED,
        "0.3",
        "never followed; a name that is clearly another model's gives a warning",
    ),
    Field("corda_config", Use.IGNORED, "0.15", 'without `init_lora_weights: "corda"` PEFT ignores it'),
    Field("eva_config", Use.IGNORED, "0.14", "how EVA chose the start"),
    Field("inference_mode", Use.IGNORED, "0.3", "serving is inference"),
    Field("lora_dropout", Use.IGNORED, "0.3", "off when serving"),
    Field("lora_ga_config", Use.IGNORED, "0.19", 'without `init_lora_weights: "lora_ga"` PEFT ignores it'),
    Field("megatron_config", Use.IGNORED, "0.7", "how Megatron's parallel linears were built"),
    Field("megatron_core", Use.IGNORED, "0.7", "as megatron_config"),
    Field("peft_version", Use.IGNORED, "0.18", "the tensors and the other fields say what it means"),
    Field("qalora_group_size", Use.IGNORED, "0.16", "of use_qalora"),
    Field("revision", Use.IGNORED, "0.4", "of the base model, which is known by its fingerprint"),
    Field("runtime_config", Use.IGNORED, "0.12", "PEFT ignores it in a file"),
    Field("merge_weights", Use.IGNORED, "PEFT until 0.2", "whether PEFT merged the adapter on evaluation"),
    Field("lora_dtype", Use.IGNORED, "ms-swift", "of training"),
    Field("lorap_emb_lr", Use.IGNORED, "ms-swift", "a learning rate of LoRA+"),
    Field("lorap_lr_ratio", Use.IGNORED, "ms-swift", "a learning rate of LoRA+"),
    # These are refused.
    Field("arrow_config", Use.REFUSED, "0.18", f"Arrow routing is not served; {_LORA}"),
    Field(
        "enable_lora",
        Use.REFUSED,
        "PEFT until 0.2",
        "LoRA on a part of a linear is not served; train it on all of it",
    ),
    Field("kasa_config", Use.REFUSED, "0.21", f"KaSA is not served; {_LORA}"),
    Field("layer_replication", Use.REFUSED, "0.10", f"it changes the base model's layers; {_MERGE}"),
    Field("loftq_config", Use.REFUSED, "0.7", _LOFTQ),
    Field("monteclora_config", Use.REFUSED, "0.20", f"MonteCLoRA is not served; {_LORA}"),
    Field("use_bdlora", Use.REFUSED, "0.19", f"block-diagonal LoRA is not served; {_LORA}"),
    Field("use_qalora", Use.REFUSED, "0.16", f"QALoRA is not served; {_LORA}"),
    Field("velora_config", Use.REFUSED, "0.20", f"VeLoRA is not served; {_LORA}"),
)
# Last parts of the names of embeddings and heads, over all models.
EMBEDDING_NAMES = ("lm_head", "embed_out", "embed_tokens", "embed_in", "word_embeddings", "wte")
_BY_NAME = {field.name: field for field in FIELDS}
_TASK_TYPES = ("CAUSAL_LM", "FEATURE_EXTRACTION", "QUESTION_ANS", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS")
BIASES = ("none", "all", "lora_only")
# Names that PEFT adds to modules_to_save by itself for SEQ_CLS, TOKEN_CLS and QUESTION_ANS, whatever the model has. If
# the model has such a module, the file holds its weights, and these are refused (tensor_names.py).
_TASK_HEADS = {"classifier", "score", "qa_outputs"}
# How the adapter's start was chosen; the trained tensors stand on their own.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
# These starts change the base weights too. The first parts of names: PEFT knows pissa_niter_16 and the like.
_CONVERTIBLE_INITS = ("pissa", "olora", "corda", "lora_ga")


def check_fields(config: Mapping[str, Any], problems: Problems) -> None:
    """Note every field that makes the adapter one that is not served."""
    for field, check in _CHECKS.items():
        with problems.collected():
            check(field, config.get(field))
    for key, value in config.items():
        if value is None or value is False or value in ({}, []):
            continue
        known = _BY_NAME.get(key)
        with problems.collected():
            if known is None:
                raise refuse(shorten(key), "is not a known field, and it carries a value; remove it or set it to null")
            if known.use is Use.REFUSED:
                raise refuse(key, f"is {show(value)}; {known.meaning}")


def show(value: Any) -> str:
    """A value from outside, short enough for a message."""
    try:
        return shorten(json.dumps(value), 80)
    except ValueError:
        return "a number of too many digits"


def _check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise refuse(field, f"is {show(value)}; one of {', '.join(choices)} is expected")


def _check_modules_to_save(field: str, value: Any) -> None:
    names = value if isinstance(value, list) else [None]
    if not value or all(isinstance(n, str) and (n in _TASK_HEADS or _is_embedding_or_head(n)) for n in names):
        return
    raise refuse(
        field,
        f"is {show(value)}; of fully trained modules embedding and head are served; train LoRA on the others "
        f"(target_modules), or {_MERGE}",
    )


def trained_whole(value: Any) -> frozenset[str]:
    """The embeddings and heads of a modules_to_save that was checked."""
    names = value if isinstance(value, list) else []
    return frozenset(name for name in names if isinstance(name, str) and _is_embedding_or_head(name))


def _is_embedding_or_head(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in EMBEDDING_NAMES


def _check_init(field: str, init: Any) -> None:
    if init is None or any(init is known or (isinstance(init, str) and init == known) for known in _PLAIN_INITS):
        return
    if isinstance(init, str) and init.startswith(_CONVERTIBLE_INITS):
        advice = (
            "which changes the base weights; convert the adapter to plain LoRA: save_pretrained(DIR, "
            "path_initial_model_for_weight_conversion=...)"
        )
    elif init == "loftq":
        advice = f"and {_LOFTQ}"
    else:
        advice = (
            "which is not known; adapters that start with true, false, gaussian, orthogonal, eva or mica are served: "
            "train with one of these"
        )
    raise refuse(field, f"is {show(init)}, {advice}")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "task_type": lambda field, value: _check_choice(field, value, _TASK_TYPES),
    "bias": lambda field, value: _check_choice(field, value, BIASES),
    "init_lora_weights": _check_init,
    "modules_to_save": _check_modules_to_save,
}

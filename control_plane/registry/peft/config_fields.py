"""What each field of adapter_config.json means for serving: nothing, something that is read, or a refusal.

adapter_config.py reads the fields of READ; this file decides about all others. A field that is in no table and has a
value is refused, because it could change the meaning.
"""

from __future__ import annotations

import json
from typing import Any

from control_plane.registry.peft.kinds import FLAGS
from control_plane.registry.peft.safetensors_header import refuse, shorten

# Read by adapter_config.py.
READ = {
    "alpha_pattern",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "task_type",
    "use_rslora",
    *FLAGS,
}
# These change nothing about what a trained adapter computes, whatever they hold.
INERT = {
    "auto_mapping",  # classes for PEFT's automatic loading, written where no task_type was given; never followed
    "base_model_name_or_path",  # never followed
    "corda_config",  # how CorDA chose the start; without init_lora_weights "corda" PEFT ignores it
    "eva_config",  # how EVA chose the start of A
    "inference_mode",
    "lora_dropout",  # off when serving
    "lora_dtype",  # of training (ms-swift)
    "lora_ga_config",  # how LoRA-GA chose the start; without init_lora_weights "lora_ga" PEFT ignores it
    "lorap_emb_lr",  # learning rates of LoRA+ (ms-swift)
    "lorap_lr_ratio",
    "megatron_config",  # how Megatron's parallel linears were built; other modules are plain ones
    "megatron_core",
    "merge_weights",  # whether early versions of PEFT merged the adapter on evaluation
    "peft_version",
    "qalora_group_size",  # of use_qalora
    "revision",  # of the base model; the base is known by its fingerprint
    "runtime_config",  # PEFT ignores it in a file
}
# These are refused unless empty, with what to do instead.
REFUSED = {
    "alora_invocation_tokens": "activated LoRA is not served; train plain LoRA",
    "arrow_config": "Arrow routing is not served; train plain LoRA",
    "kasa_config": "KaSA is not served; train plain LoRA",
    "layer_replication": "it changes the base model's layers; merge the adapter and serve the result as a base model",
    "layers_pattern": "it is not read; list the layers' full module names in target_modules",
    "layers_to_transform": "it is not read; list the layers' full module names in target_modules",
    "loftq_config": "LoftQ changes the base weights; merge the adapter and serve the result as a base model",
    "modules_to_save": "fully trained modules are not served; train LoRA on them (target_modules), or merge the "
    "adapter and serve the result as a base model",
    "monteclora_config": "MonteCLoRA is not served; train plain LoRA",
    "target_parameters": "adapters on parameters, such as stacked experts, are not served; train with target_modules "
    "that name linears only",
    "trainable_token_indices": "trained tokens are not served; train LoRA on the embedding (target_modules)",
    "use_bdlora": "block-diagonal LoRA is not served; train plain LoRA",
    "use_qalora": "QALoRA is not served; train plain LoRA",
    "velora_config": "VeLoRA is not served; train plain LoRA",
}
_TASK_TYPES = ("CAUSAL_LM", "FEATURE_EXTRACTION", "QUESTION_ANS", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS")
_BIASES = ("none", "all", "lora_only")
# Names that PEFT adds to modules_to_save by itself for SEQ_CLS, TOKEN_CLS and QUESTION_ANS, whatever the model has. If
# the model has such a module, the file holds its weights, and these are refused (tensor_names.py).
_TASK_HEADS = {"classifier", "score", "qa_outputs"}
# How the adapter's start was chosen; the trained tensors stand on their own.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
# These starts change the base weights too. The first parts of names: PEFT knows pissa_niter_16 and the like.
_CONVERTIBLE_INITS = ("pissa", "olora", "corda", "lora_ga")


def check_fields(config: dict[str, Any]) -> None:
    """Raise InvalidAdapter for the first field that makes the adapter one that is not served."""
    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", f"is {show(config.get('peft_type'))}; only LORA adapters are served")
    _check_choice(config, "task_type", _TASK_TYPES)
    _check_choice(config, "bias", _BIASES)
    _check_init(config.get("init_lora_weights", True))
    for key, value in config.items():
        if key in READ or key in INERT or value is None or value is False or value in ({}, []):
            continue
        if key == "modules_to_save" and _names_task_heads_only(value):
            continue
        if key in REFUSED:
            raise refuse(key, f"is {show(value)}; {REFUSED[key]}")
        raise refuse(shorten(key), "is not a known field, and it carries a value; remove it or set it to null")


def show(value: Any) -> str:
    """A value from outside, short enough for a message."""
    try:
        return shorten(json.dumps(value), 80)
    except ValueError:
        return "a number of too many digits"


def _check_choice(config: dict[str, Any], field: str, choices: tuple[str, ...]) -> None:
    value = config.get(field)
    if value is not None and value not in choices:
        raise refuse(field, f"is {show(value)}; one of {', '.join(choices)} is expected")


def _names_task_heads_only(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name in _TASK_HEADS for name in value)


def _check_init(init: Any) -> None:
    if init is None or any(init is known or (isinstance(init, str) and init == known) for known in _PLAIN_INITS):
        return
    if isinstance(init, str) and init.startswith(_CONVERTIBLE_INITS):
        advice = (
            "which changes the base weights; convert the adapter to plain LoRA: save_pretrained(DIR, "
            "path_initial_model_for_weight_conversion=...)"
        )
    elif init == "loftq":
        advice = f"and {REFUSED['loftq_config']}"
    else:
        advice = (
            "which is not known; adapters that start with true, false, gaussian, orthogonal, eva or mica are served: "
            "train with one of these"
        )
    raise refuse("init_lora_weights", f"is {show(init)}, {advice}")

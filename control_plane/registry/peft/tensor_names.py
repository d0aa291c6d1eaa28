"""Splits the names of an adapter's tensors into module and part, and says of a name that does not fit what is wrong.

Called by module_plans.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from control_plane.registry.peft.kinds import parts_of_all_kinds
from control_plane.registry.peft.kinds.base_bias import PART_BASE_BIAS
from control_plane.registry.peft.safetensors_header import TensorEntry, refuse, shorten
from control_plane.registry.peft.target_modules import TargetModules

_KEY_PREFIX = "base_model.model."
# PEFT saves both beside adapters on embedding and lm_head, and the second one beside others where biases were trained.
BASE_WEIGHT, BASE_BIAS = "base_layer.weight", PART_BASE_BIAS.name
_BASE_PARTS = {f".{BASE_WEIGHT}": BASE_WEIGHT, **dict.fromkeys(PART_BASE_BIAS.suffixes, BASE_BIAS)}
_OWN_BIAS = ".bias"  # of a module without an adapter, where all biases were trained
# How the name of a tensor ends, and which part of a module it is.
_ADAPTER_PARTS = {
    suffix: part.name
    for is_embedding in (False, True)
    for part in parts_of_all_kinds(is_embedding=is_embedding).values()
    for suffix in part.suffixes
}
_PARTS = _ADAPTER_PARTS | _BASE_PARTS
_OTHER_TASK = (
    "belongs to the head of another task, and of heads a sequence classifier's score is served; save the adapter "
    "without that head"
)
# Parts of tensor names that belong to kinds of adapters that are not served.
_OTHER_KINDS = {
    "modules_to_save": "belongs to a fully trained module, and of these embedding, head and score are served; train "
    "LoRA on it",
    "trainable_tokens_delta": "belongs to trained tokens of a module other than embedding and head; train LoRA on it",
    "score": _OTHER_TASK,
    "classifier": _OTHER_TASK,
    "qa_outputs": _OTHER_TASK,
}
# Parts that wrappers of a model put into names.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "module": "DistributedDataParallel",
    "language_model": "a vision model around the language model",
}


def own_biases(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Biases of modules without an adapter, by module: PEFT saves them where all biases were trained."""
    return {
        key[len(_KEY_PREFIX) : -len(_OWN_BIAS)]: entry
        for key, entry in entries.items()
        if key.startswith(_KEY_PREFIX)
        and key.endswith(_OWN_BIAS)
        and not key.endswith(tuple(_PARTS))
        and _OTHER_KINDS.keys().isdisjoint(key.split("."))
    }


def with_body_prefix(entries: Mapping[str, TensorEntry], targets: TargetModules) -> dict[str, TensorEntry]:
    """The tensors by the names that they have in the model with its head.

    Embedding models are trained without the head, on transformers' AutoModel: the names of their modules lack the first
    part, layers.0.mlp.up_proj in place of model.layers.0.mlp.up_proj. A name is changed only if the model has no module
    of the name as it is, and exactly one of all its parts has this one in it.
    """
    bodies = sorted({name.partition(".")[0] for name in targets.served if "." in name})
    found = {}
    for key, entry in entries.items():
        suffix = next((suffix for suffix in _PARTS if key.endswith(suffix)), None)
        module = key.removeprefix(_KEY_PREFIX).removesuffix(suffix or "")
        if suffix is not None and key.startswith(_KEY_PREFIX) and module not in targets.served:
            known = [body for body in bodies if f"{body}.{module}" in targets.served]
            full = f"{_KEY_PREFIX}{known[0]}.{module}{suffix}" if len(known) == 1 else key
            if full not in entries:
                key, entry = full, replace(entry, name=full)
        found[key] = entry
    return found


def split_key(key: str, targets: TargetModules) -> tuple[str, str]:
    """Module path and part of a tensor's name: base_model.model.{module}.lora_A.weight and the like."""
    suffix = next((suffix for suffix in _PARTS if key.endswith(suffix)), None)
    if suffix is not None and key.startswith(_KEY_PREFIX):
        module = key[len(_KEY_PREFIX) : -len(suffix)]
        if module in targets.served and (targets.is_embedding_module(module) or _PARTS[suffix] != BASE_WEIGHT):
            return module, _PARTS[suffix]
    raise refuse(shorten(key), _name_error(key, suffix, targets))


def _name_error(key: str, suffix: str | None, targets: TargetModules) -> str:
    """What is wrong with a name, and what to do about it."""
    parts = key.split(".")
    if (name := _adapter_name(parts)) is not None:
        return (
            f"holds the adapter's name ({shorten(name, 40)!r}); save the adapter with PEFT's save_pretrained, which "
            "leaves it out"
        )
    for part, words in _OTHER_KINDS.items():
        if part in parts:
            return words
    # 1. A base weight, or LoRA on a parameter of a linear: PEFT wraps the module once for each parameter.
    module = key.removeprefix(_KEY_PREFIX)[: -len(suffix)] if suffix else key
    if module in targets.served and suffix in _BASE_PARTS:
        return "is the base model's own weight of a linear, which an adapter does not bring; save it without that"
    if "base_layer" in module.split("."):
        return "belongs to LoRA on a parameter of a linear, which is not served; train with target_modules of linears"
    if suffix is None:
        return f"is not a LoRA tensor's name; {_KEY_PREFIX}{{module}}.lora_A.weight or lora_B.weight is expected"
    # 2. The right module under another name.
    is_known = module in targets.served or module not in targets.reported
    if is_known and (known := _known_as(module, targets)) is not None:
        return f"the base model has this module as {shorten(known)}{_reason(key, parts)}; rename the tensors"
    # 3. No such module, or one that takes no adapters.
    return targets.refusal(shorten(module))


def _adapter_name(parts: list[str]) -> str | None:
    """The adapter's name, which PEFT has in the names of a model's tensors and leaves out of a file."""
    if len(parts) > 2 and parts[-1] == "weight" and parts[-3] in ("lora_A", "lora_B", "modules_to_save"):
        return parts[-2]
    return parts[-1] if len(parts) > 1 and parts[-2] == "trainable_tokens_delta" else None


def _known_as(module: str, targets: TargetModules) -> str | None:
    """The base model's name of a module that is called otherwise, if there is exactly one that it can be."""
    bare = ".".join(part for part in module.split(".") if part not in _WRAPPERS)
    return targets.known_as(bare)


def _reason(key: str, parts: list[str]) -> str:
    """Where another name comes from, where that is known."""
    if not key.startswith(_KEY_PREFIX):
        return f", and names begin with {_KEY_PREFIX}"
    wrapper = next((_WRAPPERS[part] for part in parts if part in _WRAPPERS), None)
    return f" (the name comes from {wrapper})" if wrapper else " (it was trained without the head, as another task)"

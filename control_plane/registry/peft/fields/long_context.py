"""Long-context adapters: the rotary embedding that a configuration names, completed by what the base model has.

An adapter that was trained for longer contexts than the base model computes with rotations of its own. PEFT's
configuration has no field for them; they are those of transformers' configuration, `rope_scaling` or `rope_parameters`,
or vLLM's `context_length` alone, which stands for linear scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from contract.context_length import config_context_length
from contract.rope_scaling import KINDS, TYPE_KEY, RopeScaling
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.safetensors_header import refuse, shorten

LENGTH = "context_length"
OBJECTS = ("rope_scaling", "rope_parameters")
FIELDS = (LENGTH, *OBJECTS)
_ORIGINAL = "original_max_position_embeddings"
_OLD_TYPE_KEY = "type"  # before transformers 4.43
_BATCH_DEPENDENT = ("dynamic", "longrope", "su")


def read_rope(config: Mapping[str, Any], base_model: BaseModel) -> RopeScaling | None:
    """The adapter's rotary embedding; None if it is the base model's. Raises InvalidAdapter."""
    given = [name for name in OBJECTS if config.get(name)]
    length = config.get(LENGTH)
    if not given and length is None:
        return None
    if len(given) > 1 and config[given[0]] != config[given[1]]:
        raise refuse(given[1], f"contradicts {given[0]}; leave one of the two out")
    field = given[0] if given else LENGTH
    base_rope, base_length = _base(base_model, field)
    if not given:
        return _linear(length, base_rope, base_length)
    if not isinstance(config[field], dict):
        raise refuse(field, "is not an object; give the parameters that transformers' config.json would have")
    parameters = _with_type(config[field], field)
    kind = parameters[TYPE_KEY]
    if kind in ("llama3", "yarn"):
        parameters.setdefault(_ORIGINAL, base_length)
    try:
        scaling = RopeScaling.of(
            _trained_length(kind, parameters, base_length) if length is None else length, parameters
        )
    except ValueError as error:
        raise refuse(field, shorten(str(error), 300)) from error
    return None if _is_base(scaling, base_rope, base_length) else scaling


def _base(base_model: BaseModel, field: str) -> tuple[Mapping[str, Any], int]:
    """The base model's rotary parameters and its longest context."""
    source = base_model.config.get("text_config")
    source = source if isinstance(source, dict) else base_model.config
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if not rope and "rope_theta" in source:
        rope = {TYPE_KEY: "default", "rope_theta": source["rope_theta"]}
    if not isinstance(rope, dict) or not rope:
        raise refuse(field, "is given, and the base model's config.json names no rotary embedding; remove it")
    if any(isinstance(value, dict) for value in rope.values()):
        raise refuse(field, "is given, and layers of the base model rotate in several ways, which cannot be scaled")
    try:
        length = config_context_length(base_model.config)
    except ValueError as error:
        raise refuse(field, str(error)) from error
    if length is None:
        raise refuse(field, "is given, and the base model's config.json names no longest context to compare with")
    return {"rope_theta": source.get("rope_theta"), **rope}, length


def _linear(length: Any, base_rope: Mapping[str, Any], base_length: int) -> RopeScaling | None:
    if type(length) is not int or length < 1:
        raise refuse(LENGTH, f"is {shorten(repr(length))}; a number of tokens is expected")
    if length <= base_length:
        return None
    if base_rope.get(TYPE_KEY, base_rope.get(_OLD_TYPE_KEY, "default")) != "default":
        raise refuse(
            LENGTH,
            f"is {length}, and the base model's own rotary embedding is scaled already; give the adapter's in "
            f"{OBJECTS[0]}",
        )
    try:
        return RopeScaling.of(length, {TYPE_KEY: "linear", "factor": float(math.ceil(length / base_length))})
    except ValueError as error:
        raise refuse(LENGTH, str(error)) from error


def _with_type(given: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The parameters with the present name of their kind, and without those that are null."""
    parameters = {name: value for name, value in given.items() if value is not None}
    old = parameters.pop(_OLD_TYPE_KEY, None)
    if old is None and TYPE_KEY not in parameters and parameters.keys() != {"rope_theta"}:
        raise refuse(field, f"has no {TYPE_KEY}; say which of {', '.join(KINDS)} the adapter was trained with")
    kind = parameters.setdefault(TYPE_KEY, old or "default")
    if kind in _BATCH_DEPENDENT:
        raise refuse(
            field,
            f"has the kind {kind}: its frequencies follow the longest request of a batch, so that one request would "
            f"change others; train with one of {', '.join(KINDS)}",
        )
    return parameters


def _trained_length(kind: Any, parameters: Mapping[str, Any], base_length: int) -> int:
    """The context that the parameters are made for, where the configuration does not say it."""
    factor, original = parameters.get("factor", 1.0), parameters.get(_ORIGINAL, base_length)
    if kind == "default" or type(factor) not in (int, float) or type(original) is not int or not factor <= 1e6:
        return base_length
    return max(int(factor * original), base_length)


def _is_base(scaling: RopeScaling, base_rope: Mapping[str, Any], base_length: int) -> bool:
    """Whether the configuration repeats what the base model does, as some trainers write it."""
    own = {name: value for name, value in base_rope.items() if value is not None}
    own.setdefault(TYPE_KEY, own.pop(_OLD_TYPE_KEY, "default"))
    wanted = dict(scaling.parameters)
    return scaling.context_length <= base_length and all(own.get(name) == value for name, value in wanted.items())

"""The rotary embedding that a long-context adapter was trained with: part of its manifest, read by both sides.

The parameters are those of transformers' `rope_parameters`. Kinds whose frequencies follow the longest request of a
batch (dynamic, longrope) are not among them: one request would change the tokens of others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPE_KEY = "rope_type"
_ORIGINAL = "original_max_position_embeddings"
# By kind: the parameters that it needs, and those that it may have.
_YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
KINDS: dict[str, tuple[set[str], set[str]]] = {
    "default": ({"rope_theta"}, set()),
    "linear": ({"factor"}, {"rope_theta"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}, {"rope_theta"}),
    "yarn": ({"factor", _ORIGINAL}, {"rope_theta"} | _YARN),
}
MAX_CONTEXT = 1 << 24  # tokens
MAX_NUMBER = 1e12  # of any parameter


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One setting. Equal settings are equal values, so that adapters share tables."""

    context_length: int  # tokens that the adapter was trained for
    parameters: tuple[tuple[str, str | float | int | bool], ...]  # by name

    @classmethod
    def of(cls, context_length: Any, parameters: Mapping[str, Any]) -> RopeScaling:
        """Checked values. Raises ValueError with the parameter, its value and what is expected."""
        if type(context_length) is not int or not 2 <= context_length <= MAX_CONTEXT:
            raise ValueError(f"context_length is {context_length!r}; 2 to {MAX_CONTEXT} tokens are expected")
        kind = parameters.get(TYPE_KEY)
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"{TYPE_KEY} is {kind!r}; one of {', '.join(KINDS)} is served")
        needed, optional = KINDS[kind]
        given = parameters.keys() - {TYPE_KEY}
        if missing := sorted(needed - given):
            raise ValueError(f"{missing[0]} is missing; {kind} needs {', '.join(sorted(needed))}")
        if unknown := sorted(map(str, given - needed - optional)):
            raise ValueError(f"{unknown[0][:80]} is not a parameter of {kind}; remove it")
        for name in sorted(given):
            _check(name, parameters[name])
        if kind == "llama3" and not parameters["low_freq_factor"] < parameters["high_freq_factor"]:
            raise ValueError("low_freq_factor is not below high_freq_factor")
        return cls(context_length, tuple(sorted(parameters.items())))

    def document(self) -> dict[str, Any]:
        """The fields of the manifest."""
        return {"context_length": self.context_length, "parameters": dict(self.parameters)}


def read_rope_scaling(document: Any) -> RopeScaling:
    """What `document` wrote. Raises ValueError."""
    if not isinstance(document, dict) or document.keys() != {"context_length", "parameters"}:
        raise ValueError("rope is not an object of context_length and parameters")
    if not isinstance(document["parameters"], dict):
        raise ValueError("rope.parameters is not an object")
    return RopeScaling.of(document["context_length"], document["parameters"])


def _check(name: str, value: Any) -> None:
    if name == "truncate":
        if type(value) is not bool:
            raise ValueError(f"truncate is {value!r}; true or false is expected")
    elif name == _ORIGINAL:
        if type(value) is not int or not 1 <= value <= MAX_CONTEXT:
            raise ValueError(f"{name} is {value!r}; 1 to {MAX_CONTEXT} tokens are expected")
    elif type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= MAX_NUMBER:
        raise ValueError(f"{name} is {value!r}; a number above 0 and up to {MAX_NUMBER:g} is expected")
    elif name == "factor" and value < 1:
        raise ValueError(f"factor is {value!r}; at least 1 is expected")

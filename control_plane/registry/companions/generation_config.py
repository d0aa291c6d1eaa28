"""Which fields of generation_config.json become defaults of an adapter's requests, and as what.

The fields that are read stand below. Every other field has no effect: beams, assisted generation and caches
are matters of the server or of each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.sampling import PARAMETERS
from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.companions.documents import GenerationDefaults
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import refuse

# Fields of transformers' GenerationConfig that are parameters of SamplingParams, by the same name.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Read too: do_sample; false means greedy decoding, and the fields above but repetition_penalty have no effect then.
# max_new_tokens: max_tokens. eos_token_id: ids that end a completion, in place of the base model's.
MAX_EOS_IDS = 256
_PARAMETERS = {parameter.name: parameter for parameter in PARAMETERS}


def read_defaults(config: Mapping[str, Any], vocab_size: int) -> GenerationDefaults:
    """The defaults in a generation_config.json. Raises InvalidAdapter with all values that cannot be served."""
    problems = Problems()
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        problems.add(_violation("do_sample", do_sample, "it must be true or false"))
    sampling: dict[str, float] = {}
    for name in SAMPLING_FIELDS:
        value = config.get(name)
        if value is None or (do_sample is False and name != "repetition_penalty"):
            continue
        if name == "top_k" and (value == 0 or (_is_number(value) and value >= vocab_size)):
            continue  # keeps all tokens
        parameter = _PARAMETERS[name]
        if not _is_number(value) or not parameter.is_valid(value) or (name == "top_k" and not isinstance(value, int)):
            problems.add(_violation(name, value, f"{_bounds(name)}, or leave the field out"))
            continue
        sampling[name] = value
    if do_sample is False:
        sampling["temperature"] = 0.0
    max_tokens = config.get("max_new_tokens")
    if max_tokens is not None and not (_is_count(max_tokens) and 1 <= max_tokens < 1 << 31):
        problems.add(_violation("max_new_tokens", max_tokens, "it must be a count of at least 1"))
    eos_token_ids = None
    with problems.collected():
        eos_token_ids = _eos_token_ids(config.get("eos_token_id"), vocab_size)
    problems.raise_all()
    return GenerationDefaults(sampling, max_tokens, eos_token_ids)


def _violation(name: str, value: Any, expected: str) -> FieldViolation:
    return FieldViolation(f"generation_config.{name}", f"is {value!r:.60}; {expected}")


def _eos_token_ids(value: Any, vocab_size: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not 1 <= len(ids) <= MAX_EOS_IDS or not all(_is_count(each) for each in ids):
        raise InvalidAdapter(_violation("eos_token_id", value, f"it must be an id, or a list of 1 to {MAX_EOS_IDS}"))
    if unknown := [each for each in ids if each >= vocab_size]:
        raise refuse(
            "generation_config.eos_token_id", f"has the id {unknown[0]}, not below the vocabulary size {vocab_size}"
        )
    return tuple(sorted(set(ids)))


def _bounds(name: str) -> str:
    parameter = _PARAMETERS[name]
    if parameter.highest is None:
        return f"it must be a count of at least {parameter.lowest:g}"
    lowest = f"above {parameter.lowest:g} and at most" if parameter.is_above_lowest else f"from {parameter.lowest:g} to"
    return f"it must be a number {lowest} {parameter.highest:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

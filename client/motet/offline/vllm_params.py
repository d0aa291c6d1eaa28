"""Sampling parameters as users of vLLM write them: other names and values for the same, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from motet.errors import invalid_field
from motet.requests import GenerateOptions

_CONSTRAINT = "give constraint=, a JsonSchema, JsonObject, Regex, Choices, Lark or StructuralTags"
_BEAMS = "give beam_search=BeamSearch(width, length_penalty=...)"
# Parameters of SamplingParams that do not exist here: values at which they change nothing, and what to do instead.
_OF_VLLM: Mapping[str, tuple[tuple[object, ...], str]] = {
    "allowed_token_ids": ((), _CONSTRAINT),
    "bad_words": (([],), "give logit_bias={token id: -100}"),
    "detokenize": ((True,), "leave it out: results have texts and token ids"),
    "early_stopping": ((False,), _BEAMS),
    "extra_args": (({},), "leave it out"),
    "guided_decoding": ((), _CONSTRAINT),
    "length_penalty": ((1.0,), _BEAMS),
    "logits_processors": (([],), "give logit_bias or a constraint: code of a request is never run"),
    "output_kind": ((), "leave it out: results are whole; llm.client.generate() streams"),
    "spaces_between_special_tokens": ((True,), "leave it out: texts are as the tokenizer decodes them"),
    "structured_outputs": ((), _CONSTRAINT),
    "truncate_prompt_tokens": ((), "cut the prompt, and give its token ids"),
    "use_beam_search": ((False,), _BEAMS),
}
# Values that stand for "off", or for "drawn", where None does here.
_UNSET: Mapping[str, tuple[int, ...]] = {"top_k": (-1, 0), "seed": (-1,)}
_OTHER_NAMES: Mapping[str, str] = {"include_stop_str_in_output": "include_stop"}


def options_of(sampling: Mapping[str, Any]) -> GenerateOptions:
    """The same as options of generate(). Raises InvalidArgument for a name that is not known, with the next step."""
    options: dict[str, Any] = {}
    for name, value in sampling.items():
        if name in _OF_VLLM:
            neutral, advice = _OF_VLLM[name]
            if value is not None and value not in neutral:
                raise invalid_field(
                    f"sampling.{name}", f"is a parameter of vLLM's SamplingParams and not of Motet's: {advice}"
                )
        elif name in _OTHER_NAMES:
            own = _OTHER_NAMES[name]
            if own in sampling:
                raise invalid_field(f"sampling.{name}", f"is vLLM's name of {own}, which is given too; leave one out")
            options[own] = value
        elif name not in GenerateOptions.__annotations__:
            raise invalid_field(f"sampling.{name}", "is not known; SamplingParams lists what there is")
        else:
            is_unset = isinstance(value, int) and not isinstance(value, bool) and value in _UNSET.get(name, ())
            options[name] = None if is_unset else value
    return cast(GenerateOptions, options)

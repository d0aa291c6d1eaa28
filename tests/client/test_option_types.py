"""Values of a wrong type, and values that no number of the wire holds, are refused under the name of the option."""

from __future__ import annotations

from typing import Any, cast

import pytest
from motet import BeamSearch, InvalidArgument, JsonSchema
from motet.requests import GenerateOptions, generate_request

TEXTS = ("adapter", "adapter_digest", "cache_salt", "model_fingerprint", "request_id", "routing_key")
NOT_SENT = ("tenant", "add_generation_prompt", "continue_final_message", "template_kwargs", "tools")  # or with messages
NAMES = sorted(GenerateOptions.__annotations__.keys() - {*TEXTS, *NOT_SENT})


def request_with(name: str, value: object) -> Any:
    return generate_request("Hi", cast(GenerateOptions, {name: value}))


@pytest.mark.parametrize(
    "value", [object(), [object()], {"a": object()}, 1j, b"a"], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises((InvalidArgument, TypeError, ValueError)) as raised:
        request_with(name, value)
    assert name.removesuffix("_s") in str(raised.value)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "delta_wait_s"])
@pytest.mark.parametrize("value", ["1", True, 10**400])
def test_a_number_is_a_number(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"{name.removesuffix('_s')}: is .*; give a number"):
        request_with(name, value)


@pytest.mark.parametrize("name", ["n", "max_tokens", "seed", "top_k", "stop_token_ids"])
def test_a_truth_is_no_integer(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is True; give an integer"):
        request_with(name, [True] if name == "stop_token_ids" else True)


def test_truths_are_no_token_ids_of_a_prompt() -> None:
    with pytest.raises(InvalidArgument, match="prompt: is True; give an integer"):
        generate_request([True, False], {})


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens", "token_bytes", "include_stop"])
@pytest.mark.parametrize("value", ["false", 2, 0.5])
def test_a_truth_is_true_or_false(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: is .*; give True or False"):
        request_with(name, value)


def test_the_parts_of_a_beam_search_are_checked_too() -> None:
    with pytest.raises(InvalidArgument, match="length_penalty: is 'x'; give a number"):
        request_with("beam_search", BeamSearch(2, length_penalty=cast(float, "x")))
    with pytest.raises(InvalidArgument, match="early_stopping: is 'x'; give True or False"):
        request_with("beam_search", BeamSearch(2, early_stopping=cast(bool, "x")))


@pytest.mark.parametrize("name", NAMES)
def test_none_is_as_if_left_out(name: str) -> None:
    assert request_with(name, None) == generate_request("Hi", {})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (nested(5000), "maximum recursion depth"),
        ({"minimum": float("nan")}, "float values"),
        ({"const": object()}, "not JSON serializable"),
        ({(1,): 2}, "keys must be str"),
    ],
)
def test_a_schema_that_is_no_json_is_refused_by_name(schema: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^constraint.json_schema: cannot be written as JSON: .*{said}"):
        request_with("constraint", JsonSchema(schema))

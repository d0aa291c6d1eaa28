"""What the author of a schema reads when it is refused: the keyword, its places, the next step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from control_plane.constraints.compile_process import compiled
from control_plane.constraints.schema_refusals import explained
from tests.control_plane.constraints.schema_suite import vocabulary

LEAVE = "leave it out, and check the text yourself"
EVERY: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"not": {}, "a/b": {"not": {}}}}, f'"not" is not supported at /properties/a~1b/not; {LEAVE}'),
    (
        {"if": {"minimum": 1}, "else": {"maximum": 2}},
        '"else", "if" are not supported at /if, /else; leave them out, and check the text yourself',
    ),
    (
        {"items": {"oneOf": [{"type": "number", "minimum": 1}, {"type": "number", "maximum": 2}]}},
        '"oneOf" is not supported at /items/oneOf; use "anyOf" where a value fits one branch only',
    ),
    (
        {"properties": {"a": {"format": "uuid"}, "b": {"format": "iri"}}},
        '"format" "iri" is not supported at /properties/b/format; leave it out, or use "pattern"',
    ),
    ({"maxItems": 2.0}, '"maxItems" is 2.0 at /maxItems; give an integer of at least 0, without a point'),
    (
        {"$ref": "https://other.example/a"},
        '"$ref" leads to "https://other.example/a", which is not in the schema; put it into "$defs"',
    ),
    (
        {"$ref": "#"},
        'it allows no text at all; look for a "$ref" that leads back to itself without an end at /$ref',
    ),
]


@pytest.mark.parametrize(("schema", "text"), EVERY)
def test_a_refusal_names_keyword_place_and_next_step(schema: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refused:
        compiled({"kind": "json_schema", "value": json.dumps(schema)}, vocabulary())
    assert str(refused.value) == text


def test_values_that_look_like_keywords_are_no_places() -> None:
    schema = {"const": {"not": 1}, "enum": [{"not": 1}], "allOf": [{"not": {}}] * 5}
    found = explained('Unimplemented keys: ["not"]', schema)
    assert found == f'"not" is not supported at /allOf/0/not, /allOf/1/not, /allOf/2/not and 2 more places; {LEAVE}'


def test_a_grammar_without_any_text_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"^it allows no text at all$"):
        compiled({"kind": "lark", "value": "start: start"}, vocabulary())

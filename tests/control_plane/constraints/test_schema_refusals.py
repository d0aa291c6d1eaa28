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
    ({"maximum": 10**400}, "it has a number of 401 digits, which is too large; give at most 15"),
    (
        {"type": "number", "maximum": 1e308},
        "no float can be written between its bounds, min=None, max=Some(1e308); give bounds that are closer to 0",
    ),
    (
        {"$ref": "#", "type": "object"},
        "circular references with sibling keys are not supported: json-schema:///# at /$ref; leave out what stands "
        'beside the "$ref"',
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


UNSUPPORTED = '{"properties": {"a": {"not": {}}}}'
TAGS = [("f", '{"type": "null"}'), ("g", UNSUPPORTED)]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (
            "lark",
            f'start: a\na: %json {{"type": "null"}} "x" | %json {{"type": "object",\n{UNSUPPORTED[1:]} "y"',
            f'the JSON schema in line 2: "not" is not supported at /properties/a/not; {LEAVE}',
        ),
        (
            "structural_tags",
            [{"trigger": "<", "begin": f"<{name}>", "json_schema": schema, "end": "x"} for name, schema in TAGS],
            f'tags[1].json_schema: "not" is not supported at /properties/a/not; {LEAVE}',
        ),
    ],
)
def test_a_schema_within_a_grammar_is_explained_as_one_by_itself(kind: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError) as refused:
        compiled({"kind": kind, "value": value}, vocabulary())
    assert str(refused.value) == text


def test_other_faults_of_a_grammar_keep_their_place() -> None:
    with pytest.raises(ValueError, match=r'^at 2\(4\): unknown name: "b"'):
        compiled({"kind": "lark", "value": "start: a\na: b"}, vocabulary())
    with pytest.raises(ValueError, match=r"^the JSON schema in line 1: "):
        compiled({"kind": "lark", "value": 'start: %json {"type": "text"}'}, vocabulary())


@pytest.mark.parametrize("attributes", ["temperature=0.0", "lazy, temperature = 1"])
def test_a_temperature_of_a_rule_is_refused(attributes: str) -> None:
    grammar = f'start: a "x"\na[{attributes}]: /b*/'
    says = "^the rule 'a' has a temperature, which is not followed; give that of the request$"
    with pytest.raises(ValueError, match=says):
        compiled({"kind": "lark", "value": grammar}, vocabulary())
    with pytest.raises(ValueError, match=says):
        tag = {"trigger": "<", "begin": "<f>", "lark": grammar, "end": "x"}
        compiled({"kind": "structural_tags", "value": [tag]}, vocabulary())


def test_texts_that_look_like_a_temperature_are_none() -> None:
    compiled(
        {"kind": "lark", "value": 'start: "a[temperature=0]: " /[temperature=1]/ b\nb[capture="c"]: "x"'}, vocabulary()
    )

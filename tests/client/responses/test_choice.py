"""Which template reads a model's completions, and what is refused of one that a checkpoint brings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from motet.responses import ResponseTemplate, TemplateError, choose_template, load_template
from motet.responses.bundled import BUNDLED
from motet.responses.templates import CallForm

CALLS: dict[str, Any] = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
OWN: dict[str, Any] = {"fields": {"tool_calls": CALLS, "content": {}}}
FIXED_NAME = {**CALLS, "transform": {"function": {"name": "f", "arguments": "{content}"}}}


def fields(template: ResponseTemplate | None) -> dict[str, CallForm | None] | None:
    return None if template is None else {name: field.call for name, field in template.fields.items()}


def test_the_operators_choice_counts_then_the_checkpoints_own_then_the_marks() -> None:
    hermes, mistral = (fields(load_template(dict(BUNDLED[name]))) for name in ("hermes", "mistral"))
    marks = '<tool_call>{"name": 1}</tool_call>'
    assert hermes != mistral != fields(load_template(OWN)) != hermes
    assert fields(choose_template("", marks)) == hermes
    assert fields(choose_template(json.dumps(OWN), marks)) == fields(load_template(OWN))
    assert fields(choose_template(json.dumps(OWN), marks, override="mistral")) == mistral
    assert choose_template(json.dumps(OWN), marks, override="none") is None
    assert choose_template("", "no marks at all") is None


@pytest.mark.parametrize(
    ("own", "override", "words"),
    [
        ("{", "", "not valid JSON"),
        ("[" * 100_000, "", "not valid JSON"),
        ("[]", "", "type list"),
        ("", "qwen", "hermes, llama3, mistral"),
    ],
)
def test_a_choice_that_cannot_be_used_is_refused(own: str, override: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        choose_template(own, "", override=override)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({**OWN, "colour": 1}, "unknown keys: colour"),
        ({**OWN, "version": 2}, "version must be 1"),
        ({"fields": {}}, "1 to 16 fields"),
        ({"fields": {f"f{number}": {"open": "x"} for number in range(17)}}, "1 to 16 fields"),
        ({"fields": {"content": {}, "thinking": {}}}, "both have no opening mark"),
        ({"fields": {"content": []}}, "must be an object"),
        ({"fields": {"content": {"colour": 1}}}, "unknown keys: colour"),
        ({"fields": {"content": {"content_args": 1}}}, "content_args must be an object"),
        ({"fields": {"content": {"join": 1}}}, "join must be a string"),
        ({"fields": {"content": {"content": "json"}}}, "only plain text"),
        ({"fields": {"content": {"open": "a", "open_pattern": "b"}}}, "both open and open_pattern"),
        ({"fields": {"content": {"open": ""}}}, "none of them empty"),
        ({"fields": {"content": {"open": [1]}}}, "a string or a list of strings"),
        ({"fields": {"content": {"open_pattern": 1}}}, "must be a string"),
        ({"fields": {"content": {"open_pattern": "("}}}, "open"),
        ({"fields": {"content": {"open_pattern": r"(a)\1"}}}, "open"),
        (
            {"fields": {"tool_calls": {key: value for key, value in CALLS.items() if key != "open"}}},
            "need an opening mark",
        ),
        ({"fields": {"tool_calls": {**CALLS, "content": "xml"}}}, "json without content_args, or pythonic"),
        (
            {"fields": {"tool_calls": FIXED_NAME}},
            "transform must have",
        ),
    ],
)
def test_a_template_with_what_is_not_supported_is_refused_by_name(spec: Any, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        load_template(spec)

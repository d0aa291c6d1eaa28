"""Grammars of calls: random texts of each, token by token, are calls that the parser reads and the schemas allow."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import llguidance
import pytest
from motet.inputs.constraints import (
    Choices,
    Constraint,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
    StructuralTags,
)
from motet.responses import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    GrammarError,
    Reasoning,
    ResponseForm,
    call_grammar,
    content_grammar,
    load_template,
)
from motet.responses.bundled import BUNDLED
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "unit": {"enum": ["C", None, True]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "boolean"}},
}
SCHEMAS = {"weather": WEATHER, "now": {"type": "object"}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]


class Vocabulary:
    """One token for each byte, and with `marks` one for each mark."""

    def __init__(self, *, marks: bool) -> None:
        symbols = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        self.tokenizer = Tokenizer(models.BPE(symbols, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(["<end>", *(MARKS if marks else [])])
        self.size = self.tokenizer.get_vocab_size()
        ids = self.tokenizer.get_vocab()
        self.end = ids["<end>"]
        self.marks = {mark: ids[mark] for mark in MARKS} if marks else {}
        self.guide = llguidance.LLTokenizer(self.tokenizer.to_str(), n_vocab=self.size, eos_token=[self.end])

    def written(self, grammar: str, draw: random.Random, *, most: int = 400, begin: Sequence[str] = ()) -> str | None:
        """A random text of the grammar, `begin` first, whose marks stand alone; None if it is not over after `most`."""
        matcher = llguidance.LLMatcher(self.guide, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        tokens: list[int] = []
        for part in begin:
            for token in [self.marks[part]] if part in self.marks else self.tokenizer.encode(part).ids:
                assert matcher.consume_token(token) and not matcher.is_error(), part
                tokens.append(token)
        while len(tokens) < most:
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            allowed = [token for token in range(self.size) if mask[token // 8] >> (token % 8) & 1]
            if self.end in allowed and (len(allowed) == 1 or draw.random() < 0.3):
                text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
                return text
            wanted = [token for token in allowed if token in self.marks.values() and token != self.end]
            tokens.append(draw.choice(wanted if wanted and draw.random() < 0.2 else allowed))
            if tokens[-1] == self.end:
                tokens.pop()
                continue
            matcher.consume_token(tokens[-1])
        return None


@pytest.fixture(scope="module", params=[False, True], ids=["bytes", "marks"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(marks=request.param)


def form_of(name: str, vocabulary: Vocabulary, prompt: str = "") -> ResponseForm:
    return ResponseForm(load_template(dict(BUNDLED[name])), prompt, "", vocabulary.marks)


def calls_in(form: ResponseForm, text: str) -> tuple[list[str], bool]:
    """Names of the calls, which are whole and valid; and whether there is content."""
    parser = form.parser()
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    has_content = False
    for event in parser.push(text) + parser.finish():
        match event:
            case CallStart(index, _, name):
                names[index], arguments[index] = name, ""
            case CallArguments(index, piece):
                arguments[index] += piece
            case CallEnd(index, is_complete):
                assert is_complete, text
                jsonschema.validate(json.loads(arguments[index]), SCHEMAS[names[index]])
            case Content():
                has_content = True
    return list(names.values()), has_content


@pytest.mark.parametrize("name", BUNDLED)
def test_required_calls_are_all_there_is(name: str, vocabulary: Vocabulary) -> None:
    form = form_of(name, vocabulary)
    draw = random.Random(1)
    for is_parallel in (True, False):
        grammar = call_grammar(form, TOOLS, is_required=True, is_parallel=is_parallel)
        assert grammar is not None
        texts = [text for _ in range(12) if (text := vocabulary.written(grammar, draw)) is not None]
        assert len(texts) > 3
        for text in texts:
            names, has_content = calls_in(form, text)
            assert names and not has_content, text
            assert is_parallel or len(names) == 1


@pytest.mark.parametrize("name", BUNDLED)
def test_a_name_that_begins_another_one_is_kept_apart(name: str, vocabulary: Vocabulary) -> None:
    form, draw = form_of(name, vocabulary), random.Random(5)
    names = ["get", "get_now", "get_now_all"]
    tools = [{"type": "function", "function": {"name": one, "parameters": {"type": "object"}}} for one in names]
    for wanted in names:
        grammar = call_grammar(form, tools, is_required=True, names=[wanted], is_parallel=False)
        assert grammar is not None
        texts = [text for _ in range(6) if (text := vocabulary.written(grammar, draw)) is not None]
        assert texts
        for text in texts:
            found = [event.name for event in form.parser().push(text) if isinstance(event, CallStart)]
            assert found == [wanted], text


@pytest.mark.parametrize("name", BUNDLED)
def test_calls_within_free_text_are_valid_too(name: str, vocabulary: Vocabulary) -> None:
    form = form_of(name, vocabulary)
    grammar = call_grammar(form, TOOLS, is_required=False)
    assert grammar is not None
    draw = random.Random(2)
    texts = [text for _ in range(30) if (text := vocabulary.written(grammar, draw)) is not None]
    found = [calls_in(form, text) for text in texts]
    assert any(has_content for _, has_content in found)
    if {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral"}.get(next(iter(vocabulary.marks), "")) == name:
        assert any(names for names, _ in found)


def test_reasoning_that_the_prompt_began_comes_first(vocabulary: Vocabulary) -> None:
    form = form_of("hermes", vocabulary, "<|im_start|>assistant\n<think>")
    grammar = call_grammar(form, TOOLS, is_required=True)
    assert grammar is not None
    matcher = llguidance.LLMatcher(vocabulary.guide, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    parts = ["Hm.", "</think>", "\n", "<tool_call>", '{"name":"now","arguments":{}}', "</tool_call>"]
    for part in parts:
        tokens = [vocabulary.marks[part]] if part in vocabulary.marks else vocabulary.tokenizer.encode(part).ids
        for token in tokens:
            assert matcher.consume_token(token) and not matcher.is_error(), part
    assert matcher.is_accepting()
    assert calls_in(form, "".join(parts)) == (["now"], False)


CONSTRAINTS: dict[str, tuple[Constraint, str]] = {  # and an expression that the content has to match
    "schema": (JsonSchema({"enum": ["a/b", 1, None]}), r'"a/b"|1|null'),
    "schema text": (JsonSchema('{"type": "boolean"}'), "true|false"),
    "any": (JsonSchema("true"), r"(?s:.+)"),
    "object": (JsonObject(), r"(?s:\{.*\})"),
    "regex": (Regex("a{2}/|\\\\/\nb|\u00fc\\n"), "aa/|\\\\/\nb|\u00fc"),
    "choices": (Choices(['"x"', "y\\", "\u00fc\n/z"]), '"x"|y\\\\|\u00fc\n/z'),
    "lark": (Lark("start: calls thought\ncalls: /[ab]/\nthought: /c{2}/"), "[ab]cc"),
}
THINKING = "<|im_start|>assistant\n<think>"


def read_in(form: ResponseForm, text: str) -> tuple[str, bool, list[str]]:
    """The content, whether there is reasoning, and the names of the calls."""
    parser = form.parser()
    events = parser.push(text) + parser.finish()
    content = "".join(event.text for event in events if isinstance(event, Content))
    has_reasoning = any(isinstance(event, Reasoning) for event in events)
    return content, has_reasoning, [event.name for event in events if isinstance(event, CallStart)]


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_content_behind_reasoning_follows_its_constraint(kind: str, vocabulary: Vocabulary) -> None:
    constraint, expected = CONSTRAINTS[kind]
    draw, found = random.Random(kind), set()
    for prompt in ("", THINKING):
        form = form_of("hermes", vocabulary, prompt)
        grammar = content_grammar(form, constraint)
        if not prompt and not vocabulary.marks:
            assert grammar is None  # no token begins reasoning
            continue
        assert grammar is not None
        begin = ["Hm.", "</think>"] if prompt else []
        texts = [text for _ in range(20) if (text := vocabulary.written(grammar, draw, begin=begin)) is not None]
        assert len(texts) > 3
        for text in texts:
            content, has_reasoning, _ = read_in(form, text)
            assert re.fullmatch(expected, content), (text, content)
            found.add((bool(prompt), has_reasoning))
    assert (True, True) in found and ((False, False) in found) == bool(vocabulary.marks)


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral-args"])
def test_calls_may_come_in_place_of_the_content_of_a_constraint(name: str, vocabulary: Vocabulary) -> None:
    form, draw, num_calls = form_of(name, vocabulary), random.Random(4), 0
    for kind, (constraint, expected) in CONSTRAINTS.items():
        grammar = content_grammar(form, constraint, TOOLS)
        assert grammar is not None
        texts = [text for _ in range(30) if (text := vocabulary.written(grammar, draw)) is not None]
        found = [read_in(form, text) for text in texts]
        assert any(content for content, _, _ in found), kind
        num_calls += sum(bool(calls) for _, _, calls in found)
        for content, _, calls in found:
            assert not content if calls else re.fullmatch(expected, content), (kind, content)
    assert num_calls


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_a_constraint_that_begins_as_calls_do_is_refused_beside_tools(name: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError) as caught:
        content_grammar(form_of(name, vocabulary), JsonObject(), TOOLS, place="response_format")
    assert caught.value.field == "response_format"


def test_a_constraint_without_a_rule_is_used_as_it_is(vocabulary: Vocabulary) -> None:
    form = form_of("hermes", vocabulary, THINKING)
    tags = StructuralTags([StructuralTag("<a", "<a>")])
    for constraint in (tags, JsonSchema("{"), JsonSchema("1"), Choices([]), Choices(["a", ""]), Regex("")):
        assert content_grammar(form, constraint) is None
    with pytest.raises(GrammarError, match="tags"):
        content_grammar(form, tags, TOOLS)
    with pytest.raises(GrammarError, match="x-guidance"):
        content_grammar(form, JsonSchema({"x-guidance": {}}))


def test_nothing_is_constrained_without_a_reason(vocabulary: Vocabulary) -> None:
    assert call_grammar(form_of("hermes", vocabulary), TOOLS[1:], is_required=False) is None


def function(name: object = "a", **fields: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, **fields}}]


@pytest.mark.parametrize(
    ("form", "tools", "field"),
    [
        ("hermes", function(1), "tools[0].function"),
        ("hermes", function("a" * 300), "tools[0].function"),
        ("hermes", function(parameters=1), "tools[0].function.parameters"),
        ("hermes", function(parameters={"x-guidance": {}}), "tools[0].function.parameters"),
        ("hermes", function(parameters={"type": "array"}), "tools[0].function.parameters.type"),
        ("hermes", function(strict="yes"), "tools[0].function.strict"),
        ("hermes", [], "tools"),
        ("mistral-args", function("a b"), "tools[0].function"),
        ("pythonic", function("a-b"), "tools[0].function"),
        ("pythonic", function(parameters={"anyOf": []}), "tools[0].function.parameters"),
        ("pythonic", function(parameters={"properties": {"a-b": {}}}), "tools[0].function.parameters.properties"),
        ("pythonic", function(parameters={"properties": {"class": {}}}), "tools[0].function.parameters.properties"),
        ("pythonic", function(parameters={"required": ["b"]}), "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_named(form: str, tools: list[Any], field: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError) as caught:
        call_grammar(form_of(form, vocabulary), tools, is_required=True)
    assert caught.value.field == field


def test_a_template_without_calls_or_with_unwritten_marks_is_refused(vocabulary: Vocabulary) -> None:
    templates: list[dict[str, Any]] = [
        {"content": {}},
        {"content": {}, "tool_calls": {"open_pattern": "a$", "close": "b", "content": "json", "transform": {
            "type": "function", "function": "{content}"}}},
    ]  # fmt: skip
    for fields in templates:
        with pytest.raises(GrammarError, match="response template"):
            call_grammar(ResponseForm(load_template({"fields": fields})), TOOLS, is_required=True)

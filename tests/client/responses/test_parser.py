"""Completions are read as transformers reads them, however their text is cut, and malformed calls come out as content."""

# ruff: noqa: E501, RUF005 - completions as models write them

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from motet.responses import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    ResponseParser,
    load_template,
)
from motet.responses.bundled import BUNDLED, recognise
from transformers.utils.chat_parsing import ResponseParser as OracleParser

HERMES = [
    "Hello.",
    '<think>\nWhy <b> not?\n</think>\n\nSo: \n<tool_call>\n{"name": "f", "arguments": {"a": "x</y>\\n\\u00e9", "b": [1, {"c": null}]}}\n</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call><|im_end|>',
    '<tool_call>{"name": "f", "id": 5, "arguments": -1.5e3}</tool_call> <|im_end|>\n<|endoftext|>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
    "a < b <tool <think>x",
]
MISTRAL = ['[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"arguments": {"b": 2}, "name": "g"}]', "plain [TOOL"]
ORACLE_CASES = [
    *(("hermes", text) for text in HERMES),
    *(("mistral", text) for text in MISTRAL),
    ("mistral-args", '[THINK]hm[/THINK][TOOL_CALLS]f[ARGS]{"a": [true]}'),
    ("llama3", '{"name": "f", "parameters": {"a": "b"}}'),
    ("llama3", '\n<|python_tag|>{"name": "f", "parameters": {}}'),
]
MALFORMED = [
    ("hermes", "a <tool_call>not json</tool_call> b", "a <tool_call>not json</tool_call> b"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"', ""),
    ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} x</tool_call>y', "x</tool_call>y"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": nul}}</tool_call>', "}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "b": "\n"}}</tool_call>', None),
    ("hermes", '<tool_call>[{"name": "f"}]</tool_call>', '<tool_call>[{"name": "f"}]</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "f", "arguments": 01}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>', ', "arguments": "no JSON"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1} {}"}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "f", "arguments": "[1"}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "f", "arguments": "NaN"}</tool_call>', None),
    ("hermes", '<tool_call>{"arguments": "{a: 1}", "name": "f"}</tool_call>', None),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 7]', ", 7]"),
    ("llama3", "Hello {you}<|eot_id|>", "Hello {you}"),
    ("llama3", '{"foo": [1]} and more', '{"foo": [1]} and more'),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list"),
    ("pythonic", "[f(a=open)] x", None),
    ("pythonic", "[f(1)]", None),
]


def read(name: str, pieces: Iterable[str], *, only_first_call: bool = False) -> list[Event]:
    return read_in(BUNDLED[name], pieces, only_first_call=only_first_call)


def read_in(template: Mapping[str, Any], pieces: Iterable[str], *, only_first_call: bool = False) -> list[Event]:
    ids = (f"id{number}" for number in itertools.count())
    parser = ResponseParser(load_template(dict(template)), only_first_call=only_first_call, new_id=lambda: next(ids))
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish()


def summary(events: Iterable[Event]) -> dict[str, Any]:
    """What a completion says, its texts joined."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events:
        if isinstance(event, Content):
            found["content"] += event.text
        elif isinstance(event, Reasoning):
            found["reasoning"] += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(found["calls"])
            found["calls"].append([event.call_id, event.name, "", None])
        elif isinstance(event, CallArguments):
            found["calls"][event.index][2] += event.text
        else:
            found["calls"][event.index][3] = event.is_complete
    return found


def by_oracle(name: str, text: str) -> dict[str, Any]:
    oracle = OracleParser(json.loads(json.dumps(BUNDLED[name])), prefix="")
    events = [*oracle.feed(text), *oracle.finalize()[1]]
    texts = {"content": "", "reasoning_content": ""}
    calls = []
    for event in events:
        if event["type"] == "region_chunk" and event["field"] in texts:
            texts[event["field"]] += event["text"]
        elif event["type"] == "region_close" and event["field"] == "tool_calls":
            value = event["value"]
            calls += [one["function"] for one in (value if isinstance(value, list) else [value])]
    pairs = [(call["name"], call.get("arguments", call.get("parameters"))) for call in calls]
    return {"content": texts["content"].strip(), "reasoning": texts["reasoning_content"].strip(), "calls": pairs}


def cuts(text: str) -> Iterator[list[str]]:
    """Whole, each character by itself, and all ways to cut it once or twice (of long ones: all once, some twice)."""
    yield [text]
    yield list(text)
    for first in range(1, len(text)):
        yield [text[:first], text[first:]]
        for second in range(first + 1, len(text), 1 + len(text) // 16):
            yield [text[:first], text[first:second], text[second:]]


@pytest.mark.parametrize(("name", "text"), ORACLE_CASES)
def test_every_cut_gives_what_transformers_reads(name: str, text: str) -> None:
    expected = by_oracle(name, text)
    for pieces in cuts(text):
        found = summary(read(name, pieces))
        for (given_name, value), (_, found_name, arguments, is_complete) in zip(
            expected["calls"], found["calls"], strict=True
        ):
            assert (found_name, is_complete) == (given_name, True), pieces
            assert (arguments == value) if isinstance(value, str) else (json.loads(arguments) == value), pieces
        assert (found["content"], found["reasoning"]) == (expected["content"], expected["reasoning"]), pieces


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'So: <tool_call>\n{"name": "f", "arguments": {"a": "x</y", "b": [1]}}\n</tool_call>'),
        ("hermes", 'So: <tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {"a": "}"}}'),
        ("mistral", 'So: [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'),
        ("hermes", r'So: <tool_call>{"name": "f", "arguments": "{\"a\": \"x\\n\u00e9 \ud83d\ude00\"}"}</tool_call>'),
        ("mistral-args", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("pythonic", "[f(a=1, b='x')]"),
        ("pythonic", r"""[f(a='x\n\u00e9\101\U0001F600"', b="y" 'z', c=["d"])]"""),
    ],
)
def test_what_is_left_of_a_call_that_the_end_cuts_is_no_content(name: str, text: str) -> None:
    ((_, _, arguments, is_complete),) = summary(read(name, [text]))["calls"]
    assert is_complete
    num_cut = 0
    for end in range(len(text)):
        found = summary(read(name, [text[:end]]))
        assert summary(read(name, text[:end])) == found
        for _, found_name, part, _ in found["calls"]:
            num_cut += 1
            assert (found_name, arguments[: len(part)]) == ("f", part)
            assert found["content"] == ("So:" if text.startswith("So:") else "")
    assert num_cut


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"a long te', "", [("f", '{"a": "a long te')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "no JSON', ', "arguments": "no JSON', [("f", "")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": " ', "", [("f", "")]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{"na', '<tool_call>{"na', [("f", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "f"}, ', "", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "f"}, {"arguments": {"a": "b', ', {"arguments": {"a": "b', [("f", "{}")]),
        ("mistral-args", "[TOOL_CALLS]f[ARGS]", "", [("f", "")]),
        ("mistral-args", "[TOOL_CALLS]f[ARGS] ", "", [("f", "")]),
        ("mistral-args", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR", []),
        ("pythonic", '[f(a="a long te', "", [("f", '{"a": "a long te')]),
        ("pythonic", r'[f(p="C:\\12', "", [("f", r'{"p": "C:\\12')]),
        ("pythonic", r'[f(p="C:\1', "", [("f", '{"p": "C:')]),
        ("pythonic", r'[f(p="a \N{LATIN SMALL LETTER', "", [("f", '{"p": "a ')]),
        ("pythonic", '[f(p="""abc', 'p="""abc', [("f", "")]),
        ("pythonic", '[f(p="a\nb', 'p="a\nb', [("f", "")]),
        ("pythonic", "[f(a=1, b=[1, 2", "", [("f", '{"a": 1')]),
        ("pythonic", "[f(), ", "", [("f", "{}")]),
        ("pythonic", "[f(), g", ", g", [("f", "{}")]),
    ],
)
def test_what_came_of_a_cut_call_is_kept(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in cuts(text):
        found = summary(read(name, pieces))
        assert (found["content"], [(call[1], call[2]) for call in found["calls"]]) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'So: <tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call> x'),
        ("hermes", 'So: <tool_call>{"name": "f"}</tool_call><tool_call>no call</tool_call> x'),
        ("mistral", 'So: [TOOL_CALLS][{"name": "f"}, {"name": "g", "arguments": {"a": "b"}}]'),
        ("mistral", 'So: [TOOL_CALLS][{"name": "f"}, {"arguments": {"a": "b"}, "name": "g"}]'),
        ("pythonic", "[f(), g(a=1)]"),
    ],
)
def test_nothing_is_left_of_calls_behind_the_first_one_where_they_are_not_wanted(name: str, text: str) -> None:
    content = "" if name == "pythonic" else "So:"
    for end in range(len(text) + 1):
        for pieces in ([text[:end]], text[:end]):
            found = summary(read(name, pieces, only_first_call=True))
            if any(call[3] for call in found["calls"]):
                assert [call[1] for call in found["calls"]] == ["f"]
                rest = " x" if text[:end].endswith(" x") else ""
                if (mark := text.rfind("<tool_call>")) < end < mark + len("<tool_call>"):
                    rest = text[mark:end]  # it may go on in other ways
                assert found["content"] == content + rest


def test_a_complete_call_behind_one_that_broke_off_is_the_first() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a":1 x}}</tool_call>' + 2 * '<tool_call>{"name":"g"}</tool_call>'
    found = summary(read("hermes", [text], only_first_call=True))
    assert [(call[1], call[3]) for call in found["calls"]] == [("f", False), ("g", True)]


def test_text_after_a_closing_mark_that_could_be_longer_is_kept() -> None:
    fields = dict(BUNDLED["hermes"]["fields"])
    calls = {name: value for name, value in fields["tool_calls"].items() if name != "close"}
    fields["tool_calls"] = {**calls, "close_pattern": r"</tool_call>(?:[^<]*<\|im_end\|>)?"}
    template = {**BUNDLED["hermes"], "fields": fields}
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call> All of it is done.'
    for pieces in cuts(text):
        found = summary(read_in(template, pieces))
        assert found["content"] == "All of it is done." and found["calls"][0][3]
    for end in range(text.index("</"), text.index("> All")):
        found = summary(read_in(template, [text[:end]]))
        assert not found["content"] and found["calls"][0][3]


@pytest.mark.parametrize(("name", "text", "content"), MALFORMED)
def test_every_cut_of_a_malformed_call_comes_out_as_content(name: str, text: str, content: str | None) -> None:
    whole = summary(read(name, [text]))
    if content is not None:
        assert whole["content"] == content
    else:
        assert whole["content"] and not any(call[3] for call in whole["calls"])
    for pieces in cuts(text):
        assert summary(read(name, pieces)) == whole, pieces


@given(
    st.sampled_from(sorted(BUNDLED)),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "f", ',
                '"arguments": {"a": ',
                "1",
                '"x"',
                '"arguments": "',
                "}}",
                "}",
                "[",
                "]",
                "<think>",
            ]
            + [
                "</think>",
                "[TOOL_CALLS]",
                "n[ARGS]",
                "<|im_end|>",
                " ",
                "\n",
                "word",
                '"',
                "\\",
                ",",
                "f(a=",
                ")",
                "é",
                "'",
            ]
        ),
        max_size=12,
    ).map("".join),
    st.data(),
)
@settings(max_examples=600, deadline=None)
def test_random_completions_are_read_alike_however_they_are_cut(name: str, text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    found = summary(read(name, pieces))
    assert found == summary(read(name, [text])) == summary(read(name, list(text)))
    for _, _, arguments, is_complete in found["calls"]:
        if is_complete:
            json.loads(arguments)


def test_arguments_come_as_they_are_generated() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "one two three"}}</tool_call>'
    parser = ResponseParser(load_template(dict(BUNDLED["hermes"])), new_id=lambda: "id")
    reported = [(index, event) for index, char in enumerate(text) for event in parser.push(char)]
    assert reported[0] == (text.index(', "arg') - 1, CallStart(0, "id", "f"))
    for index, event in reported[1:-1]:
        assert isinstance(event, CallArguments) and event.text == text[index]
    assert reported[-1][1] == CallEnd(0, is_complete=True)


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", r'<tool_call>{"name": "f\ud800", "arguments": {}}</tool_call>', []),
        ("hermes", r'<tool_call>{"arguments": {"a": 1}, "name": "\udfff\ud83d"}</tool_call>', []),
        ("mistral", r'[TOOL_CALLS][{"name": "\udc00", "arguments": {}}]', []),
        ("hermes", r'<tool_call>{"name": "\ud83d\ude00", "arguments": {}}</tool_call>', [("\U0001f600", {})]),
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>', [("f", {"a": "\ud800"})]),
        (
            "hermes",
            r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}</tool_call>',
            [("f", {"a": "\ud800"})],
        ),
        ("pythonic", r'[f(a="\ud800", b={"c": "\udfff"})]', [("f", {"a": "\ud800", "b": {"c": "\udfff"}})]),
    ],
)
def test_halves_of_surrogate_pairs_can_be_sent_on(name: str, text: str, calls: list[Any]) -> None:
    """JSON's escapes can write half a pair, which UTF-8 cannot: such a name is not a name, and arguments keep the escape."""
    for pieces in cuts(text):
        events = read(name, pieces)
        for event in events:
            str(getattr(event, "text", "") + getattr(event, "name", "")).encode()  # raises where it is not UTF-8
        found = summary(events)
        assert [(call[1], json.loads(call[2])) for call in found["calls"]] == calls
        assert found["content"] == ("" if calls else text)


@pytest.mark.parametrize(("written", "value"), [('""', {}), ('" "', {}), ('" 1e3 "', 1000.0), ('"null"', None)])
def test_arguments_in_a_string_are_the_json_in_it(written: str, value: object) -> None:
    for text in (f'{{"name": "f", "arguments": {written}}}', f'{{"arguments": {written}, "name": "f"}}'):
        for pieces in cuts(f"<tool_call>{text}</tool_call>"):
            found = summary(read("hermes", pieces))
            assert [(call[1], json.loads(call[2]), call[3]) for call in found["calls"]] == [("f", value, True)]
            assert not found["content"]


def test_pythonic_calls_are_read_as_python_reads_them() -> None:
    text = "[get.it(a=\"x, )\", b=[1, {'c': None}], d=true), now()]"
    for pieces in cuts(text):
        found = summary(read("pythonic", pieces))
        assert [(call[1], json.loads(call[2])) for call in found["calls"]] == [
            ("get.it", {"a": "x, )", "b": [1, {"c": None}], "d": True}),
            ("now", {}),
        ]
        assert not found["content"]


def test_several_calls_of_mistral_with_arguments_alone() -> None:
    found = summary(read("mistral-args", ['[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}']))
    assert [call[1:] for call in found["calls"]] == [["f", '{"a": 1}', True], ["g", "{}", True]]


def test_a_prompt_that_began_to_think_is_read_first() -> None:
    template = load_template(dict(BUNDLED["hermes"]))
    parser = ResponseParser(template, prefix="<|im_start|>assistant\nold<|im_end|><|im_start|>assistant\n<think>\n")
    found = summary([*parser.push("hm</think>yes"), *parser.finish()])
    assert (found["reasoning"], found["content"]) == ("hm", "yes")


def test_space_that_ends_what_is_skipped_is_not_repeated() -> None:
    parser = ResponseParser(load_template(dict(BUNDLED["hermes"])))
    parser.skip("<think>Hm, ")
    found = summary([*parser.push("yes</think> so"), *parser.finish()])
    assert (found["reasoning"], found["content"]) == ("yes", "so")


def test_a_prompt_without_the_anchor_is_not_read() -> None:
    parser = ResponseParser(load_template(dict(BUNDLED["hermes"])), prefix="a <think> b")
    assert summary([*parser.push("x"), *parser.finish()])["content"] == "x"


@pytest.mark.parametrize(
    "text",
    [
        " " * 200_000,
        "<tool_call>" * 20_000,
        "<tool_call>" + "[" * 100_000,
        '<tool_call>{"a": "' + "x" * 600_000,
        "<" * 100_000,
    ],
)
def test_hostile_completions_lose_nothing_and_end(text: str) -> None:
    found = summary(read("hermes", [text]))
    assert found["content"].strip() == text.strip() and not found["calls"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"name": x}<tool_call></tool_call>', "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS][ARGS]", "mistral-args"),
        ('<|start_header_id|>{"name": "f", "parameters": 1}', "llama3"),
        ("<|python_start|>", "pythonic"),
        ("<|im_start|>", None),
    ],
)
def test_marks_of_a_chat_template_name_the_bundled_template(text: str, name: str | None) -> None:
    assert recognise(text) == name

"""Why a JSON schema cannot be used: llguidance's reason, with the places in the schema and what to do."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

MAX_PLACES = 3  # named in a message
NO_TEXT = "it allows no text at all"

# Keywords whose members are schemas by name, those whose value is data, and those whose value is one schema or several.
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_DATA = {"const", "enum", "default", "examples", "dependentRequired", "required"}

_UNSUPPORTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_FORMAT = re.compile(r"Unknown format: (\S+)")
_INTEGER = re.compile(r"Expected positive integer for '(\w+)', got (\S+)")
_ELSEWHERE = re.compile(r"Resource '(.*?)' is not present")
_PATTERNS = re.compile(r"patternProperty regexes .* are not disjoint")
_NO_NUMBER = re.compile(r"Value is not JSON serializable: (-?\d+)")
_BOUNDS = re.compile(r"Failed to generate regex for (float|integer) range: (.*)")
_CIRCULAR = re.compile(r"circular references with sibling keys are not supported")
_IN_GRAMMAR = re.compile(r"at (\d+)\((\d+)\): failed to compile JSON schema: (.*)")
_TAG = re.compile(r"tag_(\d+):")


def explained(reason: str, schema: Any) -> str:
    """The reason for which llguidance refuses this schema, for the caller who wrote it."""
    if found := _UNSUPPORTED.search(reason):
        keywords = json.loads(found[1])
        named = ", ".join(f'"{keyword}"' for keyword in keywords)
        are, them = ("is", "it") if len(keywords) == 1 else ("are", "them")
        return f"{named} {are} not supported{_at(schema, *keywords)}; leave {them} out, and check the text yourself"
    if "oneOf constraints" in reason:
        return f'"oneOf" is not supported{_at(schema, "oneOf")}; use "anyOf" where a value fits one branch only'
    if found := _FORMAT.search(reason):
        places = _at(schema, "format", value=found[1])
        return f'"format" {json.dumps(found[1])} is not supported{places}; leave it out, or use "pattern"'
    if found := _INTEGER.search(reason):
        return f'"{found[1]}" is {found[2]}{_at(schema, found[1])}; give an integer of at least 0, without a point'
    if found := _ELSEWHERE.search(reason):
        return f'"$ref" leads to {json.dumps(found[1])}, which is not in the schema; put it into "$defs"'
    if _PATTERNS.search(reason):
        return f"{reason}{_at(schema, 'patternProperties')}; give expressions of which at most one fits any name"
    if "multipleOf" in reason:
        return f"{reason}{_at(schema, 'multipleOf')}; give a number with fewer digits"
    if reason == NO_TEXT and (places := _at(schema, "$ref")):
        return f'{reason}; look for a "$ref" that leads back to itself without an end{places}'
    if _CIRCULAR.search(reason):
        return f'{reason}{_at(schema, "$ref")}; leave out what stands beside the "$ref"'
    if found := _NO_NUMBER.search(reason):
        return f"it has a number of {len(found[1].lstrip('-'))} digits, which is too large; give at most 15"
    if found := _BOUNDS.search(reason):
        return f"no {found[1]} can be written between its bounds, {found[2]}; give bounds that are closer to 0"
    if reason.startswith("Unsatisfiable schema"):
        return f"it allows no document: {reason[0].lower()}{reason[1:]}; take out what contradicts"
    return reason


def explained_in_grammar(reason: str, grammar: str) -> str:
    """`explained` for a grammar, if the reason is about a JSON schema in it; else the reason."""
    found = _IN_GRAMMAR.match(reason)
    if found is None:
        return reason
    lines, number = grammar.splitlines(keepends=True), int(found[1])
    begin = sum(map(len, lines[: number - 1])) + int(found[2]) - 1
    reasons = []
    for place in re.finditer(r"%json\s*", grammar[begin:]):  # the reason's place may be before other schemas, too
        with contextlib.suppress(ValueError, RecursionError):
            schema, _ = json.JSONDecoder().raw_decode(grammar, begin + place.end())
            reasons.append(explained(found[3], schema))
    why = next((each for each in reasons if " at /" in each), reasons[0] if reasons else found[3])
    return f"the JSON schema in line {number}: {why}"


def explained_in_tags(reason: str, grammar: str) -> str:
    """`explained` for the grammar of structural tags. The tag is named instead of the line, which no client wrote."""
    found = _IN_GRAMMAR.match(reason)
    tag = _TAG.match(grammar.splitlines()[int(found[1]) - 1]) if found else None
    if tag is None:
        return reason
    return f"tags[{tag[1]}].json_schema: {explained_in_grammar(reason, grammar).partition(': ')[2]}"


def _at(schema: Any, *keywords: str, value: str | None = None) -> str:
    """The first places of these keywords, as JSON pointers; those with this value, if one is given."""
    places = [
        place
        for place, keyword, found in _keywords(schema, "")
        if keyword in keywords and (value is None or found == value)
    ]
    if not places:
        return ""
    more = f" and {len(places) - MAX_PLACES} more places" if len(places) > MAX_PLACES else ""
    return f" at {', '.join(places[:MAX_PLACES])}{more}"


def _keywords(schema: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """Each keyword of the schema and of those in it: its place, its name, its value."""
    if isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from _keywords(part, f"{place}/{index}")
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        here = f"{place}/{_escaped(keyword)}"
        yield here, keyword, value
        if keyword in _NAMED and isinstance(value, dict):
            for name, part in value.items():
                yield from _keywords(part, f"{here}/{_escaped(name)}")
        elif keyword not in _DATA:
            yield from _keywords(value, here)


def _escaped(name: str) -> str:
    """The name as a JSON pointer writes it (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")

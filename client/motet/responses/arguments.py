"""Rules of a grammar for the arguments of a function: as a JSON object, or as keyword arguments of Python."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping
from typing import Any

# As the server has it for JSON schemas: a model cannot go on with space for ever.
_SPACE = r"[ \n\r\t]{0,20}"
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": _SPACE}
_DEFINITIONS = ("$defs", "definitions")
# Keywords of an object's schema that keyword arguments can follow, or that constrain nothing.
_OF_KEYWORDS = frozenset(
    (*_DEFINITIONS, "type", "properties", "required", "additionalProperties", "title", "description", "$schema")
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class GrammarError(ValueError):
    """Tools cannot be made a grammar; `field` names what of them, the message says why."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Rules:
    """The rules of one grammar, by name."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def rule(self, name: str, body: str) -> str:
        """Add a rule and return its name."""
        self._lines[name] = f"{name}: {body}"
        return name

    def lazy(self, name: str, body: str) -> str:
        """Add a text that ends as early as it can."""
        self._lines[name] = f"{name}[lazy]: {body}"
        return name

    def text(self, start: str) -> str:
        """The grammar. `W` is space."""
        lines = [f"start: {start}", *self._lines.values(), r"W: /[ \n\r\t]{1,20}/"]
        return "\n".join(lines) + "\n"


def object_arguments(rules: Rules, name: str, schema: object, place: str) -> str:
    """A JSON object that is valid under the schema. Raises GrammarError."""
    checked = _object_schema(schema, place)
    return rules.rule(name, f"%json {written_schema({**checked, 'type': 'object'}, place)}")


def keyword_arguments(rules: Rules, name: str, schema: object, place: str) -> str:
    """`key=value, key=value` in the schema's order; values are JSON. Raises GrammarError."""
    checked = _object_schema(schema, place)
    if unknown := sorted(set(checked) - _OF_KEYWORDS):
        raise GrammarError(place, f"has {unknown[0]!r}, which keyword arguments cannot follow; leave it out")
    properties, required = checked.get("properties", {}), checked.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise GrammarError(place, "has properties that are not an object, or required that is not a list")
    if missing := [str(each) for each in required if each not in properties]:
        raise GrammarError(place, f"requires {missing[0]!r}, which is not among properties")
    definitions = {key: checked[key] for key in _DEFINITIONS if key in checked}
    is_last, first, later = True, "", ""  # what may follow without and with an argument before it
    for position, key in reversed(list(enumerate(properties))):
        if not _NAME.fullmatch(key) or keyword.iskeyword(key):
            raise GrammarError(f"{place}.properties", f"has {key!r}, which is not a name of a keyword argument")
        value = properties[key]
        if isinstance(value, Mapping):
            value = {**value, **definitions}
        one = rules.rule(f"{name}_{position}", f'"{key}=" {name}_{position}_value')
        rules.rule(f"{name}_{position}_value", f"%json {written_schema(value, f'{place}.properties.{key}')}")
        behind = "" if is_last else later
        with_it, after = f"{one} {behind}".strip(), f'W? "," W? {one}'
        if key in required:
            first = rules.rule(f"{name}_{position}_first", with_it)
            later = rules.rule(f"{name}_{position}_later", f"{after} {behind}".strip())
        else:
            # Nothing at all is written by the callers of these rules, with "?".
            first = rules.rule(f"{name}_{position}_first", f"{with_it} | {first}" if first else with_it)
            later = rules.rule(f"{name}_{position}_later", f"({after})? {behind}".strip())
        is_last = False
    return f"({first})?" if first and not required else first


def _object_schema(schema: object, place: str) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise GrammarError(place, "is not a JSON schema, an object")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise GrammarError(f"{place}.type", "is not 'object'; arguments are an object")
    return schema


def written_schema(schema: object, place: str) -> str:
    """What stands after %json in a rule. Raises GrammarError."""
    if isinstance(schema, Mapping):
        if "x-guidance" in schema:
            raise GrammarError(place, 'has the member "x-guidance", which is not supported')
        schema = {**schema, "x-guidance": _OPTIONS}
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(place, f"cannot be written as JSON: {str(error)[:200]}") from error

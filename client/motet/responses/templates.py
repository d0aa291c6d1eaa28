"""How a model writes reasoning, content and tool calls: `response_template` of a checkpoint's tokenizer_config.json.

The meaning of each key is that of transformers' response templates, version 1. What this reader cannot do in linear
time, or while the text is generated, is refused by name when the template is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from motet.responses.patterns import Pattern, PatternError

_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open",
    "open_pattern",
    "close",
    "close_pattern",
    "content",
    "content_args",
    "repeats",
    "join",
    "optional",
    "transform",
    "transform_each",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MAX_FIELDS = 16
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class TemplateError(ValueError):
    """A response template cannot be used; the message names the key."""


class Kind(Enum):
    """What a field's text is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALLS = "tool calls"


@dataclass(frozen=True, slots=True)
class CallForm:
    """Where the text of a field has the name and the arguments of a call."""

    syntax: str  # "json" or "pythonic"
    is_list: bool = False  # an array of calls
    name_key: str | None = "name"  # None: a group of the opening mark has the name
    name_group: str | None = None
    arguments_key: str | None = "arguments"  # None: the whole value is the arguments


@dataclass(frozen=True, slots=True)
class Field:
    """A part of a completion between two marks."""

    name: str
    kind: Kind
    open: Pattern | None  # None: the text outside of all other fields
    close: Pattern | None  # None: the value ends by itself, or with the completion
    call: CallForm | None
    join: str  # between several of them


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The fields of a completion."""

    fields: Mapping[str, Field]
    implicit: Field | None  # None: text outside of all fields means nothing
    start_anchor: Pattern | None  # what the completion begins after, in a prompt


def load_template(spec: object) -> ResponseTemplate:
    """Raises TemplateError."""
    if not isinstance(spec, dict):
        raise TemplateError(f"response_template is of type {type(spec).__name__}; it must be an object")
    _refuse_unknown(spec, _TEMPLATE_KEYS, "response_template")
    if spec.get("version", 1) != 1:
        raise TemplateError("response_template.version must be 1")
    raw = spec.get("fields")
    if not isinstance(raw, dict) or not 0 < len(raw) <= _MAX_FIELDS:
        raise TemplateError(f"response_template.fields must be an object with 1 to {_MAX_FIELDS} fields")
    fields = {name: _field(name, value) for name, value in raw.items()}
    implicit = [field for field in fields.values() if field.open is None]
    if len(implicit) > 1:
        raise TemplateError(f"fields {implicit[0].name} and {implicit[1].name} both have no opening mark")
    if implicit and implicit[0].kind is Kind.CALLS:
        raise TemplateError(f"field {implicit[0].name}: tool calls need an opening mark")
    return ResponseTemplate(fields, implicit[0] if implicit else None, _mark(spec, "start_anchor", "response_template"))


def _field(name: str, spec: object) -> Field:
    where = f"field {name}"
    if not isinstance(spec, dict):
        raise TemplateError(f"{where} must be an object")
    _refuse_unknown(spec, _FIELD_KEYS, where)
    if not isinstance(spec.get("content_args", {}), dict):
        raise TemplateError(f"{where}: content_args must be an object")
    opening, closing = _mark(spec, "open", where), _mark(spec, "close", where)
    join = spec.get("join")
    if join is not None and not isinstance(join, str):
        raise TemplateError(f"{where}: join must be a string")
    kind = Kind.CALLS if name == "tool_calls" else Kind.REASONING if name in _REASONING else Kind.CONTENT
    call = None
    if kind is Kind.CALLS:
        call = _call_form(where, spec, opening)
    elif spec.get("content", "text") != "text" or spec.get("transform") is not None:
        raise TemplateError(f"{where}: only plain text is supported there; leave content and transform out")
    return Field(name, kind, opening, closing, call, join or "")


def _call_form(where: str, spec: Mapping[str, Any], opening: Pattern | None) -> CallForm:
    syntax = spec.get("content", "text")
    if syntax == "pythonic":
        return CallForm("pythonic")
    if syntax != "json" or spec.get("content_args"):
        raise TemplateError(f"{where}: tool calls must be json without content_args, or pythonic")
    transform = spec.get("transform")
    is_list = spec.get("transform_each", False) is True
    function = transform.get("function") if isinstance(transform, dict) else None
    groups = opening.names if opening is not None else frozenset[str]()
    if function == "{content}" and not is_list:
        return CallForm("json")
    if isinstance(function, dict) and set(function) == {"name", "arguments"}:
        name, arguments = _path(function["name"]), _path(function["arguments"])
        if is_list and len(name) == len(arguments) == 1 and not {*name, *arguments} & groups:
            return CallForm("json", is_list=True, name_key=name[0], arguments_key=arguments[0])
        if not is_list and len(name) == len(arguments) == 2 and name[0] == arguments[0] == "content":
            return CallForm("json", name_key=name[1], arguments_key=arguments[1])
        if not is_list and len(name) == 1 and name[0] in groups and arguments == ["content"]:
            return CallForm("json", name_key=None, name_group=name[0], arguments_key=None)
    raise TemplateError(
        f'{where}: transform must have "function" with "name" and "arguments" as keys of the content, or a name from a '
        "group of open_pattern and the content as arguments"
    )


def _path(value: object) -> list[str]:
    """The names in a placeholder; empty for anything else."""
    found = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return found[1].split(".") if found else []


def _mark(spec: Mapping[str, Any], key: str, where: str) -> Pattern | None:
    literal, expression = spec.get(key), spec.get(f"{key}_pattern")
    if literal is not None and expression is not None:
        raise TemplateError(f"{where}: has both {key} and {key}_pattern; keep one")
    try:
        if expression is not None:
            if not isinstance(expression, str):
                raise TemplateError(f"{where}: {key}_pattern must be a string")
            return Pattern.expression(expression)
        if literal is None:
            return None
        texts = [literal] if isinstance(literal, str) else literal
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise TemplateError(f"{where}: {key} must be a string or a list of strings, none of them empty")
        return Pattern.literals(texts)
    except PatternError as error:
        raise TemplateError(f"{where}: {key} {error}") from error


def _refuse_unknown(spec: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(spec) - known):
        raise TemplateError(f"{where} has unknown keys: {', '.join(unknown)[:200]}")

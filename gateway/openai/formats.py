"""What the text of a completion must be: OpenAI's `response_format` and vLLM's `structured_outputs` as constraints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from motet import Choices, JsonObject, JsonSchema, Lark, Regex, StructuralTag, StructuralTags
from motet.inputs.constraints import Constraint

from gateway.openai.errors import refused
from gateway.openai.messages import Body

_FORMAT, _OUTPUTS = "response_format", "structured_outputs"
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def constraint_of(body: Body) -> Constraint | None:
    """The constraint that a body has, if it has one. Raises Refusal."""
    of_format = _of_format(body.response_format)
    of_outputs = _of_outputs(body.structured_outputs)
    if of_format is not None and of_outputs is not None:
        raise refused(_OUTPUTS, "is given beside response_format; leave one of them out")
    return of_format if of_outputs is None else of_outputs


def field_of_constraint(body: Body) -> str:
    """The field that a body with a constraint has it in."""
    return _FORMAT if body.structured_outputs is None else _OUTPUTS


def _of_format(given: object) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise refused(_FORMAT, 'is not an object; give {"type": "json_schema", "json_schema": {"schema": {...}}}')
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonObject()
    if kind != "json_schema":
        raise refused(_FORMAT, "has a type that is not text, json_object or json_schema")
    named = given.get("json_schema")
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping):
        raise refused(_FORMAT, "has no json_schema.schema, an object")
    return JsonSchema(named["schema"])


def _of_outputs(given: object) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise refused(_OUTPUTS, f"is not an object; give one with one of {', '.join(_KINDS)}")
    if unknown := [str(name)[:40] for name in given if name not in _KINDS and given[name] is not None]:
        raise refused(_OUTPUTS, f"has {unknown[0]!r}; {', '.join(_KINDS)} are served")
    kinds = [name for name in _KINDS if given.get(name) not in (None, False)]
    if len(kinds) != 1:
        raise refused(_OUTPUTS, f"has {len(kinds)} of {', '.join(_KINDS)}; give one")
    kind, value = kinds[0], given[kinds[0]]
    if kind == "json_object":
        return JsonObject()
    if kind == "json" and isinstance(value, str | Mapping):
        return JsonSchema(value)
    if kind == "regex" and isinstance(value, str):
        return Regex(value)
    if kind == "grammar" and isinstance(value, str):
        return Lark(value)
    if kind == "choice" and isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        return Choices([str(text) for text in value] if not isinstance(value, str) else [value])
    if kind == "structural_tag":
        return _tags(value)
    raise refused(_OUTPUTS, f"has a {kind} of a wrong type")


def _tags(value: object) -> StructuralTags:
    """vLLM's form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or its JSON text."""
    given: Any = value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except ValueError:
            given = None
    structures = given.get("structures") if isinstance(given, Mapping) else None
    triggers = given.get("triggers") if isinstance(given, Mapping) else None
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise refused(_OUTPUTS, "has a structural_tag without structures and triggers")
    tags = []
    for each in structures:
        if not isinstance(each, Mapping) or not isinstance(begin := each.get("begin"), str):
            raise refused(_OUTPUTS, "has a structure without begin, a text")
        trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None)
        if trigger is None:
            raise refused(_OUTPUTS, f"has no trigger that {begin[:40]!r} begins with")
        schema, end = each.get("schema", {}), each.get("end", "")
        if not isinstance(schema, Mapping) or not isinstance(end, str):
            raise refused(_OUTPUTS, "has a structure whose schema is not an object, or whose end is not a text")
        tags.append(StructuralTag(trigger, begin, end, json_schema=schema))
    return StructuralTags(tags)

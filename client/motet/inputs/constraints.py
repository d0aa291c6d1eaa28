"""What a completion's text must be: the forms that generate() takes, as the wire has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from motet.errors import invalid_field
from motet.inputs.scalars import text_of
from motet.v1 import constraints_pb2


@dataclass(frozen=True)
class JsonSchema:
    """A JSON value that is valid under this JSON schema, a mapping or JSON text."""

    schema: Mapping[str, Any] | str


@dataclass(frozen=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True)
class Regex:
    """A text that the regular expression matches as a whole; without look-around and back-references."""

    pattern: str


@dataclass(frozen=True)
class Choices:
    """One of these texts."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Lark:
    """A text of this grammar, in llguidance's form of Lark; its first rule is `start`."""

    grammar: str


@dataclass(frozen=True)
class StructuralTag:
    """A tag in free text: `begin`, then content of the given form, then `end`. Give one of json_schema and lark."""

    trigger: str  # text that must be followed by the rest of `begin`
    begin: str  # begins with `trigger`
    end: str = ""
    json_schema: Mapping[str, Any] | str | None = None
    lark: str | None = None


@dataclass(frozen=True)
class StructuralTags:
    """Free text in which these tags may come any number of times."""

    tags: Sequence[StructuralTag]


Constraint: TypeAlias = JsonSchema | JsonObject | Regex | Choices | Lark | StructuralTags


def constraint_to(constraint: Constraint | None) -> constraints_pb2.Constraint | None:
    """The message. Raises InvalidArgument or TypeError for what the wire cannot carry."""
    if constraint is None:
        return None
    if isinstance(constraint, JsonSchema):
        return constraints_pb2.Constraint(json_schema=_schema_text(constraint.schema, "constraint.json_schema"))
    if isinstance(constraint, JsonObject):
        return constraints_pb2.Constraint(json_object=True)
    if isinstance(constraint, Regex):
        return constraints_pb2.Constraint(regex=text_of("constraint.regex", constraint.pattern))
    if isinstance(constraint, Choices):
        if isinstance(constraint.texts, str):
            raise TypeError("Choices is given a str; give a list of texts")
        texts = [text_of("constraint.choices", text) for text in constraint.texts]
        return constraints_pb2.Constraint(choices=constraints_pb2.Choices(texts=texts))
    if isinstance(constraint, Lark):
        return constraints_pb2.Constraint(lark=text_of("constraint.lark", constraint.grammar))
    if isinstance(constraint, StructuralTags):
        tags = [_tag(tag) for tag in constraint.tags]
        return constraints_pb2.Constraint(structural_tags=constraints_pb2.StructuralTags(tags=tags))
    raise TypeError(f"constraint is {type(constraint).__name__}; give JsonSchema, JsonObject, Regex, Choices or Lark")


def _schema_text(schema: Mapping[str, Any] | str, field: str) -> str:
    if isinstance(schema, str):
        return text_of(field, schema)
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid_field(field, f"cannot be written as JSON: {error}; give what json.dumps takes") from None


def _tag(tag: StructuralTag) -> constraints_pb2.StructuralTag:
    field = "constraint.structural_tags"
    return constraints_pb2.StructuralTag(
        trigger=text_of(field, tag.trigger),
        begin=text_of(field, tag.begin),
        end=text_of(field, tag.end),
        json_schema=None if tag.json_schema is None else _schema_text(tag.json_schema, field),
        lark=None if tag.lark is None else text_of(field, tag.lark),
    )

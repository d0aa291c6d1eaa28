"""The rule of a grammar for what a constraint allows, so that more than that can stand in one grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from motet.inputs.constraints import Choices, Constraint, JsonObject, JsonSchema, Lark, Regex
from motet.responses.arguments import Rules, written_schema
from motet.responses.written import quoted

_NAME = "content"
_ESCAPED_OR_END = re.compile(r"\\.|/|\n", re.DOTALL)


def content_rule(rules: Rules, constraint: Constraint, place: str) -> str | None:
    """Its name, the first rule of all; None: the server refuses the constraint as it is. Raises GrammarError."""
    if isinstance(constraint, JsonObject):
        return rules.rule(_NAME, f"%json {written_schema({'type': 'object'}, place)}")
    if isinstance(constraint, JsonSchema):
        schema = _schema_of(constraint)
        return None if schema is None else rules.rule(_NAME, f"%json {written_schema(schema, place)}")
    if isinstance(constraint, Regex) and constraint.pattern:
        return rules.rule(_NAME, f"/{_ESCAPED_OR_END.sub(_within_slashes, constraint.pattern)}/")
    if isinstance(constraint, Choices) and constraint.texts and all(constraint.texts):
        return rules.rule(_NAME, " | ".join(map(quoted, constraint.texts)))
    if isinstance(constraint, Lark):
        return rules.rule(_NAME, f"%lark {{\n{constraint.grammar}\n}}")
    return None


def _schema_of(constraint: JsonSchema) -> Mapping[str, object] | None:
    if isinstance(constraint.schema, Mapping):
        return constraint.schema
    try:
        schema = json.loads(constraint.schema)
    except (ValueError, RecursionError):
        return None
    if schema is True:
        return {}
    return schema if isinstance(schema, Mapping) else None


def _within_slashes(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])

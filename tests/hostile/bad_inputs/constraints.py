"""Constraints that cannot be: forms that are empty, too many, or no grammar."""

from __future__ import annotations

from typing import Any

from motet.v1.constraints_pb2 import Choices, StructuralTag as Tag, StructuralTags

# Field; values that are refused in its name. A constraint does not go together with ignore_eos, which other cases set.
CONSTRAINTS: list[tuple[str, list[Any]]] = [
    ("constraint.json_schema", ["", "{", '{"type": "wrong"}']),
    ("constraint.json_object", [False]),
    ("constraint.regex", ["", "(a", "a(?=b)"]),
    ("constraint.lark", ["", "start: ("]),
    ("constraint.choices", [Choices(), Choices(texts=["x"] * 1025)]),
    (
        "constraint.structural_tags",
        [
            StructuralTags(),
            StructuralTags(tags=[Tag(trigger="<", begin="<a", end=">", lark="start: (")]),
            StructuralTags(tags=[Tag(trigger="<", begin="<a", end=">", json_schema="{")]),
        ],
    ),
]

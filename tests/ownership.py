"""Which attributes a module writes, for tests that a state has one owner."""

from __future__ import annotations

import ast
from collections.abc import Iterator

CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "reverse", "sort", "update"}


def written_fields(tree: ast.Module) -> Iterator[str]:
    """Attributes of other objects than self that are assigned, deleted, or changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            target: ast.expr = node.func.value
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node
        else:
            continue
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and not (isinstance(target.value, ast.Name) and target.value.id == "self"):
            yield target.attr

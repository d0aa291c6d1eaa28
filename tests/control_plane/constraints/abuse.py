"""Constraints that someone would send to slow a server down. Each is one that a client may send: at most 64 KiB."""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 64 << 10


def _nested_arrays(depth: int) -> str:
    return '{"type":"array","items":' * depth + "true" + "}" * depth


def _recursive(num_branches: int) -> str:
    node = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}} for _ in range(num_branches)]}
    return json.dumps({"$ref": "#/$defs/n", "$defs": {"n": node}})


def _doubling(depth: int) -> str:
    """Definitions of which each names the next one twice: 2^depth places where they are written out."""
    definitions: dict[str, Any] = {
        f"d{level}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{level + 1}"}] * 2, "minItems": 2}
        for level in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "integer"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


CORPUS: dict[str, tuple[str, Any]] = {
    "exponential regex": ("regex", "(a|b)*a(a|b){18}"),
    "nested stars": ("regex", "((a*)*)*b"),
    "repeats of repeats": ("regex", "((a{0,900}){0,900}){0,900}"),
    "a huge repeat": ("regex", "[a-z]{0,1000000}"),
    "overlapping alternatives": ("regex", "(" + "|".join("a" * n + ".*" for n in range(1, 200)) + ")c"),
    "all of unicode, repeated": ("regex", r"(\p{L}\p{N}?){1,5000}x"),
    "an intersection of lengths": ("lark", "start: A\nA: /(a{3})+/ & /(a{5})+/ & /(a{7})+/ & /(a{11})+/ & /(a{13})+/"),
    "nested arrays": ("json_schema", _nested_arrays(2000)),
    "nested parentheses": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "a reference to itself": ("json_schema", '{"$ref":"#"}'),
    "two references in a circle": (
        "json_schema",
        '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}',
    ),
    "a recursion with many branches": ("json_schema", _recursive(200)),
    "definitions that double": ("json_schema", _doubling(24)),
    "a huge enum": ("json_schema", json.dumps({"enum": [f"{number:08d}" for number in range(5000)]})),
    "many properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{number}": {} for number in range(4000)}}),
    ),
    "a huge string length": ("json_schema", '{"type":"string","minLength":1000000}'),
    "a huge array": ("json_schema", '{"type":"array","minItems":1000000,"items":{"type":"integer"}}'),
    "a huge multiple": ("json_schema", '{"type":"integer","multipleOf":1000000007,"maximum":9000000000000000}'),
    "patterns that all hold": (
        "json_schema",
        json.dumps({"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(4, 16)]}),
    ),
    "huge choices": ("choices", [f"{number:04d}" + "x" * 50 for number in range(1024)]),
    "choices with one beginning": ("choices", ["y" * number for number in range(1, 340)]),
    "an ambiguous grammar": ("lark", 'start: s\ns: s s | s s s | "a" |'),
    "ambiguous and nullable": ("lark", 'start: a a a a a a a a\na: b*\nb: c*\nc: "x"*'),
    "left and right recursion": ("lark", 'start: e\ne: e "+" e | e "*" e | "(" e ")" | e e | /[0-9]+/'),
    "many rules": (
        "lark",
        "start: r0\n" + "\n".join(f'r{n}: r{n + 1} | "a" r{n + 1}' for n in range(1500)) + '\nr1500: "b"',
    ),
    "a grammar of repeats": ("lark", "start: a{0,100000}\na: b{0,100000}\nb: /x/"),
}

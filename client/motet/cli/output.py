"""Tables, sizes and JSON for the terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from motet.command_line import size as size


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned by spaces; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    is_number = [
        bool(rows) and all(isinstance(row[column], (int, float)) for row in rows) for column in range(len(header))
    ]
    lines = []
    for line in [list(header), *cells]:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def json_line(value: Any) -> str:
    """Dataclasses and the like as one line of JSON."""
    return json.dumps(to_plain(value), ensure_ascii=False)


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, times as ISO 8601, ready for json."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value

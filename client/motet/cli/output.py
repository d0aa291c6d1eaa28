"""Tables, sizes and JSON for the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

from motet.command_line import size as size

_LINES = 10  # of one transfer where a terminal does not show it


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
    """Dataclasses as dicts, times as ISO 8601, bytes of tokens as text, ready for json."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")  # a token may be half a character, which no JSON string can hold
    return value


class TransferLines:
    """Shows how far a transfer is: one line that changes on a terminal, else a line for each tenth of the bytes."""

    def __init__(self, verb: str, out: TextIO) -> None:
        """`verb`, such as "downloading", begins each line."""
        self._verb = verb
        self._out = out
        self._is_terminal = out.isatty()
        self._shown_chars = 0  # of the terminal's line
        self._num_tenths = 0  # that have a line

    def show(self, num_done: int, num_total: int) -> None:
        """`num_done` of `num_total` bytes came."""
        text = f"{self._verb} {size(num_done)} of {size(num_total)}"
        if self._is_terminal:
            self._out.write(f"\r{text.ljust(self._shown_chars)}")
            self._shown_chars = len(text)
            if num_done == num_total:
                self.end()
            self._out.flush()
            return
        num_tenths = num_done * _LINES // max(num_total, 1)
        if num_tenths != self._num_tenths:
            self._num_tenths = num_tenths
            print(text, file=self._out, flush=True)

    def end(self) -> None:
        """Leave the terminal's line, so that what follows has one of its own."""
        if self._shown_chars:
            self._shown_chars = 0
            print(file=self._out, flush=True)


@contextlib.contextmanager
def transfer_lines(verb: str) -> Iterator[TransferLines]:
    """Lines on stderr about a transfer that lasts as long as the block."""
    lines = TransferLines(verb, sys.stderr)
    try:
        yield lines
    finally:
        lines.end()

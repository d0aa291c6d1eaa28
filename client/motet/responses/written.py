"""How a model writes a tool call or its reasoning by a response template: the marks as texts, from their patterns.

A mark is written in its shortest form. Reads nothing of a completion; `grammars.py` builds on it.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from motet.responses.patterns import Pattern
from motet.responses.templates import Field, Kind, ResponseTemplate

# Characters that stand for a class, the first one that it has.
_EXAMPLES = " \n_a0<:-"


@dataclass(frozen=True, slots=True)
class WrittenMark:
    """The shortest text of a mark. A mark that has the name of a call is `text`, the name, then `rest`."""

    text: str
    rest: str = ""
    is_at_beginning: bool = False  # it is a mark at the beginning of the completion alone

    def around(self, name: str, *, has_name: bool) -> str:
        """The whole mark."""
        return f"{self.text}{name}{self.rest}" if has_name else self.text + self.rest


def written_mark(pattern: Pattern, name_group: str | None = None) -> WrittenMark | None:
    """The mark as text; None if no text is a mark wherever it stands."""
    program = pattern.program
    paths: deque[tuple[int, tuple[str, ...]]] = deque([(0, ())])
    seen = set()
    while paths:
        pc, path = paths.popleft()
        if pc in seen:
            continue
        seen.add(pc)
        instruction = program[pc]
        if instruction.op == "match":
            return _mark_of(path, name_group)
        if instruction.op in ("split", "jump"):
            paths.extendleft((target, path) for target in reversed(instruction.targets))
        elif instruction.op == "begin":
            paths.appendleft((pc + 1, (*path, "begin")))
        elif instruction.op == "save":
            paths.appendleft((pc + 1, (*path, f"save {instruction.source}")))
        elif instruction.char is not None and (char := _example(instruction.char, instruction.source)):
            paths.append((pc + 1, (*path, f"char {char}")))
    return None


def _example(char: re.Pattern[str], source: str) -> str:
    candidates = source[-1] + _EXAMPLES if len(source) <= 2 else _EXAMPLES
    return next((each for each in candidates if char.fullmatch(each)), "")


def _mark_of(path: tuple[str, ...], name_group: str | None) -> WrittenMark:
    before: list[str] = []
    after: list[str] = []
    is_name = is_after = False
    for step in path:
        kind, _, value = step.partition(" ")
        if kind == "save" and value[:-1] == name_group:
            is_name, is_after = value.endswith("("), value.endswith(")")
        elif kind == "char" and not is_name:
            (after if is_after else before).append(value)
    return WrittenMark("".join(before), "".join(after), "begin" in path)


def parts_of(text: str, marks: Mapping[str, int]) -> list[str]:
    """A text as parts of a Lark grammar; what is one token by itself (`marks`, ids by text) is named by its id."""
    parts, rest = [], text
    while rest:
        found = min(
            ((at, -len(mark), mark) for mark in marks if mark and (at := rest.find(mark)) >= 0),
            default=(len(rest), 0, ""),
        )
        at, _, mark = found
        if at:
            parts.append(quoted(rest[:at]))
        if mark:
            parts.append(f"<[{marks[mark]}]>")
        rest = rest[at + len(mark) :]
    return parts


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def opening(field: Field) -> WrittenMark | None:
    """The field's opening mark; None if it cannot be written."""
    if field.open is None:
        return None
    return written_mark(field.open, field.call.name_group if field.call is not None else None)


def closing(field: Field) -> WrittenMark | None:
    """The field's closing mark, empty if it needs none; None if it cannot be written."""
    return WrittenMark("") if field.close is None else written_mark(field.close)


def texts_of_marks(template: ResponseTemplate) -> list[str]:
    """The texts of the marks of reasoning and calls."""
    fields = [field for field in template.fields.values() if field.kind is not Kind.CONTENT]
    marks = [mark for field in fields for mark in (opening(field), closing(field)) if mark is not None]
    return [text for text in dict.fromkeys(text for mark in marks for text in (mark.text, mark.rest)) if text]

"""The chain of an audit log: how each line names the line before it, and how the chain is checked.

The control plane writes by this definition, and `motet audit verify` checks by it. Standard library only; reads lines
and opens no file. A log is a sequence of lines. Each is a CloudEvents envelope in JSON, and its `prev` is the SHA-256
of the bytes of the line before, without its end of line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64  # `prev` of the first line of a log
# The line that follows a line without an end, which a crash left. Its data has the digest of the line before that one,
# in the field that TORN_AFTER names: a line that was cut off may have lost its own `prev`.
TORN_ACTION = "log.close_torn_line"
TORN_AFTER = "follows"
ROTATED_DIGITS = 6  # of the number after the name of a rotated file: FILE.000001 is the oldest


def digest_of(line: bytes) -> str:
    """What the next line has as its `prev`. `line` comes without its end of line."""
    return hashlib.sha256(line).hexdigest()


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log."""

    file: str  # its name, for messages
    number: int  # in the file, from 1
    raw: bytes  # without its end of line
    is_ended: bool = True  # an end of line follows

    @property
    def digest(self) -> str:
        return digest_of(self.raw)

    def event(self) -> Mapping[str, Any] | None:
        """The envelope; None where the line is not one."""
        try:
            event = json.loads(self.raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(event, dict) or not isinstance(event.get("prev"), str):
            return None
        return event if isinstance(event.get("data"), dict) else None


@dataclass(frozen=True, slots=True)
class Finding:
    """The first line that is wrong."""

    file: str
    line: int
    what: str  # what is wrong with it


@dataclass(slots=True, eq=False)
class Verdict:
    """What a check found."""

    num_lines: int = 0  # that are in order, from the first one
    num_torn: int = 0  # of these, lines that a crash cut off and that the next start closed
    begins_after: str | None = None  # `prev` of the first line: GENESIS where the log is whole from its beginning
    first_time: str | None = None  # of the first line
    last_time: str | None = None  # of the last line that is in order
    last_hash: str = GENESIS  # of the last line that is in order
    has_anchor: bool = False  # the digest that was looked for belongs to a line that is in order
    finding: Finding | None = None


def check(lines: Iterable[Line], *, anchor: str | None = None) -> Verdict:
    """Check the lines of a log, the files in the order in which they were written, up to the first that is wrong."""
    verdict = Verdict()
    before: deque[Line] = deque(maxlen=2)  # the last lines in order
    unread = iter(lines)
    torn: Line | None = None  # not an event by itself: the next line has to name it
    for line in unread:
        event = line.event()
        if torn is not None:
            if event is None or not _closes(event, torn, before[-1].digest if before else None):
                verdict.finding = _at(torn, "is not a line of an audit log, and the next line does not close it")
                return verdict
            if not before:
                verdict.begins_after = str(event["data"].get(TORN_AFTER))
            _accept(verdict, before, torn, None, anchor)
            torn = None
        if event is None or not line.is_ended:
            torn = line
            continue
        if not before:
            verdict.begins_after = event["prev"]
        elif event["prev"] != before[-1].digest:
            verdict.finding = _why_unlinked(line, event, list(before), unread)
            return verdict
        _accept(verdict, before, line, event, anchor)
    if torn is not None:
        cut_off = "is cut off: the server did not end it, or somebody cut the file"
        verdict.finding = _at(torn, "is not a line of an audit log" if torn.is_ended else cut_off)
    return verdict


def _accept(
    verdict: Verdict, before: deque[Line], line: Line, event: Mapping[str, Any] | None, anchor: str | None
) -> None:
    before.append(line)
    verdict.num_lines += 1
    verdict.last_hash = line.digest
    verdict.has_anchor |= verdict.last_hash == anchor
    if event is not None:
        verdict.last_time = str(event.get("time"))
        verdict.first_time = verdict.first_time or verdict.last_time
        verdict.num_torn += event["data"].get("action") == TORN_ACTION


def _closes(event: Mapping[str, Any], torn: Line, digest_before: str | None) -> bool:
    """Whether an event says that the line before it was cut off, and what came before that line."""
    data = event["data"]
    follows = data.get(TORN_AFTER)
    is_linked = digest_before is None or follows == digest_before
    return data.get("action") == TORN_ACTION and event["prev"] == torn.digest and is_linked


def _why_unlinked(line: Line, event: Mapping[str, Any], before: list[Line], after: Iterator[Line]) -> Finding:
    """What is wrong where `prev` of a line is not the digest of the line before.

    Cases: 1. The line itself was changed: the next line does not follow it either, and follows nothing else here.
    2. The line before was put in: this one follows the line before that. 3. This line was put in: the next one follows
    the line before. 4. The order was changed: this line follows a later one. 5. Lines are missing: the numbers in the
    ids have a gap. 6. Otherwise the line before was changed.
    """
    last, prev = before[-1], event["prev"]
    if len(before) > 1 and prev == before[-2].digest:
        return _at(last, "was put in: the next line follows the line before it")
    later = list(itertools.islice(after, 2))
    following_event = later[0].event() if later else None
    if following_event is not None:
        if following_event["prev"] == last.digest and prev != later[0].digest:
            return _at(line, "was put in or changed: the next line follows the line before it")
        if prev in [other.digest for other in later]:
            return _at(line, "is out of order: it follows a later line")
        if following_event["prev"] != line.digest:
            return _at(line, "was changed: it does not follow the line before, and the next line does not follow it")
    gap = _gap(last.event(), event)
    if gap:
        are = "s are" if gap > 1 else " is"
        return _at(line, f"does not follow the line before: {gap} line{are} missing in front of it")
    return _at(last, "was changed: the next line has another digest of it")


def _gap(former: Mapping[str, Any] | None, event: Mapping[str, Any]) -> int:
    """How many lines of one start of the server are missing between two events, by the numbers of their ids."""
    if former is None:
        return 0
    start, _, number = str(former.get("id")).rpartition("-")
    later_start, _, later_number = str(event.get("id")).rpartition("-")
    if start != later_start or not (number.isdigit() and later_number.isdigit()):
        return 0
    return max(int(later_number) - int(number) - 1, 0)


def _at(line: Line, what: str) -> Finding:
    return Finding(line.file, line.number, what)

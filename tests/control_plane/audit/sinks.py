"""A log in memory whose disk can be full or slow, and records to write."""

from __future__ import annotations

import errno
import json
import threading
from typing import Any

from motet.audit.chain import GENESIS, Line, Verdict, check

from control_plane.audit.log_file import Rotation, Tail
from control_plane.audit.record import Kind, Outcome, Record
from control_plane.audit.writer import AuditWriter
from control_plane.caller import Caller

WAIT_S = 30.0  # for what another thread does, on a loaded machine


class MemorySink:
    """Keeps what is written. While `room` is less than a write, it takes that many bytes and then fails."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.room: int | None = None  # bytes; None: no end
        self.may_write = threading.Event()  # a write waits for it
        self.may_write.set()
        self.entered = threading.Event()  # a write began
        self.num_failures = 0
        self.failed_twice = threading.Event()  # so that the writer has dealt with the first failure
        self.num_syncs = 0
        self.is_closed = threading.Event()

    def tail(self) -> Tail:
        return Tail(GENESIS)

    def write(self, data: bytes) -> int:
        self.entered.set()
        assert self.may_write.wait(WAIT_S)
        taken = len(data) if self.room is None else min(self.room, len(data))
        if not taken:
            self.num_failures += 1
            if self.num_failures > 1:
                self.failed_twice.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room = None if self.room is None else self.room - taken
        self.data += data[:taken]
        return taken

    def sync(self) -> None:
        self.num_syncs += 1

    def is_full(self, num_unwritten: int, num_bytes: int) -> bool:
        return False

    def rotate(self) -> Rotation:
        raise AssertionError

    def is_in_place(self) -> bool:
        return True

    def reopen(self) -> None:
        raise AssertionError

    def close(self) -> None:
        self.is_closed.set()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in bytes(self.data).splitlines()]

    def verdict(self) -> Verdict:
        return check(lines_of(bytes(self.data)))


def lines_of(content: bytes, file: str = "audit.jsonl") -> list[Line]:
    """The lines of a log's content."""
    pieces = content.split(b"\n")
    lines = [Line(file, number, raw) for number, raw in enumerate(pieces[:-1], 1)]
    return [*lines, Line(file, len(pieces), pieces[-1], is_ended=False)] if pieces[-1] else lines


def a_writer(sink: MemorySink, **settings: Any) -> AuditWriter:
    settings.setdefault("gather_s", 0.0)
    return AuditWriter(sink, source="//host/motet", wall_clock=lambda: 1e9, retry_after_s=0.01, **settings)


def a_record(
    number: int = 0, kind: Kind = Kind.GENERATION, outcome: Outcome = Outcome.SUCCESS, **fields: Any
) -> Record:
    return Record(kind, f"action-{number}", Caller(tenant="a"), 1e9 + number, outcome, **fields)

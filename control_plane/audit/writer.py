"""Writes records as the lines of one chain, in a thread of its own, so that no call waits for a disk.

Records wait in a queue with a bound. Beyond it generations and refusals are counted as lost, and a line says how many.
Records of changes that were made are always kept: changes are refused while the log cannot be written (`problem`). A
write that fails is repeated from where it stopped, so no failure leaves a gap in the chain.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from motet.audit.chain import TORN_ACTION, TORN_AFTER, digest_of

from contract.process_log import shown
from control_plane.audit.log_file import Rotation, Tail
from control_plane.audit.record import Kind, Outcome, Record, line_of
from control_plane.caller import THE_SERVER

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING_RECORDS = 20_000  # about 20 MB
MAX_WAITING_TEXT_BYTES = 64 << 20  # of users, with --audit-text
MAX_WRITE_BYTES = 1 << 20  # of one write
GATHER_S = 0.1  # generations and refusals wait so long for others: a thread that wakes costs more than a line
GATHER_RECORDS = 1000  # and no longer than until there are so many
SYNC_EVERY_S = 1.0  # generations and refusals are on the disk after this time; changes at once
RETRY_AFTER_S = 1.0  # after a write that failed
STALLED_AFTER_S = 5.0  # a write that takes longer counts as failed until it ends
CLOSE_TIMEOUT_S = 5.0


class Sink(Protocol):
    """Where lines go: log_file.py has a file, and standard output."""

    def tail(self) -> Tail:
        """How the log ends at present."""

    def write(self, data: bytes) -> int:
        """Append as much of the data as fits; how many bytes. Raises OSError."""

    def sync(self) -> None:
        """Return once everything that was written is on the disk. Raises OSError."""

    def is_full(self, num_unwritten: int, num_bytes: int) -> bool:
        """Whether to rotate before `num_bytes`, which follow `num_unwritten`."""

    def rotate(self) -> Rotation:
        """Go on in a new file. Raises OSError."""

    def is_in_place(self) -> bool:
        """Whether nobody moved or removed the file."""

    def reopen(self) -> None:
        """Go on in a file of the same name. Raises OSError."""

    def close(self) -> None:
        """Let it go."""


@dataclass(frozen=True, slots=True)
class WriterStats:
    """What a writer did."""

    num_lines: int  # lines since the start
    num_lost: int  # records that found no room, since the start
    num_waiting: int
    problem: str  # why the log cannot be written at present; empty: it can


class _GivenUp(Exception):
    """The writer is closed, and the log cannot be written."""


class AuditWriter:
    """One log. `put` may be called from every thread."""

    def __init__(
        self,
        sink: Sink,
        *,
        source: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        retry_after_s: float = RETRY_AFTER_S,
        max_waiting_records: int = MAX_WAITING_RECORDS,
        gather_s: float = GATHER_S,
    ) -> None:
        """Reads how the log ends. Raises OSError. `source`: of the envelopes, names this server."""
        self._gather_s = gather_s
        self._sink = sink
        self._source = source
        self._clock = clock
        self._wall_clock = wall_clock
        self._retry_after_s = retry_after_s
        self._max_waiting_records = max_waiting_records
        self._start_id = secrets.token_hex(8)
        self._changed = threading.Condition()  # guards the fields up to the empty line
        self._waiting: list[Record] = []
        self._num_text_bytes = 0  # of what waits or is being written
        self._lost: Counter[Kind] = Counter()  # that no line counts yet
        self._num_lost = 0  # in all
        self._is_closed = False
        self._is_urgent = False  # somebody waits for a record, or many records wait

        # Written by the writer's thread alone.
        self._num_lines = 0
        self._error = ""  # of the last attempt to write
        self._busy_since_s: float | None = None  # when the present attempt began
        self._checked_s = self._synced_s = clock()  # last looked whether the file is in place; last on the disk
        self._is_synced = True
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)

        tail = sink.tail()
        self._prev = tail.last_digest
        self._prefix = b"" if tail.is_ended else b"\n"
        if tail.torn_bytes is not None:
            torn = {"torn_bytes": tail.torn_bytes, TORN_AFTER: tail.digest_before_torn}
            self._waiting.append(self._note(TORN_ACTION, torn))

    def start(self) -> None:
        """Begin to write. Records that were put before are kept. Repeating it changes nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def put(self, record: Record) -> None:
        """Write the record soon. If the queue is full, count it as lost, unless it is about a change that was made."""
        with self._changed:
            is_full = len(self._waiting) >= self._max_waiting_records
            is_full |= self._num_text_bytes + record.num_text_bytes > MAX_WAITING_TEXT_BYTES
            if self._is_closed or (is_full and not record.is_kept):
                self._lost[record.kind] += 1
                self._num_lost += 1
                is_first = self._lost.total() == 1
            else:
                self._num_text_bytes += record.num_text_bytes
                self._waiting.append(record)
                is_first = False
                was_urgent = self._is_urgent
                self._is_urgent |= record.kind is Kind.ACTION or len(self._waiting) >= GATHER_RECORDS
                if len(self._waiting) == 1 or self._is_urgent > was_urgent:
                    self._changed.notify_all()
        if is_first:
            sentence = "the audit log takes no more records; generations and refusals are counted, and not logged"
            logger.warning("audit records lost kind=%s", record.kind.value, extra=shown(sentence))

    @property
    def problem(self) -> str:
        """Why the log cannot be written at present; empty: it can."""
        if self._error:
            return self._error
        busy_since_s = self._busy_since_s
        if busy_since_s is not None and self._clock() - busy_since_s >= STALLED_AFTER_S:
            return f"a write has not ended for {STALLED_AFTER_S:g} s"
        if len(self._waiting) >= self._max_waiting_records:
            return f"{self._max_waiting_records} records wait to be written"
        return ""

    def stats(self) -> WriterStats:
        """Counts of this moment."""
        return WriterStats(self._num_lines, self._num_lost, len(self._waiting), self.problem)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what waits and end, within the time. What cannot be written then is lost, and the log says so."""
        self.start()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():  # a write that does not end; the process may end all the same
            logger.error("audit log not written to its end num_waiting=%d", len(self._waiting))

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while True:
                batch, lost = self._take()
                if lost:
                    batch.append(self._note("log.lost", {kind.value: count for kind, count in lost.items()}))
                if batch:
                    self._write_batch(batch)
                elif not self._is_synced:
                    self._sync()
                elif self._is_closed:
                    return
        except _GivenUp:
            logger.error("audit log not written to its end: %s", self._error)
        except Exception:
            self._error = "the thread that writes the log has failed"
            logger.exception("audit log failed")
        finally:
            self._sink.close()

    def _take(self) -> tuple[list[Record], Counter[Kind]]:
        """What waits; nothing if the log is closed, or if it is time to bring the last lines to the disk."""
        with self._changed:
            while not (self._waiting or self._lost or self._is_closed):
                left_s = None if self._is_synced else self._synced_s + SYNC_EVERY_S - self._clock()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            if self._waiting:
                self._changed.wait_for(lambda: self._is_urgent or self._is_closed, self._gather_s)
            self._is_urgent = False
            batch, self._waiting = self._waiting, []
            lost, self._lost = self._lost, Counter()
            return batch, lost

    def _write_batch(self, batch: list[Record]) -> None:
        self._check_place()
        pending = bytearray(self._prefix)
        self._prefix = b""
        for record in batch:
            line = self._line(record)
            if line is None:
                continue
            if self._sink.is_full(len(pending), len(line) + 1):
                self._write(pending)
                rotation = self._insist(self._sink.rotate)
                done = {"rotated": rotation.rotated, "removed": list(rotation.removed)}
                self._append(self._line(self._note("log.rotate", done)), pending)
                line = self._line(record)
            self._append(line, pending)
            if len(pending) >= MAX_WRITE_BYTES:
                self._write(pending)
        self._write(pending)
        if any(record.kind is Kind.ACTION for record in batch) or self._clock() - self._synced_s >= SYNC_EVERY_S:
            self._sync()
        with self._changed:
            self._num_text_bytes -= sum(record.num_text_bytes for record in batch)
        for record in batch:
            if record.on_written is not None:
                record.on_written()

    def _line(self, record: Record) -> bytes | None:
        """The record as the next line; None where it cannot be one, which is a mistake of ours."""
        event_id = f"{self._start_id}-{self._num_lines + 1}"
        try:
            return line_of(record, event_id=event_id, source=self._source, prev=self._prev)
        except Exception:
            logger.exception("audit record broken action=%s", record.action)
            with self._changed:
                self._lost[record.kind] += 1
                self._num_lost += 1
            return None

    def _append(self, line: bytes | None, pending: bytearray) -> None:
        if line is not None:
            pending += line
            pending += b"\n"
            self._prev = digest_of(line)
            self._num_lines += 1

    def _check_place(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < SYNC_EVERY_S:
            return
        self._checked_s = now_s
        if not self._insist(self._sink.is_in_place):
            sentence = "the audit log's file was moved or removed; the log goes on in a new one"
            logger.warning("audit log file moved", extra=shown(sentence))
            self._insist(self._sink.reopen)

    def _write(self, pending: bytearray) -> None:
        """Write all of it, however long that takes, and empty it."""
        if pending:
            self._is_synced = False
        while pending:
            del pending[: self._insist(lambda: self._sink.write(bytes(pending)))]

    def _sync(self) -> None:
        self._insist(self._sink.sync)
        self._is_synced = True
        self._synced_s = self._clock()

    def _insist(self, act: Callable[[], T]) -> T:
        """What `act` returns, after as many attempts as it takes. Raises _GivenUp once the log is closed."""
        while True:
            self._busy_since_s = self._clock()
            try:
                result = act()
            except OSError as error:
                self._note_failure(error)
                with self._changed:
                    if self._is_closed:
                        raise _GivenUp from error
                    self._changed.wait_for(lambda: self._is_closed, self._retry_after_s)
            else:
                self._note_success()
                return result
            finally:
                self._busy_since_s = None

    def _note_failure(self, error: OSError) -> None:
        reason = error.strerror or type(error).__name__
        if reason != self._error:
            sentence = f"the audit log cannot be written: {reason}; changes are refused until it can"
            logger.error("audit log not written: %s", reason, extra=shown(sentence))
        self._error = reason

    def _note_success(self) -> None:
        if self._error:
            self._error = ""
            logger.info("audit log written again", extra=shown("the audit log can be written again"))

    def _note(self, action: str, more: Mapping[str, object]) -> Record:
        return Record(Kind.LOG, action, THE_SERVER, self._wall_clock(), Outcome.SUCCESS, more=more)

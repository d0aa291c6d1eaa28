"""The audit log as the other parts use it: changes, refusals, generations, and events of the server.

Decides which events get a line, and refuses changes while lines cannot be written. Without a file only changes are
noted, as lines of the process log. The writer's thread does the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet import __version__
from motet.audit.chain import digest_of

from contract.process_log import AUDIT_LOGGER, printable
from control_plane.access.settings import AccessSettings
from control_plane.access.watched_files import WatchedFiles
from control_plane.audit import actions
from control_plane.audit.actions import CHANGES, SUPPRESSED, action_of
from control_plane.audit.log_file import LogFile, StandardOutput
from control_plane.audit.record import Kind, Outcome, Record
from control_plane.audit.refusals import RefusalLimit
from control_plane.audit.writer import AuditWriter, WriterStats
from control_plane.caller import THE_SERVER, Caller, current_caller
from control_plane.errors import (
    AdapterNotFound,
    AuditUnavailable,
    Exhausted,
    MotetError,
    OperationNotFound,
    PathNotAllowed,
    PermissionDenied,
    SlowConsumer,
    Unauthenticated,
    UploadNotFound,
    correlation_id_of,
)

process_log = logging.getLogger(AUDIT_LOGGER)
logger = logging.getLogger(__name__)

TICK_S = 0.5
# Changes of one caller that fail for one reason, and have a line, in a second. More are counted.
FAILED_CHANGES_PER_S = 20
WRITE_TIMEOUT_S = 5.0  # how long a change that was made waits for its line to be on the disk
INTERNAL, CANCELLED = "INTERNAL", "CANCELLED"  # reasons
_DENIALS = (
    Unauthenticated,
    PermissionDenied,
    PathNotAllowed,
    AdapterNotFound,
    OperationNotFound,
    UploadNotFound,
    Exhausted,
)


@dataclass(slots=True)
class Change:
    """What the line of a change will say. The block may fill in what it learns on the way."""

    resource: str = ""
    digest: str = ""
    request_id: str = ""


class AuditLog:
    """One log, or none. Used from the event loop, except `event`, which every thread may call."""

    def __init__(
        self,
        writer: AuditWriter | None = None,
        *,
        has_text: bool = False,
        settings: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        """`writer`: None for no log. `has_text`: records of generations have prompts and completions.

        `settings`: those of the server, without secrets; the lines of its start and its end have a digest of them.
        """
        self._writer = writer
        self.has_text = has_text and writer is not None
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._write_timeout_s = write_timeout_s
        self._refusals = RefusalLimit(clock)
        self._ticks: asyncio.Task[None] | None = None
        self._settings_digest = digest_of(settings.encode())
        self.event(actions.START, "server", digest=self._settings_digest, more={"version": __version__})

    @property
    def is_on(self) -> bool:
        """Whether there is a log."""
        return self._writer is not None

    def start(self) -> None:
        """Begin to write; call it in the event loop. Repeating it changes nothing."""
        if self._writer is not None and self._ticks is None:
            self._writer.start()
            self._ticks = asyncio.create_task(self._tick_on(), name="audit log")

    async def close(self) -> None:
        """Write everything that waits, and end."""
        if self._ticks is not None:
            self._ticks.cancel()
            await asyncio.wait([self._ticks])
        if self._writer is not None:
            self._put_suppressed(is_last=True)
            self.event(actions.STOP, "server", digest=self._settings_digest)
            await asyncio.to_thread(self._writer.close)

    def stats(self) -> WriterStats | None:
        """What the log did; None if there is none."""
        return None if self._writer is None else self._writer.stats()

    # ---- changes ----

    def check(self) -> None:
        """Raise AuditUnavailable if nothing may be changed at present, because no line could tell of it."""
        problem = "" if self._writer is None else self._writer.problem
        if problem:
            raise AuditUnavailable(f"the audit log cannot be written: {problem}; changes are refused until it can")

    @contextlib.asynccontextmanager
    async def change(
        self, action: str, resource: str = "", *, digest: str = "", request_id: str = ""
    ) -> AsyncIterator[Change]:
        """Write one line when the block ends: who changed what, and the outcome.

        A change that was made returns once its line is on the disk. Raises AuditUnavailable before the block runs if
        the log cannot be written, and after it, with `is_change_made`, if the line is not on the disk in time.
        """
        change = Change(resource, digest, request_id)
        caller = current_caller()
        error: BaseException | None = None
        try:
            self.check()
            yield change
        except BaseException as raised:
            error = raised
            raise
        finally:
            record = self._record(Kind.ACTION, action, caller, error)
            record.resource, record.digest, record.request_id = change.resource, change.digest, change.request_id
            if error is not None:
                self._put_failed(record)
            elif self._writer is not None:
                await self._until_written(self._writer, record)
            else:
                _log(record)

    def _put_failed(self, record: Record) -> None:
        if self._writer is None:
            _log(record)
        elif self._refusals.admit(record.caller, record.reason, record.action, num_lines=FAILED_CHANGES_PER_S):
            self._writer.put(record)

    async def _until_written(self, writer: AuditWriter, record: Record) -> None:
        loop, written = asyncio.get_running_loop(), asyncio.Event()
        record.on_written = lambda: _call_in(loop, written.set)
        writer.put(record)
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await written.wait()
        except TimeoutError as timeout:
            logger.error("audit line not written yet action=%s resource=%s", record.action, record.resource)
            error = AuditUnavailable(
                f"the change was made, and its line of the audit log is not written after {self._write_timeout_s:g} s; "
                "it will be once the log can be written; look at what the change is about before you repeat the call",
                is_change_made=True,
            )
            error.is_audited = True  # the line that waits says that the change was made
            raise error from timeout

    # ---- refusals ----

    def refused(self, method: str, caller: Caller, error: MotetError) -> None:
        """A call of `method`, "/package.Service/Method", ends with this error. Some errors get a line."""
        if self._writer is None or error.is_audited:
            return
        record = self._record(Kind.REFUSAL, action_of(method), caller, error)
        is_change = method in CHANGES
        if not is_change and record.outcome is not Outcome.DENIED:
            return
        if isinstance(error, AdapterNotFound):
            record.resource = printable(error.resource, 100)
        if is_change:
            record.kind = Kind.ACTION
            self._put_failed(record)
        elif self._refusals.admit(caller, record.reason, record.action):
            self._writer.put(record)

    def tick(self) -> None:
        """Write how many refusals got no line in seconds that are over."""
        self._put_suppressed(is_last=False)

    def _put_suppressed(self, *, is_last: bool) -> None:
        assert self._writer is not None, "refusals are counted without a log"
        for suppressed in self._refusals.take_due(is_last=is_last):
            counts = suppressed.count_by_action
            record = Record(
                Kind.REFUSAL, SUPPRESSED, suppressed.caller, self._wall_clock(), Outcome.DENIED, suppressed.reason
            )
            record.more = {"suppressed": sum(counts.values()), "suppressed_by_action": counts}
            self._writer.put(record)

    async def _tick_on(self) -> None:
        while True:
            await self._sleep(TICK_S)
            self.tick()

    # ---- generations and events ----

    def generation(
        self,
        caller: Caller,
        error: BaseException | None,
        *,
        action: str,
        resource: str,
        digest: str,
        request_id: str,
        more: Mapping[str, Any],
        num_text_bytes: int = 0,
    ) -> None:
        """A generation ended, with an error or without."""
        if self._writer is not None:
            record = self._record(Kind.GENERATION, action, caller, error)
            record.resource, record.digest, record.request_id = resource, digest, request_id
            record.more, record.num_text_bytes = more, num_text_bytes
            self._writer.put(record)

    def event(
        self,
        action: str,
        resource: str,
        *,
        caller: Caller = THE_SERVER,
        digest: str = "",
        error: MotetError | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Something happened that no client requested by a call, or a worker did."""
        if self._writer is None:
            return
        record = self._record(Kind.ACTION, action, caller, error)
        record.resource, record.digest, record.more = resource, digest, more
        if error is None or self._refusals.admit(caller, record.reason, action):
            self._writer.put(record)

    def file_read(self, files: WatchedFiles[Any]) -> None:
        """Keys, certificates or lists were read again, and are in effect."""
        self.event(actions.RELOAD, files.what, digest=files.digest, more={"files": list(files.names)})

    def _record(self, kind: Kind, action: str, caller: Caller, error: BaseException | None) -> Record:
        record = Record(kind, action, caller, self._wall_clock())
        if error is not None:
            record.outcome, record.reason = _verdict(error)
            if record.reason == INTERNAL:
                record.correlation_id = correlation_id_of(error)
            if isinstance(error, MotetError):
                error.is_audited = True
        return record


def open_audit_log(access: AccessSettings, *, settings: str) -> AuditLog:
    """The log that `access` describes; `settings` are all of the server, without secrets.

    Raises ValueError, whose text begins with the flag.
    """
    target = access.audit_log
    if target is None:
        return AuditLog()
    source = f"//{socket.gethostname()}/motet/control-plane"
    try:
        sink = (
            StandardOutput(sys.stdout.fileno())
            if target == "-"
            else LogFile(Path(target), max_bytes=access.audit_max_bytes, num_kept=access.audit_keep)
        )
        writer = AuditWriter(sink, source=source)
    except OSError as error:
        raise ValueError(
            f"--audit-log: {target} cannot be opened: {error.strerror}; give a file that this user may write, and that "
            "no other server writes"
        ) from error
    return AuditLog(writer, has_text=access.audit_text, settings=settings)


def _log(record: Record) -> None:
    """The record as a line of the process log, where there is no audit log."""
    process_log.info(
        "action=%s resource=%s digest=%s tenant=%s principal=%s peer=%s outcome=%s reason=%s",
        record.action,
        record.resource,
        record.digest,
        record.caller.tenant,
        record.caller.principal.name,
        record.caller.peer,
        record.outcome.value,
        record.reason,
    )


def reason_of(error: BaseException) -> str:
    """The reason that an error stands for."""
    if isinstance(error, MotetError):
        return error.reason
    return CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else INTERNAL


def _verdict(error: BaseException) -> tuple[Outcome, str]:
    """The outcome and the reason that an error stands for."""
    is_denial = isinstance(error, _DENIALS) and not isinstance(error, SlowConsumer)
    # Where somebody left before the end, a change may have been made all the same.
    return Outcome.DENIED if is_denial else Outcome.FAILURE, reason_of(error)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(call)

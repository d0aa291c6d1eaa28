"""How a server process logs to standard error: sentences for a terminal, key=value lines for a file, or JSON.

Standard library only. A record may carry a sentence for people (`shown`); a terminal shows these, the audit log and
everything from WARNING up. A file gets every record. Whatever has the form of a secret is hidden in both, tracebacks
included.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

from contract.json_log import JsonFormatter
from contract.redaction import redacted, redacted_url

logger = logging.getLogger(__name__)

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
AUDIT_LOGGER = "motet.audit"
PROGRESS_EVERY_S = 2.0
_MAX_SECRET_CHARS = 4096
_GRPC_LOGGER = "grpc._cython.cygrpc"

_OUR_PACKAGES = ("contract", "control_plane", "data_plane", "gateway", "kernels", "motet")

_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_YELLOW, _RED, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


def configure_logging(
    level: str,
    *,
    process: str,
    log_format: str = "text",
    context: Callable[[], Mapping[str, str]] = dict,
    stream: TextIO | None = None,
) -> None:
    """Log records of `level` and above, with `process` as the name that a terminal shows. The audit log always.

    `log_format`: one of LOG_FORMATS; "json" writes an object on each line, to a terminal too. `context`: fields that
    every record of the running task has, such as the trace id. Errors that end the process or a thread are logged, too,
    and not printed by the interpreter, which hides nothing.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.addFilter(_with_context(context))
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    elif stream.isatty():
        handler.setFormatter(_Redacting(_TerminalFormatter(process, in_colour=_takes_colour(os.environ))))
        if level != "debug":
            handler.addFilter(_is_for_people)
    else:
        handler.setFormatter(_Redacting(_LineFormatter(_LINE)))
    # Other packages' debug lines have what they send: paths with credentials, headers, signatures.
    logging.basicConfig(level="INFO" if level == "debug" else level.upper(), handlers=[handler], force=True)
    for package in _OUR_PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
    logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)
    # A traceback for every header that is not UTF-8, several times each: anybody can send some without a credential.
    logging.getLogger(_GRPC_LOGGER).addFilter(_is_no_header)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_of_thread


def quiet_grpc() -> None:
    """Let gRPC write nothing, unless the environment says otherwise. Call it before gRPC is imported.

    It would write lines of its own form for handshakes that fail, and anybody can make handshakes fail. In one of them,
    an error, it repeats the server name that a client sent, with all line breaks and secrets.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def printable(text: str, most: int = 300) -> str:
    """Text from outside, fit for one line of the log: secrets hidden, escaped, cut off after `most` characters."""
    window = text[: most + _MAX_SECRET_CHARS]
    kept = redacted(window)  # before it is cut off: a part of a secret has another form
    is_cut = len(window) < len(text) or len(kept) > most
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in kept[:most])
    return escaped if not is_cut else f"{escaped}… ({len(text)} characters)"


def shown(sentence: str) -> dict[str, str]:
    """The `extra` of a log call: a terminal shows this sentence for the record."""
    return {"shown": sentence}


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        logger.critical("unexpected error", exc_info=(kind, error, traceback))


def _log_uncaught_of_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not issubclass(arguments.exc_type, SystemExit):
        name = arguments.thread.name if arguments.thread is not None else ""
        exc_info = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        logger.error("unexpected error in a thread name=%s", name, exc_info=exc_info)


def _is_no_header(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Invalid encoding on ")


def _is_for_people(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or hasattr(record, "shown") or record.name == AUDIT_LOGGER


def _with_context(context: Callable[[], Mapping[str, str]]) -> Callable[[logging.LogRecord], bool]:
    def add(record: logging.LogRecord) -> bool:
        record.context = context()
        return True

    return add


def _takes_colour(environ: Mapping[str, str]) -> bool:
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class _Redacting(logging.Formatter):
    """What another formatter makes of a record, without secrets. Nothing that a formatter adds is missed so."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return redacted(self._inner.format(record))


class _LineFormatter(logging.Formatter):
    """One key=value line. Line breaks are escaped, but for those of a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        context: Mapping[str, str] = getattr(record, "context", {})
        more = "".join(f" {name}={value}" for name, value in context.items())
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r") + more


class _TerminalFormatter(logging.Formatter):
    """Time, process, sentence."""

    def __init__(self, process: str, *, in_colour: bool) -> None:
        super().__init__()
        self._process = process
        self._in_colour = in_colour

    def format(self, record: logging.LogRecord) -> str:
        text = getattr(record, "shown", None) or record.getMessage()
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
            if self._in_colour:
                text = f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{text}{_PLAIN}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return f"{self.formatTime(record, '%H:%M:%S')} {self._process:<13} {text}"


class Progress:
    """Logs how far a long piece of work has come, at most every PROGRESS_EVERY_S seconds."""

    def __init__(
        self, logger: logging.Logger, what: str, total: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._what = what
        self._total = total
        self._clock = clock
        self._logged_s = clock()
        self._done = 0

    def advance(self) -> None:
        """One more of `total` is done."""
        self._done += 1
        now_s = self._clock()
        if now_s - self._logged_s < PROGRESS_EVERY_S or self._done >= self._total:
            return
        self._logged_s = now_s
        percent = 100 * self._done // self._total
        self._logger.info(
            "%s done=%d total=%d", self._what, self._done, self._total, extra=shown(f"{self._what}: {percent}%")
        )


def shown_value(value: object) -> str:
    """A setting's value for the log, without secrets."""
    return redacted_url(value) if isinstance(value, str) else str(value)


def settings_line(config: Any, *, only_changed: bool, show: Callable[[Any], str] = shown_value) -> str:
    """The fields of a config dataclass as key=value, all of them or those that differ from their defaults.

    In a group a field is called like its flag, where that has a name of its own: `redis_tls_ca`, not `ca`.
    """
    return _settings_line(config, only_changed, show, is_group=False)


def _settings_line(config: Any, only_changed: bool, show: Callable[[Any], str], *, is_group: bool) -> str:
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):  # a group of settings
            parts.append(_settings_line(value, only_changed, show, is_group=True))
        elif not only_changed or value != field.default:
            flag = field.metadata["flag"].name if is_group and "flag" in field.metadata else ""
            name = flag.removeprefix("--").replace("-", "_") or field.name
            parts.append(f"{name}={show(value)}")
    return " ".join(filter(None, parts))

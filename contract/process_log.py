"""How a server process logs to standard error: sentences for a person at a terminal, key=value lines for a file.

Standard library only. A record may carry a sentence for people (`shown`); a terminal shows these, the audit log and
everything from WARNING up. A file gets every record as it is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

LOG_LEVELS = ("debug", "info", "warning", "error")
AUDIT_LOGGER = "motet.audit"
PROGRESS_EVERY_S = 2.0

_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_YELLOW, _RED, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


def configure_logging(level: str, *, process: str, stream: TextIO | None = None) -> None:
    """Log records of `level` and above, with `process` as the name that a terminal shows. The audit log always."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    if stream.isatty():
        handler.setFormatter(_TerminalFormatter(process, in_colour=_takes_colour(os.environ)))
        if level != "debug":
            handler.addFilter(_is_for_people)
    else:
        handler.setFormatter(logging.Formatter(_LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)


def printable(text: str, most: int = 300) -> str:
    """Text from outside, fit for one line of the log: escaped, and cut off after `most` characters."""
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:most])
    return escaped if len(text) <= most else f"{escaped}… ({len(text)} characters)"


def shown(sentence: str) -> dict[str, str]:
    """For a log call's `extra`: what a terminal shows of the record."""
    return {"shown": sentence}


def _is_for_people(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or hasattr(record, "shown") or record.name == AUDIT_LOGGER


def _takes_colour(environ: Mapping[str, str]) -> bool:
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


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


def settings_line(config: Any, *, only_changed: bool, show: Callable[[Any], str] = str) -> str:
    """The fields of a config dataclass as key=value, all of them or those that differ from their defaults."""
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):  # a group of settings
            parts.append(settings_line(value, only_changed=only_changed, show=show))
        elif not only_changed or value != field.default:
            parts.append(f"{field.name}={show(value)}")
    return " ".join(filter(None, parts))

"""A log record as one JSON object on one line, for systems that collect logs."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from contract.redaction import redacted

# A specifier of %-formatting, with the name before it where there is one: "epoch=%d".
_SPECIFIER = re.compile(r"(?:([A-Za-z_]\w*)=)?%([-#0 +]*\d*(?:\.\d+)?)([diouxXeEfFgGcrsa%])")
_EVENT_END = re.compile(r"[:,]? *[A-Za-z_]\w*=%")


class JsonFormatter(logging.Formatter):
    """time, level, logger, process, event, message, and in `fields` what the message has as name=value.

    `event` is the message up to its first field, with "..." for other values: the same text for each record of one
    place in the code. Nothing that a client sends can make a second line or a second object: JSON escapes it. Secrets
    are hidden in every value.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "event": redacted(event_of(record)),
            "message": redacted(record.getMessage()),
        }
        if fields := fields_of(record):
            line["fields"] = fields
        line |= getattr(record, "context", None) or {}
        if record.exc_info:
            line["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def _hidden(name: str, value: str) -> str:
    """A value without secrets: some are known by the name before them."""
    return redacted(f"{name}={value}").removeprefix(f"{name}=")


def event_of(record: logging.LogRecord) -> str:
    """What happened, without values."""
    text = str(record.msg)
    end = _EVENT_END.search(text)
    head = text if end is None else text[: end.start()]
    # No values at all: the text is to be the same whatever they are.
    return _SPECIFIER.sub(lambda found: "%" if found[3] == "%" else "...", head) if record.args else text


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The values of a message that have a name, numbers as numbers."""
    arguments = record.args
    if not isinstance(arguments, tuple) or not arguments:
        return {}
    specifiers = [found for found in _SPECIFIER.finditer(str(record.msg)) if found[3] != "%"]
    if len(specifiers) != len(arguments):
        return {}
    return {
        found[1]: value if isinstance(value, int | float) else _hidden(found[1], str(value))
        for found, value in zip(specifiers, arguments, strict=True)
        if found[1] is not None
    }

"""What the audit log says of one event, and how the event becomes a line.

A line is a CloudEvents 1.0 envelope in JSON. Names that clients choose have no credential, and there is text of users
only where the caller puts some into `more`. No I/O; the writer's thread makes the lines.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from contract.redaction import redacted
from control_plane.caller import Caller

_TYPE = "motet.audit.v1."


class Kind(enum.Enum):
    """What kind of event a record is about: the end of the envelope's `type`."""

    ACTION = "action"  # somebody changed something, or tried to
    REFUSAL = "refusal"  # a call was refused
    GENERATION = "generation"  # a request for tokens ended
    LOG = "log"  # about the log itself


class Outcome(enum.Enum):
    """How an action ended."""

    SUCCESS = "success"
    DENIED = "denied"  # the caller may not, or has used up what it may
    FAILURE = "failure"


# Not frozen: one is made for each generation, and a frozen one costs three times as much to make.
@dataclass(slots=True, eq=False)
class Record:
    """One event."""

    kind: Kind
    action: str
    caller: Caller
    time_s: float  # wall clock, seconds since 1970
    outcome: Outcome = Outcome.SUCCESS
    reason: str = ""  # of the error; empty: success
    resource: str = ""  # what the action is about, such as "adapters/poet"; the envelope's `subject`
    digest: str = ""  # of the adapter version, or of the settings
    request_id: str = ""  # the client's name of the request, or the server's own
    correlation_id: str = ""  # names the line of the process log that has our own mistake
    more: Mapping[str, Any] | None = None  # further fields of `data`
    num_text_bytes: int = 0  # about how much memory its text takes while it waits
    # Called once the record is on the disk, in the writer's thread. A change waits for that.
    on_written: Callable[[], None] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether it is about a change that was made: such a record is never lost for want of room."""
        return self.kind is Kind.ACTION and self.outcome is Outcome.SUCCESS


def method_of(caller: Caller) -> str:
    """How the caller proved who it is: "key", "jwt", "cert", "server", or "none"."""
    return caller.principal.name.partition(":")[0] or "none"


def fields_of(record: Record) -> dict[str, Any]:
    """The `data` of the envelope. Clients choose many of the names: what has the form of a secret is hidden."""
    caller = record.caller
    data = {
        "actor": {
            "principal": redacted(caller.principal.name),
            "tenant": redacted(caller.tenant),
            "method": method_of(caller),
            "peer": caller.peer,
        },
        "action": redacted(record.action),
        "resource": redacted(record.resource),
        "digest": redacted(record.digest),
        "outcome": record.outcome.value,
        "reason": record.reason,
        "request_id": redacted(record.request_id),
        "correlation_id": record.correlation_id,
    }
    data.update(record.more or {})
    return data


def line_of(record: Record, *, event_id: str, source: str, prev: str) -> bytes:
    """The record as one line of the log, without its end of line. ASCII, so that no character ends a line."""
    event: dict[str, Any] = {"specversion": "1.0", "id": event_id, "source": source, "type": _TYPE + record.kind.value}
    event["time"] = f"{datetime.fromtimestamp(record.time_s, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
    if record.resource:  # CloudEvents allows no empty subject
        event["subject"] = redacted(record.resource)
    event["datacontenttype"] = "application/json"
    event["data"] = fields_of(record)
    event["prev"] = prev
    return _encode(event).encode("ascii")


_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode

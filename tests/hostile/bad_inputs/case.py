"""One bad (or just still good) input as data, how it is sent, and what is wrong with the response to it.

A case is bytes: what an honest client library refuses to build is sent all the same. Nothing here knows a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
OK = grpc.StatusCode.OK
ERROR_DOMAIN = "motet"
TIMEOUT_S = 60.0  # of one call; the machine may be busy
# What no client may ever read: paths, stack traces, classes, keys of the host cache, addresses of objects.
LEAKS = re.compile(
    r"/tmp/|/root\b|/home/|/proc/|Traceback|\.py\b|\bline \d+|motet:a:|<class|<function|\b0x[0-9a-f]{6,16}\b|redis"
    r"|\b[A-Z]\w*(Error|Exception|Warning)\b|\bpb2\b|NoneType",
    re.IGNORECASE,
)
_CLASS_NAME = re.compile(r"\b(?:[A-Z][a-z]+){2,}(?:_pb2)?\.\w+|\bgoogle\.protobuf\b")
MAX_MESSAGE_BYTES = 1000
ANY_FIELD = ("*",)  # as Case.fields: one field is named, whichever


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call and the response that is due."""

    name: str  # field and value, or what is wrong
    method: str  # "/package.Service/Method"
    messages: tuple[bytes, ...]  # sent one after the other, as they are
    code: grpc.StatusCode = INVALID
    fields: tuple[str, ...] = ()  # what the BadRequest detail names, in order; empty: no BadRequest is due
    says: str = ""  # what the message must hold, such as the limit
    reason: str = ""  # of the ErrorInfo detail; empty: any
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    num_responses: int | None = None  # for OK: how many are read before the call is given up; None: all
    has_details: bool = True  # False: gRPC itself or a library's service refuses it, without google.rpc details


@dataclass(frozen=True)
class Outcome:
    """What came back."""

    code: grpc.StatusCode
    message: str = ""
    status: status_pb2.Status = field(default_factory=status_pb2.Status)  # with the details, where there are any
    responses: tuple[bytes, ...] = ()

    @property
    def reason(self) -> str:
        """Of the ErrorInfo detail; empty: there is none."""
        info = self.detail(error_details_pb2.ErrorInfo())
        return "" if info is None else info.reason if info.domain == ERROR_DOMAIN else f"of the domain {info.domain}"

    @property
    def fields(self) -> tuple[str, ...]:
        """What the BadRequest detail names."""
        bad = self.detail(error_details_pb2.BadRequest())
        return () if bad is None else tuple(violation.field for violation in bad.field_violations)

    def detail(self, kind: Any) -> Any:
        """The google.rpc detail of the type of `kind`, or None."""
        return kind if any(packed.Unpack(kind) for packed in self.status.details) else None


def send(channel: grpc.Channel, case: Case, *, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Make the call. On the wire all four kinds of method are a stream each way."""
    raw: Any = channel  # the stubs demand serializers; these messages are bytes
    call = raw.stream_stream(case.method)(iter(case.messages), timeout=timeout_s, metadata=case.metadata)
    responses: list[bytes] = []
    try:
        while case.num_responses is None or len(responses) < case.num_responses:
            responses.append(next(call))
        call.cancel()
    except StopIteration:
        pass
    except grpc.RpcError:
        packed = dict(call.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        return Outcome(call.code(), call.details() or "", status_pb2.Status.FromString(packed), tuple(responses))
    return Outcome(OK, responses=tuple(responses))


def problems(case: Case, outcome: Outcome, *, secrets: Sequence[str] = ()) -> list[str]:
    """What is wrong with the response; nothing if it is as it should be. `secrets`: paths that no response may hold."""
    found = []
    if outcome.code != case.code:
        return [f"{outcome.code.name} where {case.code.name} is due: {outcome.message}"]
    if outcome.code == OK:
        return []
    if case.has_details and not outcome.reason:
        found.append("no ErrorInfo detail")
    if case.reason and outcome.reason != case.reason:
        found.append(f"reason {outcome.reason} where {case.reason} is due")
    is_due = len(outcome.fields) == 1 if case.fields == ANY_FIELD else outcome.fields == case.fields
    if not is_due:
        found.append(f"fields {outcome.fields} where {case.fields} are due")
    if case.says and case.says not in outcome.message:
        found.append(f"the message does not say {case.says!r}")
    if case.has_details and not outcome.message:
        found.append("no message")
    return [*(f"{problem}: {outcome.message}" for problem in found), *wording_problems(outcome, secrets)]


def wording_problems(outcome: Outcome, secrets: Iterable[str] = ()) -> list[str]:
    """What no error message may do, whatever it is about."""
    message, found = outcome.message, []
    # A long name is cut in either place, in the detail with an ellipsis.
    if outcome.fields and not message.startswith(outcome.fields[0].removesuffix("…")):
        found.append(f"the message does not begin with the field {outcome.fields[0]}")
    for leak in (LEAKS.search(message), _CLASS_NAME.search(message)):
        if leak:
            found.append(f"the message holds {leak[0]!r}")
    found += [f"the message holds the path {secret}" for secret in secrets if secret in message]
    if not message.isprintable():
        found.append(f"the message holds unprintable characters: {message!r}")
    if len(message.encode()) > MAX_MESSAGE_BYTES:
        found.append(f"the message has {len(message.encode())} bytes")
    return [f"{problem}: {message[:300]}" for problem in found]


def set_path(message: Message, path: str, value: Any) -> None:
    """Set the field at a dotted path; lists and maps are replaced."""
    *parents, name = path.split(".")
    target: Any = message
    for parent in parents:
        target = getattr(target, parent)
    target.ClearField(name)
    if isinstance(value, dict):
        getattr(target, name).update(value)
    elif isinstance(value, list):
        getattr(target, name).extend(value)
    elif isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    else:
        setattr(target, name, value)


def short(value: object) -> str:
    """A value for a case's name."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}...({len(text)} characters, {crc32(text.encode()):08x})"

"""The trace that a call belongs to, as W3C Trace Context has it in the metadata `traceparent` and `tracestate`."""

from __future__ import annotations

import re
from collections.abc import Sequence

TRACEPARENT_KEY, TRACESTATE_KEY = "traceparent", "tracestate"
MAX_TRACESTATE_CHARS = 512  # that the specification wants passed on
MAX_TRACESTATE_MEMBERS = 32
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})="
    r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


def valid_traceparent(text: str) -> str:
    """The text if it has the form of a traceparent, else "": the specification has a wrong one ignored."""
    found = _FORM.fullmatch(text) if len(text) <= 256 else None
    if found is None or found[1] == "ff" or not found[2].strip("0") or not found[3].strip("0"):
        return ""
    return "" if found[1] == "00" and found[5] else text


def valid_tracestate(values: Sequence[str]) -> str:
    """The members of all `values` in their order, or "" if they are too long, too many, or one of them is wrong.

    The specification keeps the traceparent of a call whose tracestate is ignored.
    """
    if sum(map(len, values)) + len(values) - 1 > MAX_TRACESTATE_CHARS:
        return ""
    members = [member for value in values for part in value.split(",") if (member := part.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {each[1] for each in found if each is not None}
    return ",".join(members) if len(keys) == len(members) <= MAX_TRACESTATE_MEMBERS else ""


def trace_id_of(traceparent: str) -> str:
    """32 hexadecimal digits, of a valid traceparent; "" of an empty one."""
    return traceparent[3:35]

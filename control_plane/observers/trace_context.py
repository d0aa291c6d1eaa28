"""The trace that a call belongs to, as W3C Trace Context has it in the metadata `traceparent`."""

from __future__ import annotations

import re

TRACEPARENT_KEY = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def valid_traceparent(text: str) -> str:
    """The text if it has the form of a traceparent, else "": the specification has a wrong one ignored."""
    found = _FORM.fullmatch(text) if len(text) <= 256 else None
    if found is None or found[1] == "ff" or not found[2].strip("0") or not found[3].strip("0"):
        return ""
    return "" if found[1] == "00" and found[5] else text


def trace_id_of(traceparent: str) -> str:
    """32 hexadecimal digits, of a valid traceparent; "" of an empty one."""
    return traceparent[3:35]

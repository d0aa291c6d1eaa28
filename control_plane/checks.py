"""Checks of what clients name and describe: adapter ids, digests, names, labels, pages. Each check is here once.

`Violations` collects everything that is wrong with one request, so that a client gets all of it in one refusal;
`require` refuses at the first. Each refusal names the field, the value, the limit and the next step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from contract.ids import ADAPTER_ID_FORM, DIGEST_FORM, LABEL_KEY_FORM, is_adapter_id, is_digest, is_label_key
from contract.redaction import redacted
from control_plane.errors import FieldViolation, InvalidRequest

_PRINTABLE = re.compile(r"[ -~]*")

_MAX_SEARCHED_CHARS = 1024  # of a quoted value: what is shown of a token that is longer has no signature

T = TypeVar("T")
MAX_DISPLAY_NAME_BYTES = 256
MAX_LABELS = 64
MAX_LABEL_VALUE_BYTES = 256
MAX_REQUEST_ID_BYTES = 128
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_TOKEN_CHARS = 512


class Violations:
    """Collects violations; `raise_if_any` refuses the request with all of them."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def add(self, field: str, description: str) -> None:
        self._found.append(FieldViolation(field, description))

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self) -> None:
        if self._found:
            raise InvalidRequest(*self._found)


def refuse(field: str, description: str) -> InvalidRequest:
    """The error for one thing that is wrong with one field."""
    return InvalidRequest(FieldViolation(field, description))


def require(check: Callable[[T, str, Violations], None], value: T, field: str) -> None:
    """Run one of the checks below. Raises InvalidRequest if `value` does not pass."""
    violations = Violations()
    check(value, field, violations)
    violations.raise_if_any()


def quoted(value: str) -> str:
    """A client's own value for an error text: escaped and short, without what has the form of a secret.

    Texts of errors end in logs of clients, such as those of CI.
    """
    value = redacted(value[:_MAX_SEARCHED_CHARS])
    return repr(value if len(value) <= 64 else value[:61] + "...")


def check_adapter_id(adapter_id: str, field: str, violations: Violations) -> None:
    """An adapter id becomes a file name, a Redis key and a label."""
    if is_adapter_id(adapter_id):
        return
    name, _, selector = adapter_id.partition("@")
    if selector and is_adapter_id(name):
        violations.add(
            field,
            f"{quoted(adapter_id)} names a version, and the name of an adapter is expected: give {name!r}, and the "
            f"version in a field of its own (of commands: --version @{quoted(selector)[1:-1]}, or VERSION after NAME)",
        )
    else:
        violations.add(field, f"{quoted(adapter_id)} is not a valid adapter id: {ADAPTER_ID_FORM}")


def check_digest(digest: str, field: str, violations: Violations) -> None:
    if not is_digest(digest):
        violations.add(field, f"{quoted(digest)} is not a valid digest: {DIGEST_FORM}")


def check_request_id(request_id: str, field: str, violations: Violations) -> None:
    """The client's own string: it becomes a key of the idempotency cache and part of messages."""
    num_bytes = _num_bytes(request_id)
    if num_bytes > MAX_REQUEST_ID_BYTES:
        violations.add(field, f"has {num_bytes} bytes; use at most {MAX_REQUEST_ID_BYTES}")
    elif not _PRINTABLE.fullmatch(request_id):
        violations.add(field, f"{quoted(request_id)} is not a valid request id: use printable ASCII characters only")


def check_display_name(display_name: str, field: str, violations: Violations) -> None:
    num_bytes = _num_bytes(display_name)
    if num_bytes > MAX_DISPLAY_NAME_BYTES:
        violations.add(field, f"has {num_bytes} bytes; use at most {MAX_DISPLAY_NAME_BYTES}")


def check_labels(labels: Mapping[str, str], field: str, violations: Violations) -> None:
    if len(labels) > MAX_LABELS:
        violations.add(field, f"has {len(labels)} labels; use at most {MAX_LABELS}")
        return
    for key, value in labels.items():
        if not is_label_key(key):
            violations.add(field, f"the key {quoted(key)} is not a valid label key: {LABEL_KEY_FORM}")
        num_bytes = _num_bytes(value)
        if num_bytes > MAX_LABEL_VALUE_BYTES:
            violations.add(
                f"{field}[{quoted(key)}]", f"the value has {num_bytes} bytes; use at most {MAX_LABEL_VALUE_BYTES}"
            )


def page_size_of(page_size: int, page_token: str) -> int:
    """The page size in effect. Raises InvalidRequest, also for a token that no page can have returned."""
    violations = Violations()
    if not 0 <= page_size <= MAX_PAGE_SIZE:
        violations.add(
            "page_size", f"is {page_size}; use a count from 0 to {MAX_PAGE_SIZE}; 0 means {DEFAULT_PAGE_SIZE}"
        )
    if len(page_token) > MAX_PAGE_TOKEN_CHARS:
        violations.add("page_token", f"has {len(page_token)} characters; send the next_page_token of the page before")
    violations.raise_if_any()
    return page_size or DEFAULT_PAGE_SIZE


def bad_page_token() -> InvalidRequest:
    """The error for a token that no page of this list returned."""
    return refuse("page_token", "is not a token of this list, or is too old; list again without a token")


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))

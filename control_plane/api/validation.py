"""Checks shared by the services: what a client may send, each refusal naming field, value and limit.

Plain functions over plain values; `Violations` gathers everything wrong with one request before it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from contract.ids import ADAPTER_ID_FORM, DIGEST_FORM, is_adapter_id, is_digest
from control_plane.errors import ContextTooLong, FieldViolation, InvalidRequest

ADAPTER_PREFIX = "adapters/"
MAX_DISPLAY_NAME_BYTES = 256
MAX_LABELS = 64
MAX_LABEL_VALUE_BYTES = 256
MAX_REQUEST_ID_BYTES = 128
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_BYTES = 2 * 2**20  # at which a page ends: a gRPC client takes messages of up to 4 MiB by default
MAX_PAGE_TOKEN_CHARS = 512

_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_PRINTABLE = re.compile(r"[ -~]*")


class Violations:
    """Gathers violations; `raise_if_any` refuses the request with all of them."""

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
    """The error for one thing wrong with one field."""
    return InvalidRequest(FieldViolation(field, description))


def prompt_too_long(field: str, num_tokens: str, max_model_len: int) -> ContextTooLong:
    """The error for a prompt that leaves no room for a token. `num_tokens` in words: "5000 tokens"."""
    return ContextTooLong(
        FieldViolation(
            field,
            f"prompt of {num_tokens}; at most {max_model_len - 1}, "
            f"one less than the context of {max_model_len} tokens; shorten the prompt",
        )
    )


def quoted(value: str) -> str:
    """A client's own value for an error text: escaped and short."""
    return repr(value if len(value) <= 64 else value[:61] + "...")


def check_adapter_id(adapter_id: str, field: str, violations: Violations) -> None:
    """An id of an adapter: safe as a file name, a Redis key and a label."""
    if not is_adapter_id(adapter_id):
        violations.add(field, f"{quoted(adapter_id)} is not a valid adapter id: {ADAPTER_ID_FORM}")


def adapter_id_of(name: str, field: str = "name") -> str:
    """The id in a resource name "adapters/{id}". Raises InvalidRequest."""
    if not name.startswith(ADAPTER_PREFIX):
        raise refuse(field, f"{quoted(name)} is not a resource name of the form adapters/{{id}}")
    adapter_id = name.removeprefix(ADAPTER_PREFIX)
    violations = Violations()
    check_adapter_id(adapter_id, field, violations)
    violations.raise_if_any()
    return adapter_id


def check_digest(digest: str, field: str, violations: Violations) -> None:
    if not is_digest(digest):
        violations.add(field, f"{quoted(digest)} is not a valid digest: {DIGEST_FORM}")


def check_request_id(request_id: str, violations: Violations, field: str = "request_id") -> None:
    if len(request_id.encode()) > MAX_REQUEST_ID_BYTES:
        violations.add(field, f"{len(request_id.encode())} bytes; at most {MAX_REQUEST_ID_BYTES}")
    elif not _PRINTABLE.fullmatch(request_id):
        violations.add(field, f"{quoted(request_id)} holds other than printable ASCII characters")


def check_display_name(display_name: str, field: str, violations: Violations) -> None:
    num_bytes = len(display_name.encode())
    if num_bytes > MAX_DISPLAY_NAME_BYTES:
        violations.add(field, f"{num_bytes} bytes; at most {MAX_DISPLAY_NAME_BYTES}")


def check_labels(labels: Mapping[str, str], field: str, violations: Violations) -> None:
    if len(labels) > MAX_LABELS:
        violations.add(field, f"{len(labels)} labels; at most {MAX_LABELS}")
        return
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            violations.add(field, f"key {quoted(key)} does not match [a-z][a-z0-9_-]{{0,62}}")
        if len(value.encode()) > MAX_LABEL_VALUE_BYTES:
            violations.add(
                f"{field}[{quoted(key)}]", f"value of {len(value.encode())} bytes; at most {MAX_LABEL_VALUE_BYTES}"
            )


def page_size_of(page_size: int, page_token: str) -> int:
    """The page size in effect. Raises InvalidRequest."""
    violations = Violations()
    if page_size > MAX_PAGE_SIZE or page_size < 0:
        violations.add(
            "page_size", f"is {page_size}; give a count from 0 to {MAX_PAGE_SIZE}; 0 means {DEFAULT_PAGE_SIZE}"
        )
    if len(page_token) > MAX_PAGE_TOKEN_CHARS:
        violations.add("page_token", f"{len(page_token)} characters; send next_page_token of the page before as it is")
    violations.raise_if_any()
    return page_size or DEFAULT_PAGE_SIZE

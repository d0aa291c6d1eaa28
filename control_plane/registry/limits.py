"""Checks of what clients name and describe: ids, labels, pages. Raises InvalidRequest, field by field."""

from __future__ import annotations

import re
from collections.abc import Mapping

from contract.ids import ADAPTER_ID_FORM, DIGEST_FORM, is_adapter_id, is_digest
from control_plane.errors import FieldViolation, InvalidRequest
from control_plane.registry.peft.safetensors_header import shorten

MAX_DISPLAY_NAME_BYTES = 256
MAX_LABELS = 64
MAX_LABEL_VALUE_BYTES = 256
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_LABEL_KEY = re.compile(r"^[a-z][a-z0-9_-]{0,62}\Z")


def check_adapter_id(adapter_id: str, field: str = "adapter_id") -> None:
    """Ids become file names and keys, so only plain ones pass."""
    if not is_adapter_id(adapter_id):
        raise _invalid(
            field,
            f"{shorten(adapter_id, 80)!r} is not a valid adapter id: {ADAPTER_ID_FORM}",
        )


def check_digest(digest: str, field: str = "digest") -> None:
    """A digest is 64 lower-case hexadecimal digits."""
    if not is_digest(digest):
        raise _invalid(field, f"{shorten(digest, 80)!r} is not a valid digest: {DIGEST_FORM}")


def check_display_name(display_name: str) -> None:
    """A short text."""
    size = len(display_name.encode("utf-8", "surrogatepass"))
    if size > MAX_DISPLAY_NAME_BYTES:
        raise _invalid("display_name", f"{size} bytes, limit {MAX_DISPLAY_NAME_BYTES}")


def check_labels(labels: Mapping[str, str]) -> None:
    """Few, short, plainly named."""
    if len(labels) > MAX_LABELS:
        raise _invalid("labels", f"{len(labels)} labels, limit {MAX_LABELS}")
    for key, value in labels.items():
        if not _LABEL_KEY.match(key):
            raise _invalid("labels", f"the key {shorten(key, 80)!r} must match [a-z][a-z0-9_-]{{0,62}}")
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > MAX_LABEL_VALUE_BYTES:
            raise _invalid(f"labels[{key}]", f"{size} bytes, limit {MAX_LABEL_VALUE_BYTES}")


def check_page_size(page_size: int) -> int:
    """The page size in effect; 0 asks for the default."""
    if not 0 <= page_size <= MAX_PAGE_SIZE:
        raise _invalid("page_size", f"is {page_size}, limit {MAX_PAGE_SIZE}; 0 gives {DEFAULT_PAGE_SIZE}")
    return page_size or DEFAULT_PAGE_SIZE


def bad_page_token() -> InvalidRequest:
    """The error for a token that no page gave."""
    return _invalid("page_token", "was not given by an earlier page; begin again without it")


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, description))

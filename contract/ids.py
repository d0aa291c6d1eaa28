"""The forms of the ids that several parts check: of adapters, their versions (digests) and labels, and of workers."""

from __future__ import annotations

import re

# Safe as a file name, as a part of a Redis key and as a label.
_ADAPTER_ID = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9._-]{0,62}")
# How an id matches it, for people.
ADAPTER_ID_FORM = (
    "use 1 to 63 characters of a-z, 0-9, '.', '_' and '-', the first one a letter or a digit, without two dots in a row"
)

_WORKER_ID = re.compile(r"[a-z0-9._-]{1,63}")
WORKER_ID_FORM = "use 1 to 63 characters of a-z, 0-9, '.', '_' and '-'"

_DIGEST = re.compile(r"[0-9a-f]{64}")
DIGEST_FORM = "use 64 lower-case hexadecimal digits"

_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
LABEL_KEY_FORM = "use 1 to 63 characters of a-z, 0-9, '_' and '-', the first one a letter"

_VERSION_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
MAX_VERSION_NUMBER = 999_999_999


def is_adapter_id(text: str) -> bool:
    """Whether `text` can be the id of an adapter."""
    return _ADAPTER_ID.fullmatch(text) is not None


def is_worker_id(text: str) -> bool:
    """Whether `text` can be the id of a worker."""
    return _WORKER_ID.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Whether `text` is a SHA-256 as Motet writes it: 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def is_label_key(text: str) -> bool:
    """Whether `text` can be the key of a label, or the label of a version."""
    return _LABEL_KEY.fullmatch(text) is not None


def is_version_selector(text: str) -> bool:
    """Whether `text` can be the number or the label of a version."""
    return _VERSION_NUMBER.fullmatch(text) is not None or is_label_key(text)

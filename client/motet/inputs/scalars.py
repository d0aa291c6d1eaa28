"""Texts and numbers of callers that the wire can carry; it would cut off or refuse anything else without a word."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import SupportsFloat

from motet.errors import invalid_field


def text_of(field: str, value: object) -> str:
    """`value` as a text the wire can carry. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise invalid_field(field, f"is of type {type(value).__name__}; give a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid_field(
            field, f"is not valid UTF-8: half of a surrogate pair is at character {error.start}; give whole characters"
        ) from None
    return value


def uint_of(field: str, value: object, limit: int) -> int:
    """`value` as an integer from 0 to `limit`. Raises InvalidArgument."""
    return integer_of(field, value, 0, limit)


def integer_of(field: str, value: object, lowest: int, highest: int) -> int:
    """`value` as an integer the wire can carry. Raises InvalidArgument."""
    if isinstance(value, bool):
        raise invalid_field(field, f"is {value}; give an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # this is where a wrong type is found
    except TypeError:
        raise invalid_field(field, f"is {value!r:.100}; give an integer") from None
    if not lowest <= number <= highest:
        raise invalid_field(field, f"is {number}; give an integer from {lowest} to {highest}")
    return number


def number_of(field: str, value: object) -> float:
    """`value` as a number the wire can carry. Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise invalid_field(field, f"is {value!r:.100}; give a number")
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):  # too large, or an array of several
        raise invalid_field(field, f"is {value!r:.100}; give a number that a float holds") from None


def truth_of(field: str, value: object) -> bool:
    """`value` as True or False; numbers may stand for them. Raises InvalidArgument."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # this is where a wrong type is found
    except TypeError:
        number = -1
    if number not in (0, 1):
        raise invalid_field(field, f"is {value!r:.100}; give True or False")
    return bool(number)


def list_of(field: str, value: object) -> list[object]:
    """The parts of `value`, none for None. Raises InvalidArgument."""
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise invalid_field(field, f"is {value!r:.100}; give a list")
    return list(value)

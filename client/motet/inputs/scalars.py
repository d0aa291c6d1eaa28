"""Texts and numbers of callers that the wire can carry; it would cut off or refuse anything else without a word."""

from __future__ import annotations

import operator

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
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # this is where a wrong type is found
    except TypeError:
        raise invalid_field(field, f"is {value!r}; give an integer") from None
    if not lowest <= number <= highest:
        raise invalid_field(field, f"is {number}; give an integer from {lowest} to {highest}")
    return number

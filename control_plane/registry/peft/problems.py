"""Collects what is wrong with an adapter's files, so that one error names all of it.

Problems that differ only in numbers and in names of modules and tensors are one problem with a count. The error is as
long as one of the API may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from control_plane.errors import FieldViolation, InvalidAdapter

MAX_VIOLATIONS = 6  # of an error; control_plane/api/rpc/error_status.py sends no more
_MAX_NAMES = 150  # characters of the names in the last violation
_NAME_OR_NUMBER = re.compile(r"\w+(?:\.\w+)+|\d+")


class Problems:
    """What was found so far, in the order in which it was found."""

    def __init__(self) -> None:
        # By what the problem is about: the first violation, and the number of those like it.
        self._found: dict[tuple[str, str], tuple[FieldViolation, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, violation: FieldViolation) -> None:
        """Note a problem."""
        # The field is the name of a key, or that of a tensor or module, which has dots.
        key = "" if "." in violation.field else violation.field
        like = (key, _NAME_OR_NUMBER.sub("*", violation.description))
        first, count = self._found.get(like, (violation, 0))
        self._found[like] = (first, count + 1)

    def note(self, error: InvalidAdapter) -> None:
        """Note what an error says."""
        for violation in error.violations:
            self.add(violation)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Note the problems that the block raises as InvalidAdapter."""
        try:
            yield
        except InvalidAdapter as error:
            self.note(error)

    def raise_all(self) -> None:
        """Raise InvalidAdapter with everything that was found, if anything was."""
        if not self._found:
            return
        found = [_counted(violation, count) for violation, count in self._found.values()]
        if len(found) > MAX_VIOLATIONS:
            kept, others = found[: MAX_VIOLATIONS - 1], found[MAX_VIOLATIONS - 1 :]
            names = ", ".join(dict.fromkeys(violation.field for violation in others))
            names = names if len(names) <= _MAX_NAMES else names[:_MAX_NAMES] + "..."
            rest = f"{len(others)} more problems are not described here: {names}; correct the others first"
            found = [*kept, FieldViolation(others[0].field, rest)]
        raise InvalidAdapter(*found)


def _counted(violation: FieldViolation, count: int) -> FieldViolation:
    if count == 1:
        return violation
    return FieldViolation(violation.field, f"{violation.description} (and {count - 1} more like it)")

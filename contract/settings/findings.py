"""What an examination of an installation found; `motet doctor` shows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """How it is."""

    OK = "ok"
    WARNING = "warning"  # it works, with less than it could
    WRONG = "wrong"  # it does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    detail: str
    advice: str = ""  # what to do, where the state is not OK

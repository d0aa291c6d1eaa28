"""What the tuner searches, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.tuning import Size


@dataclass(frozen=True, slots=True)
class Problem:
    """One bucket of one op. Launches are the op's frozen dataclass, as `kernels.tuning.tuned` takes and gives it."""

    sizes: Mapping[str, Size]  # as the op gives them to `tuned`
    default: Any
    candidates: Sequence[Any]
    is_right: Callable[[Any], bool]  # runs a launch on exact integers; raises if it cannot be launched
    run: Callable[[Any], object]  # the call that is timed


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    best: Any
    default_s: float
    best_s: float
    wrong: list[Any] = field(default_factory=list)
    cannot_run: list[tuple[Any, str]] = field(default_factory=list)  # with the first line of the error

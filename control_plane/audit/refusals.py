"""Bounds the lines of the audit log about refusals, so that a flood of refusals does not fill the disk.

For each caller and reason a limited number of refusals a second get a line. The rest are counted, and the count gets a
line when the second is over. Used from one event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from control_plane.caller import Caller

WINDOW_S = 1.0
MAX_WINDOWS = 100  # callers and reasons that are counted apart at once; the rest share one count
MANY = "VARIOUS"  # the reason of that count


@dataclass(slots=True, eq=False)
class _Window:
    caller: Caller
    reason: str
    ends_s: float
    num_lines: int = 0
    suppressed: Counter[str] = field(default_factory=Counter)  # refusals without a line, by action


@dataclass(frozen=True, slots=True)
class Suppressed:
    """Refusals of one caller, for one reason, that got no line of their own."""

    caller: Caller
    reason: str
    count_by_action: dict[str, int]


class RefusalLimit:
    """Counts refusals by who was refused and why."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, str], _Window] = {}

    def admit(self, caller: Caller, reason: str, action: str, *, num_lines: int = 1) -> bool:
        """Whether this refusal gets a line; at most `num_lines` of the caller and the reason do in one second."""
        key = (caller.principal.name or caller.host, reason)
        window = self._windows.get(key)
        if window is None and len(self._windows) >= MAX_WINDOWS:
            key, num_lines = ("", MANY), 0
            window = self._windows.get(key)
        if window is None:
            nobody = replace(caller, tenant="", peer="")
            window = _Window(caller if key[0] else nobody, key[1], self._clock() + WINDOW_S)
            self._windows[key] = window
        if window.num_lines < num_lines:
            window.num_lines += 1
            return True
        window.caller = caller if key[0] else window.caller
        window.suppressed[action] += 1
        return False

    def take_due(self, *, is_last: bool = False) -> list[Suppressed]:
        """What was counted in windows that are over; with `is_last`, in all windows."""
        now_s, due = self._clock(), []
        for key, window in list(self._windows.items()):
            if window.ends_s > now_s and not is_last:
                continue
            if not window.suppressed:
                del self._windows[key]
                continue
            due.append(Suppressed(window.caller, window.reason, dict(window.suppressed)))
            # The line about them is the one of the second that begins.
            window.ends_s, window.num_lines, window.suppressed = now_s + WINDOW_S, 1, Counter()
        return due

"""How long steps wait for masks that should be ready soon: bounded over time, whatever grammars come."""

from __future__ import annotations

# How long one step waits for masks of grammars that were quick so far; for others it does not wait.
PATIENCE_S = 0.01
# How much of the time steps may wait in the long run. A client can send grammars that turn out to be slow one after the
# other, each changed a little: without a bound every step would wait PATIENCE_S for the newest of them.
PATIENCE_SHARE = 0.03


class Patience:
    """What is left of it grows with the time, up to PATIENCE_S. Used from one thread."""

    def __init__(self, now_s: float) -> None:
        """`now_s`: the time, seconds from any beginning."""
        self._left_s = PATIENCE_S
        self._at_s = now_s

    def left_s(self, now_s: float) -> float:
        """How long a step may wait from this time on."""
        self._left_s = min(PATIENCE_S, self._left_s + PATIENCE_SHARE * (now_s - self._at_s))
        self._at_s = now_s
        return max(self._left_s, 0.0)

    def spend(self, waited_s: float) -> None:
        """Subtract a wait. One that was longer than what was left is paid for by later ones."""
        self._left_s -= waited_s

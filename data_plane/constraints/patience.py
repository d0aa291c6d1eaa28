"""How long steps wait for masks that should be ready soon: bounded over time, whatever grammars come."""

from __future__ import annotations

# How long one step waits for masks of grammars that were quick so far; for others it does not wait.
PATIENCE_S = 0.01
# How much of the time steps may wait in the long run. A client can send grammars whose first mask is quick and whose
# later ones are slow, each changed a little: without a bound every step would wait PATIENCE_S for the newest of them.
PATIENCE_SHARE = 0.01


class Allowance:
    """Seconds that may be spent. What is left grows with the time, up to a bound. Used from one thread at a time."""

    def __init__(self, most_s: float, share: float, now_s: float) -> None:
        """`most_s`: the bound, and what is there first. `share`: of the time. `now_s`: seconds from any beginning."""
        self._most_s = most_s
        self._share = share
        self._left_s = most_s
        self._at_s = now_s

    def left_s(self, now_s: float) -> float:
        """What may be spent from this time on."""
        self._left_s = min(self._most_s, self._left_s + self._share * (now_s - self._at_s))
        self._at_s = now_s
        return max(self._left_s, 0.0)

    def spend(self, taken_s: float) -> None:
        """Subtract what was spent. If it was more than what was left, nothing is left until that is made up for."""
        self._left_s -= taken_s

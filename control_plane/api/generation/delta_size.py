"""How many tokens of a completion a client wants in one delta, and how long a token may wait for that."""

from __future__ import annotations

from motet.v1 import types_pb2

from control_plane.checks import Violations
from control_plane.fleet.requests.streams import Collecting

MAX_DELTA_TOKENS = 128  # below the number at which a stream counts as unread
MIN_WAIT_S, MAX_WAIT_S, DEFAULT_WAIT_S = 0.001, 10.0, 1.0


def check_delta_size(output: types_pb2.OutputParams, violations: Violations) -> Collecting | None:
    """What the client set; None: every token goes out at once."""
    num_tokens = output.delta_tokens if output.HasField("delta_tokens") else None
    if num_tokens is not None and not 1 <= num_tokens <= MAX_DELTA_TOKENS:
        violations.add("output.delta_tokens", f"is {num_tokens}; give a value from 1 to {MAX_DELTA_TOKENS}")
    wait_s = None
    if output.HasField("delta_wait"):
        wait_s = output.delta_wait.seconds + output.delta_wait.nanos / 1e9
        if not (MIN_WAIT_S <= wait_s <= MAX_WAIT_S and 0 <= output.delta_wait.nanos < 10**9):
            violations.add("output.delta_wait", f"is {wait_s:g} s; give a time from 0.001 to {MAX_WAIT_S:g} s")
        elif num_tokens == 1:
            violations.add("output.delta_wait", "is set with delta_tokens 1, which never waits; leave one of them out")
    if num_tokens == 1 or (num_tokens is None and wait_s is None):
        return None
    return Collecting(num_tokens or MAX_DELTA_TOKENS, wait_s or DEFAULT_WAIT_S)

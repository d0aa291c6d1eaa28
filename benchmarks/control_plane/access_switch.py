"""What authentication and the audit log cost the control plane, measured in one process that turns them on and off.

`python -m benchmarks.control_plane.access_switch` prints one JSON object, and exits with 1 unless the 95% confidence
interval of the share of the CPU time ends below 3%. Two processes of one command differ by several percent (see
access_cost), and so do two rounds of long streams on a shared machine. So:

1. Keys and log do something at the beginning and at the end of a request, and nothing for its tokens. What they do for
   a request is measured with short requests, where it is a larger part.
2. Short rounds follow each other in one control plane: without and with, with and without, and so on. A round without
   sends no key, and the switches below let the process do what a server without keys and without a log does.
3. The share is this cost over that of a request of client_streams. The ratio of long rounds is in the report, too.

The module is also that control plane's command: `-m benchmarks.control_plane.access_switch --serve`, followed by flags
of the control plane. SIGUSR1 turns the log and the check of keys on, SIGUSR2 off. What stays on in both kinds of round:
the log's thread and its look twice a second, and the look at the file of keys every second.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.control_plane.access_cost import MAX_RATIO, Served, serving
from control_plane import server
from control_plane.access.authenticator import Authenticator
from control_plane.api.rpc.callers import Callers
from control_plane.audit import audit_log
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import Caller
from control_plane.errors import MotetError

ON, OFF = signal.SIGUSR1, signal.SIGUSR2
COMMAND = ("-m", "benchmarks.control_plane.access_switch", "--serve")


class Switch:
    """Whether keys are checked and the log is written, as the last signal said."""

    def __init__(self) -> None:
        self.is_on = True
        for signum in (ON, OFF):
            signal.signal(signum, self._turn)

    def _turn(self, signum: int, _frame: object) -> None:
        self.is_on = signum == ON


class SwitchedLog(AuditLog):
    """An audit log that writes nothing while the switch is off."""

    switch: Switch

    @property
    def is_on(self) -> bool:
        return self.switch.is_on and super().is_on

    def refused(self, method: str, caller: Caller, error: MotetError) -> None:
        if self.switch.is_on:
            super().refused(method, caller, error)

    def generation(self, caller: Caller, error: BaseException | None, **what: Any) -> None:
        if self.switch.is_on:
            super().generation(caller, error, **what)


def serve(flags: list[str]) -> int:
    """Run a control plane whose keys and log are switched by signals; the exit status."""
    switch = SwitchedLog.switch = Switch()

    def callers(authenticator: Authenticator) -> Callable[[str, Any], Caller]:
        guarded, open_to_all = Callers(authenticator), Callers()
        return lambda method, context: (guarded if switch.is_on else open_to_all)(method, context)

    with mock.patch.object(server, "Callers", callers), mock.patch.object(audit_log, "AuditLog", SwitchedLog):
        return server.main(flags)


@dataclass(frozen=True)
class Found:
    """Pairs of rounds that follow each other: CPU time of a request without and with, microseconds."""

    pairs: list[tuple[float, float]]

    @property
    def without_us(self) -> float:
        return statistics.median(without for without, _ in self.pairs)

    @property
    def added_us(self) -> tuple[float, float, float]:
        """What is added to a request: median of the pairs, and its 95% interval."""
        return median_95([guarded - without for without, guarded in self.pairs])

    @property
    def ratio(self) -> tuple[float, float, float]:
        """With over without, in the same form."""
        return median_95([guarded / without for without, guarded in self.pairs])


def median_95(numbers: list[float]) -> tuple[float, float, float]:
    """The median and its 95% confidence interval, from the ranks: a few rounds beside other work change nothing."""
    ranked = sorted(numbers)
    width = 0.98 * math.sqrt(len(ranked))  # half of 1.96 standard deviations of a binomial distribution with p = 1/2
    low, high = math.floor(len(ranked) / 2 - width), math.ceil(len(ranked) / 2 + width)
    return statistics.median(ranked), ranked[max(low, 0)], ranked[min(high, len(ranked) - 1)]


def measure(served: Served, streams: int, tokens: int, *, pairs: int, time_s: float) -> Found:
    """Pairs of rounds of so many streams, for at most so many seconds. The first pair warms up."""
    load, found, began_s = argparse.Namespace(streams=streams, tokens=tokens), Found([]), time.monotonic()
    for number in range(pairs + 1):
        if len(found.pairs) > 1 and time.monotonic() - began_s > time_s:
            break
        us = {}
        for is_on in (False, True) if number % 2 else (True, False):
            served.system.control_plane.send(ON if is_on else OFF)
            seed = 1_000_000 * tokens + 2 * number + is_on
            us[is_on] = served.run(load, seed, metadata=served.metadata if is_on else ())["cpu_us_per_request"]
        if number:
            found.pairs.append((us[False], us[True]))
    return found


def generations_by_principal(path: Path) -> Mapping[str, int]:
    """How many records of generations the log has, by who made them."""
    found: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["type"].endswith(".generation"):
            principal = record["data"]["actor"]["principal"]
            found[principal] = found.get(principal, 0) + 1
    return found


def main() -> int:
    """Measure as the flags say and print JSON; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams, a count (default 256)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each long stream (default 128)")
    parser.add_argument("--adapters", type=int, default=16, help="adapters beside the base model (default 16)")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of short rounds at most (default 200)")
    parser.add_argument("--time-s", type=float, default=60.0, help="for the short rounds at most (default 60)")
    parser.add_argument("--long-time-s", type=float, default=30.0, help="for the long rounds at most (default 30)")
    args = parser.parse_args()
    args.of = "access"
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        with serving(Path(name) / "plane", args, is_guarded=True, command=COMMAND) as served:
            short = measure(served, args.streams, 1, pairs=args.pairs, time_s=args.time_s)
            long = measure(served, args.streams, args.tokens, pairs=args.pairs, time_s=args.long_time_s)
        counts = generations_by_principal(Path(name) / "plane" / "audit.jsonl")
    # The switch did what it should: each stream with a key has its record, and no other one has.
    num_rounds = len(short.pairs) + len(long.pairs) + 2
    assert list(counts.values()) == [num_rounds * args.streams], f"records of generations: {counts}"
    share = [round(one / long.without_us, 5) for one in short.added_us]
    report = {
        "streams": args.streams,
        "tokens": args.tokens,
        "short_pairs": len(short.pairs),
        "short_request_us": round(short.without_us, 1),
        "added_us_and_95": [round(one, 1) for one in short.added_us],
        "long_pairs": len(long.pairs),
        "long_request_us": round(long.without_us, 1),
        "share_and_95": share,
        "long_ratio_and_95": [round(one, 4) for one in long.ratio],
    }
    print(json.dumps(report, indent=1))
    return int(share[-1] > MAX_RATIO - 1)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main())

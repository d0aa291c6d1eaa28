"""`python -m tests.hostile.faults --rounds 1000 --seed 0`: rounds of faults on three systems, a table, and a verdict.

The systems are one with hash workers and the embedded Redis, one with a Redis of its own that is emptied and
corrupted, and one with real workers. Status 1 if anything misses its target.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tests.hostile.faults.kinds import FAULTS
from tests.hostile.faults.report import table, verdict
from tests.hostile.faults.rigs import SHARES, Rigs
from tests.hostile.faults.rounds import RoundResult


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.hostile.faults", description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=20, help="a count (default 20)")
    add("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    add("--first", type=int, default=0, help="number of the first round, to repeat one (default 0)")
    add("--system", choices=sorted(SHARES), help="all rounds on this one (default: by shares)")
    add("--fault", action="append", default=[], help="only this one; repeatable: several at once in every round")
    add("--no-slow", action="store_true", help="leave out faults that take longer than 5 seconds")
    add("--out", type=Path, help="a file that gets one JSON object a round")
    args = parser.parse_args()
    unknown = set(args.fault) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"--fault: {sorted(unknown)}; one of {sorted(fault.name for fault in FAULTS)}")
    results: list[RoundResult] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the systems are ended in order
    with ExitStack() as stack:
        rigs = Rigs(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-faults-"))), stack)
        faults = [fault for fault in FAULTS if fault.name in args.fault]
        try:
            for number in range(args.first, args.first + args.rounds):
                name, result = rigs.round(number, args.seed, name=args.system, faults=faults, slow=not args.no_slow)
                results.append(result)
                _show(name, result)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as out:
                        out.write(json.dumps({"system": name, "time": time.time(), **asdict(result)}) + "\n")
        except KeyboardInterrupt:
            print("stopped")
    print(table(results))
    missed = verdict(results)
    print("\n".join(missed) or "every target is met")
    return 1 if missed else 0


def _show(system: str, result: RoundResult) -> None:
    counts = f"right {result.num_right}, wrong {len(result.wrong)}, errors {len(result.errors)}"
    counts += f" (avoidable {len(result.avoidable)}), hung {len(result.hung)}"
    wait = f"longest wait {max(result.waits_s, default=0.0):.2f} s"
    print(f"{result.number:>4} {system}: {result.kind}: {counts}, {wait}, in {result.duration_s:.1f} s", flush=True)
    for text in [*result.wrong, *result.avoidable, *result.problems, *result.hung]:
        print(f"       {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

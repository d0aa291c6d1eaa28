"""`python -m tests.hostile.kills --rounds 1000`: kills a registry at random moments. Status 1 if anything is lost."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.hostile.kills.rounds import run_rounds


def main() -> int:
    """Run the rounds and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="motet-kills-") as directory:
        report = run_rounds(Path(directory), options.rounds, random.Random(options.seed))
    print(f"{report} in {time.monotonic() - begin_s:.0f} s", flush=True)
    for failure in report.failures:
        print(failure)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Sends the corpus, and as many mutated messages as requested, to a server of its own.

Prints what is wrong, one problem a line; status 1 if anything is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.hostile.bad_inputs.corpus import Target


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.hostile.bad_inputs", description=__doc__)
    parser.add_argument("--mutations", type=int, default=3000, help="mutated messages, a count (default 3000)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default 0)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bad-inputs-") as work_dir, Target(Path(work_dir)) as target:
        found = [problem for one in target.everything(args.seed, args.mutations) for problem in one]
        found += target.rest_problems()
    print("\n".join(found) or "nothing is wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

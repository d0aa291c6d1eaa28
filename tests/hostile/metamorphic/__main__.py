"""`python -m tests.hostile.metamorphic --minutes 10 --seed 0`: every relation again and again.

Status 1 if one is broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.hostile.metamorphic.judge import Judge
from tests.hostile.metamorphic.relations import RELATIONS
from tests.hostile.metamorphic.run import Counts, run_relation
from tests.hostile.metamorphic.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.hostile.metamorphic", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of all requests (default 0)")
    parser.add_argument("--relation", choices=sorted(RELATIONS), help="only this one")
    args = parser.parse_args()
    counts, num_turns = Counts(), 0
    with ExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-metamorphic-")))
        world = stack.enter_context(World(work_dir, seed=args.seed))
        judge = Judge(world.model_dir, world.adapter_dirs)
        end_s = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end_s or num_turns == 0:
            for name in [args.relation] if args.relation else RELATIONS:
                run_relation(world, judge, name, RELATIONS[name], counts)
            num_turns += 1
    for name in RELATIONS:
        print(f"{name:60} {counts.equal[name]:6} equal {counts.close[name]:4} close")
    print(f"{counts.num_compared} comparisons of {num_turns} turns")
    print("\n".join(counts.wrong) or "every relation holds")
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

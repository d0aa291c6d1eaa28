"""`python -m tests.hostile.churn --seconds 3600`: 64 adapters of mixed kinds over arenas for four, changed at random.

A line a minute, and a verdict. Status 1 if a token or a version was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.adapter_kinds import kinds_of
from tests.hostile.churn.world import World

ARCHS = ("mixtral", "llama")


def main() -> int:
    """Run and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument(
        "--arch",
        choices=ARCHS,
        help="the base model: mixtral has all kinds, llama those without experts; the default is by the seed",
    )
    options = parser.parse_args()
    arch = options.arch or ARCHS[options.seed % len(ARCHS)]
    print(f"seed {options.seed}: making {options.adapters} adapters of {len(kinds_of(arch))} kinds, {arch}", flush=True)
    with tempfile.TemporaryDirectory(prefix="motet-churn-") as directory:
        world = World(Path(directory), seed=options.seed, num_adapters=options.adapters, arch=arch)
        with world:
            begin_s = time.monotonic()
            while (past_s := time.monotonic() - begin_s) < options.seconds:
                world.run(min(60.0, options.seconds - past_s))
                counts = world.ledger.counts
                print(
                    f"{time.monotonic() - begin_s:6.0f} s  {counts['streams']} streams, "
                    f"{len(world.ledger.problems)} problems",
                    flush=True,
                )
            world.check_rest()
    for what, count in sorted(world.ledger.counts.items()):
        print(f"{count:8}  {what}")
    for problem in world.ledger.problems:
        print(problem)
    print(f"{len(world.ledger.problems)} problems")
    return 1 if world.ledger.problems else 0


if __name__ == "__main__":
    sys.exit(main())

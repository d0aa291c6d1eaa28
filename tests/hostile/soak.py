"""`make soak MINUTES=60`: faults, bad inputs, relations and steady traffic in turns, a line a minute, and a verdict.

Every minute has its share of each: rounds of faults on three systems (see `faults`), bad inputs to a fourth one,
relations on a fifth, and traffic with cancels and connections on a sixth. The last three are never killed: their memory
and descriptors must stay the same. Status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.hostile import flatness
from tests.hostile.bad_inputs.corpus import Target
from tests.hostile.faults import report
from tests.hostile.faults.kinds import FAULTS
from tests.hostile.faults.rig import ProcessUse, Rig, use_of
from tests.hostile.faults.rigs import Rigs
from tests.hostile.faults.rounds import RoundResult, run_round
from tests.hostile.flatness import Sample
from tests.hostile.metamorphic.judge import Judge
from tests.hostile.metamorphic.relations import RELATIONS
from tests.hostile.metamorphic.run import Counts, run_relation
from tests.hostile.metamorphic.world import World

# Seconds of a minute for each; faults get the rest.
BAD_INPUTS_S, RELATIONS_S, TRAFFIC_S = 8.0, 10.0, 12.0
TRAFFIC = [fault for fault in FAULTS if fault.name in ("many cancels", "many connects", "adapter turned")]


class Soak:
    """Everything that runs, and what it found."""

    def __init__(self, work_dir: Path, stack: ExitStack, seed: int) -> None:
        self._seed = seed
        self._rigs = Rigs(work_dir, stack)
        self._target = stack.enter_context(Target(work_dir / "bad-inputs"))
        self._world = stack.enter_context(World(work_dir / "relations", seed=seed))
        self._judge = Judge(self._world.model_dir, self._world.adapter_dirs)
        self._traffic_rig = stack.enter_context(Rig(work_dir / "traffic"))
        self._checks = self._endless_checks()
        self._relations = itertools.cycle(RELATIONS.items())
        self._num_rounds = 0
        self.num_cases = 0
        self.case_problems: list[str] = []
        self.counts = Counts()
        self.fault_results: list[RoundResult] = []
        self.traffic_results: list[RoundResult] = []
        self.samples: list[Sample] = []

    def minute(self, number: int, end_s: float, clock: Callable[[], float]) -> None:
        """One minute of everything, a little longer where a part takes its time."""
        for part, seconds in (
            (self._bad_input, BAD_INPUTS_S),
            (self._relation, RELATIONS_S),
            (self._traffic, TRAFFIC_S),
        ):
            part_end_s = min(clock() + seconds, end_s)
            while clock() < part_end_s:
                part()
        while clock() < end_s:
            self._fault_round()
        now_s = clock()
        self.samples += [Sample(now_s, use) for use in self.use()]

    def _bad_input(self) -> None:
        self.case_problems += next(self._checks)
        self.num_cases += 1

    def _endless_checks(self) -> Iterator[list[str]]:
        for turn in itertools.count():
            yield from self._target.everything(seed=self._seed + turn, num_mutations=1000)

    def _relation(self) -> None:
        name, relation = next(self._relations)
        run_relation(self._world, self._judge, name, relation, self.counts)

    def _traffic(self) -> None:
        self._num_rounds += 1
        self.traffic_results.append(
            run_round(self._traffic_rig, self._num_rounds, f"{self._seed}/traffic-{self._num_rounds}", TRAFFIC)
        )

    def _fault_round(self) -> None:
        self._num_rounds += 1
        self.fault_results.append(self._rigs.round(self._num_rounds, self._seed)[1])

    def use(self) -> list[ProcessUse]:
        """Of every process. Those of rigs are started again and again, and so not judged."""
        systems = {"bad inputs": self._target.system, "relations": self._world.system}
        systems["traffic"] = self._traffic_rig.system
        systems |= {f"faults, {name}": rig.system for name, rig in self._rigs.started.items()}
        return [use for name, system in systems.items() for use in use_of(system, prefix=f"{name}: ")]

    def verdict(self) -> list[str]:
        """What misses its target."""
        found = [f"bad input: {problem}" for problem in [*self.case_problems, *self._target.rest_problems()]]
        found += [f"relation: {wrong}" for wrong in self.counts.wrong]
        found += report.verdict(self.fault_results) + report.verdict(self.traffic_results)
        return found + [f"not flat: {problem}" for problem in flatness.problems(self.samples)]

    def line(self, number: int) -> str:
        """What the last minute came to."""
        results = [*self.fault_results, *self.traffic_results]
        right = sum(result.num_right for result in results)
        bad = sum(not result.is_clean for result in results)
        uses = "\n".join(
            f"    {use.role:32} {use.resident_bytes / 2**20:7.1f} MiB {use.num_descriptors:5} descriptors"
            for use in self.use()
        )
        return (
            f"minute {number}: {len(self.fault_results)} rounds of faults, {right} streams right, {bad} rounds with "
            f"problems, {self.num_cases} bad inputs ({len(self.case_problems)} problems), {self.counts.num_compared} "
            f"comparisons ({len(self.counts.wrong)} wrong)\n{uses}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.hostile.soak", description=__doc__)
    parser.add_argument("--minutes", type=int, default=60, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the systems are ended in order
    with ExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-soak-")))
        soak = Soak(work_dir, stack, args.seed)
        begin_s = time.monotonic()
        try:
            for number in range(1, args.minutes + 1):
                soak.minute(number, begin_s + 60.0 * number, time.monotonic)
                print(soak.line(number), flush=True)
        except KeyboardInterrupt:
            print("stopped")
        missed = soak.verdict()
    print(report.table(soak.fault_results))
    print(report.table(soak.traffic_results))
    print("\n".join(missed) or "every target is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

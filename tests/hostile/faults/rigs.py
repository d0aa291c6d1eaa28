"""The three systems that rounds of faults run on, started when the first round needs them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.hostile.faults.kinds import Fault
from tests.hostile.faults.rig import Rig
from tests.hostile.faults.rounds import RoundResult, draw_faults, run_round

# Share of the rounds: hash workers and the embedded Redis; hash workers and a Redis of the rig's own, which can be
# emptied and corrupted; real workers, whose restarts take long.
SHARES = {"hash": 0.6, "own redis": 0.3, "real": 0.1}


class Rigs:
    """Rigs by name. They end with the stack."""

    def __init__(self, work_dir: Path, stack: ExitStack) -> None:
        self._work_dir = work_dir
        self._stack = stack
        self.started: dict[str, Rig] = {}

    def get(self, name: str) -> Rig:
        """The rig of this name, started if it was not."""
        if name not in self.started:
            rig = Rig(
                self._work_dir / name.replace(" ", "-"), is_real=name == "real", has_own_redis=name == "own redis"
            )
            self.started[name] = self._stack.enter_context(rig)
        return self.started[name]

    def round(
        self, number: int, seed: int, *, name: str | None = None, faults: Sequence[Fault] = (), slow: bool = True
    ) -> tuple[str, RoundResult]:
        """One round, and the rig that had it. What is not given is drawn by seed and number alone."""
        draw = random.Random(f"{seed}/{number}")
        drawn = draw.choices(list(SHARES), list(SHARES.values()))[0]
        rig = self.get(name or drawn)
        chosen = draw_faults(rig, draw, slow=slow)
        return name or drawn, run_round(rig, number, f"{seed}/{number}", faults or chosen)

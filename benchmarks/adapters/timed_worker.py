"""A worker that writes down each step and each load: `python -m benchmarks.adapters.timed_worker JOURNAL FLAGS...`.

The engine is a worker's own. `read_journal` has what was written so far.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.process_log import configure_logging
from data_plane.config import add_arguments, from_args
from data_plane.plan import AdapterSlots, AdapterSource, DoneStep, Engine, PendingStep, StepOutput, StepPlan
from data_plane.worker import run_worker

_ENTRY = struct.Struct("=cqqqq")  # kind, begin and end in nanoseconds, rows, tokens of prompts
_STEP, _LOAD = b"s", b"l"


@dataclass(frozen=True)
class Entry:
    """One step that computed something, or one load of an adapter. Times are those of time.monotonic()."""

    is_load: bool
    begin_s: float
    end_s: float
    num_rows: int  # that got a token; 0 for a load
    num_prompt_tokens: int  # that the step computed; 0 for a load

    @property
    def time_ms(self) -> float:
        """How long it took."""
        return 1e3 * (self.end_s - self.begin_s)


def command(journal: Path) -> tuple[str, ...]:
    """What follows the interpreter."""
    return ("-m", "benchmarks.adapters.timed_worker", str(journal))


def read_journal(journal: Path) -> list[Entry]:
    """The whole entries, in the order in which they ended."""
    raw = journal.read_bytes()
    entries = _ENTRY.iter_unpack(raw[: len(raw) - len(raw) % _ENTRY.size])
    return [Entry(kind == _LOAD, begin / 1e9, end / 1e9, *counts) for kind, begin, end, *counts in entries]


class Journal:
    """A file that loader threads and the compute thread append to, each entry by one write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, kind: bytes, begin_ns: int, num_rows: int = 0, num_prompt_tokens: int = 0) -> None:
        """Something that ends at this moment."""
        os.write(self._file, _ENTRY.pack(kind, begin_ns, time.monotonic_ns(), num_rows, num_prompt_tokens))


class TimedSlots:
    """Slots whose loads are written down."""

    def __init__(self, slots: AdapterSlots, journal: Journal) -> None:
        self._slots = slots
        self._journal = journal
        self.evict = slots.evict
        self.used_bytes = slots.used_bytes
        self.clear = slots.clear

    def load(self, slot: int, generation: int, digest: str, source: AdapterSource) -> None:
        """See AdapterSlots."""
        begin_ns = time.monotonic_ns()
        self._slots.load(slot, generation, digest, source)
        self._journal.add(_LOAD, begin_ns)


class TimedEngine:
    """An engine whose steps and loads are written down."""

    def __init__(self, engine: Engine, journal: Journal) -> None:
        self._engine = engine
        self._journal = journal
        self.capacities = engine.capacities
        self.slots: AdapterSlots = TimedSlots(engine.slots, journal)
        self.reset = engine.reset
        self.read_vocabulary = engine.read_vocabulary

    def submit(self, plan: StepPlan) -> PendingStep:
        """See Engine. The step has ended when this returns, so that its time is that of one step."""
        return DoneStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepOutput:
        """See Engine."""
        begin_ns = time.monotonic_ns()
        output = self._engine.execute(plan)
        if len(plan.prefills) or len(output.rows):
            self._journal.add(_STEP, begin_ns, len(output.rows), sum(int(count) for _, count in plan.prefills))
        return output


def main(argv: Sequence[str] | None = None) -> int:
    """Run until it is stopped; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journal", type=Path)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    config = from_args(arguments)
    configure_logging(config.log_level, process="worker")
    from data_plane.engine.build import build_engine  # torch is imported here

    return run_worker(TimedEngine(build_engine(config), Journal(arguments.journal)), config)


if __name__ == "__main__":
    sys.exit(main())

"""What all measurements of this package share: a system with one timed worker, its adapters, and figures."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from motet import Client

from benchmarks.adapters.timed_worker import Entry, command, read_journal
from benchmarks.serving.checkpoints import SHAPES, make_base
from benchmarks.serving.report import machine
from benchmarks.system import System

PROMPT_TOKENS = 32


class Rig:
    """A control plane, and a worker that writes down its steps and loads. A context manager."""

    def __init__(self, shape: str, cache: Path, work_dir: Path, *, control_flags: Sequence[str] = ()) -> None:
        self.vocab_size = SHAPES[shape].vocab_size
        self.model_dir = make_base(shape, cache)
        self.system = System(
            self.model_dir, work_dir, control_flags=["--max-streams-per-connection", "4096", *control_flags]
        )
        self.client: Client
        self._journal = work_dir / "journal"
        self._random = random.Random(0)

    def __enter__(self) -> Self:
        self.system.__enter__()
        self.client = Client(self.system.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        self.system.stop()

    def start_worker(self, *, num_slots: int, arena_bytes: str = "1GiB") -> None:
        """Start the worker, in place of the one before."""
        flags = ["--num-slots", str(num_slots), "--arena-bytes", arena_bytes]
        flags += ["--num-blocks", "512", "--max-model-len", "512", "--max-rows", "32"]
        self.system.start_worker(flags=flags, command=command(self._journal))

    def prompt(self) -> list[int]:
        """One that no other request had: nothing of it comes from the prefix cache."""
        return [self._random.randrange(8, self.vocab_size) for _ in range(PROMPT_TOKENS)]

    def entries(self, begin_s: float, end_s: float = math.inf) -> list[Entry]:
        """Steps and loads that began within this time, by time.monotonic()."""
        return [entry for entry in read_journal(self._journal) if begin_s <= entry.begin_s < end_s]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all values do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)] if ordered else math.nan


def title(what: str) -> str:
    """Of a table: what it shows, and on which machine."""
    here = machine()
    return f"{what}\n{here['cpu']}, {here['cores']} cores, load {here['load_average']:.1f}"

"""Rows of one engine that decode, some of them under constraints: what a step takes, and which rows sat it out.

A row whose text is complete or whose constraint failed is begun again, and so is each after `LIFE` tokens, as requests
come and go. Its grammar is the same again, or one that the worker has not seen, as a client would send it that changes
each a little: what was learnt of one that was slow does not help then. To begin rows takes time of a step by itself, so
rows without constraints can begin again where others did.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowConstraint, RowSampling, StepPlan

LIFE = 32  # tokens of a completion
NUM_CONTEXT = 128  # tokens before it
PLAIN = RowSampling(temperature=1.0, top_k=0, top_p=1.0, seed=0)
END = 0  # token
_NUMBERS = itertools.count()
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, slots=True)
class Step:
    """One step."""

    time_s: float
    coreless_s: float  # how long the compute thread was ready to run and had no core; 0 where that is not known
    num_waiting: int  # rows that sat it out
    num_failed: int  # rows whose constraint failed
    ended: frozenset[int]  # rows that begin again in the next one


class DecodingRows:
    """Rows 0 to len(constraints) - 1 of an engine that has no others."""

    def __init__(self, engine: TorchEngine, constraints: Sequence[RowConstraint | None], *, is_new: bool) -> None:
        """`constraints`: of each row; None: any text. `is_new`: each begins as one that the worker has not seen.

        Call `end` before others are made.
        """
        self._engine = engine
        self._constraints = constraints
        self._is_new = is_new
        self._rng = np.random.default_rng(0)
        self._ages = np.arange(len(constraints)) * 7 % LIFE  # rows end one after the other
        self._to_begin = list(range(len(constraints)))
        self._to_free: list[int] = []
        self._step_id = 0

    def step(self, ending: Collection[int] | None = None) -> Step:
        """Every row decodes one token, or computes the last one of its prompt.

        `ending`: rows that begin again in the next step; None: those that are complete, failed, or old.
        """
        self._step_id += 1
        new_rows = [self._new_row(row) for row in self._to_begin]
        plan = StepPlan(
            self._step_id,
            freed_rows=np.array(self._to_free, dtype=np.int32),
            new_rows=new_rows,
            prefills=np.array([(row.row, 1) for row in new_rows], dtype=np.int32).reshape(-1, 2),
        )
        coreless_s, start_s = _coreless_s(), time.perf_counter()
        output = self._engine.execute(plan)
        time_s = time.perf_counter() - start_s
        coreless_s = _coreless_s() - coreless_s
        assert len(output.failed_rows) == len(output.unconstrained_rows), "rows whose logits are not finite"
        self._ages += 1
        if ending is None:
            ended = set(output.failed_rows.tolist()) | set(np.flatnonzero(self._ages >= LIFE).tolist())
            ended |= set(output.rows[output.token_ids == END].tolist())
        else:
            ended = set(ending)
        self._to_begin = self._to_free = sorted(ended)
        self._ages[self._to_begin] = 0
        return Step(time_s, coreless_s, len(output.waiting_rows), len(output.failed_rows), frozenset(ended))

    def end(self) -> None:
        """Free all rows."""
        self._step_id += 1
        self._engine.execute(StepPlan(self._step_id, freed_rows=np.arange(len(self._constraints), dtype=np.int32)))

    def _new_row(self, row: int) -> NewRow:
        capacities, constraint = self._engine.capacities, self._constraints[row]
        if constraint is not None and self._is_new:
            constraint = replace(constraint, digest=f"{constraint.digest} {next(_NUMBERS)}")
        size = -(-(NUM_CONTEXT + LIFE + 2) // capacities.block_size)
        return NewRow(
            row=row,
            token_ids=self._rng.integers(8, capacities.vocab_size, NUM_CONTEXT + 1).astype(np.int32),
            num_prompt_tokens=NUM_CONTEXT + 1,
            num_computed_tokens=NUM_CONTEXT,  # what lies in the cache does not change what a step costs
            block_ids=np.arange(row * size, (row + 1) * size, dtype=np.int32),
            slot=None,
            slot_generation=0,
            sampling=replace(PLAIN, seed=int(self._rng.integers(1 << 31))),
            constraint=constraint,
        )


def _coreless_s() -> float:
    """Since this thread began (proc(5), schedstat)."""
    return int(_SCHEDSTAT.read_text("ascii").split()[1]) / 1e9 if _SCHEDSTAT.exists() else 0.0

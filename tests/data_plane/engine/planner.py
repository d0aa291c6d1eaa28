"""A small planner for engine tests: chunked prefill, mixed steps, prefix reuse, preemption, row and block reuse."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from data_plane.engine.engine import TorchEngine
from data_plane.plan import GREEDY as GREEDY, Int32Array, NewRow, RowAdapters, RowSampling, StepOutput, StepPlan


@dataclass
class Job:
    """One request of a test."""

    prompt: list[int]
    num_tokens: int
    slot: int | None = None
    generation: int = 0
    sampling: RowSampling = GREEDY
    adapters: RowAdapters | None = None
    active_from: int = 0
    tokens: list[int] = field(default_factory=list)
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def known(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.num_tokens


def array(values: object, width: int = 0) -> Int32Array:
    """An int32 array as plans carry it."""
    return np.asarray(values, dtype=np.int32).reshape((-1, width) if width else -1)


def make_plan(
    step_id: int = 1,
    *,
    freed: list[int] | None = None,
    new: list[NewRow] | None = None,
    appended: list[tuple[int, int]] | None = None,
    paused: list[int] | None = None,
    resumed: list[int] | None = None,
    prefills: list[tuple[int, int]] | None = None,
    copies: list[tuple[int, int]] | None = None,
    fed: list[tuple[int, int]] | None = None,
    swap_outs: list[tuple[int, int]] | None = None,
    swap_ins: list[tuple[int, int]] | None = None,
) -> StepPlan:
    return StepPlan(
        step_id,
        array(freed or []),
        new or [],
        array(appended or [], 2),
        array(paused or []),
        array(resumed or []),
        array(prefills or [], 2),
        array(copies or [], 2),
        array(fed or [], 2),
        array(swap_outs or [], 2),
        array(swap_ins or [], 2),
    )


class Planner:
    """Drives one engine. `chunk` tokens of each prefill per step, at most `max_running` jobs at once."""

    def __init__(self, engine: TorchEngine, *, chunk: int, max_running: int = 64) -> None:
        self.engine = engine
        self.chunk = chunk
        self.max_running = max_running
        self.free_rows = list(range(engine.capacities.max_rows))
        self.free_blocks = list(range(engine.capacities.num_blocks))
        self.running: list[Job] = []
        self.freed: list[int] = []
        self.step_id = 0

    def run(self, jobs: list[Job], *, preempt_at: int = -1, keep_blocks: bool = False) -> None:
        """Run all jobs to their end. At step `preempt_at` every second running job is preempted and waits again."""
        waiting = list(jobs)
        steps = 0
        while waiting or self.running:
            if steps == preempt_at:
                for job in self.running[::2]:
                    self._release(job)
                    waiting.append(job)
            new = []
            while waiting and len(self.running) < self.max_running:
                job = waiting.pop(0)
                new.append(self.admit(job))
            self.step(new)
            for job in [job for job in self.running if job.is_done]:
                self._release(job, keep_blocks=keep_blocks)
            steps += 1
        self.step([])

    def admit(self, job: Job) -> NewRow:
        """A row for the job. Blocks it holds already (a prefix) stay, the first `num_computed` tokens are in them."""
        job.row = self.free_rows.pop()
        size = self.engine.capacities.block_size
        while len(job.blocks) * size < len(job.known):
            job.blocks.append(self.free_blocks.pop())
        self.running.append(job)
        return NewRow(
            row=job.row,
            token_ids=array(job.known),
            num_prompt_tokens=len(job.prompt),
            num_computed_tokens=job.num_computed,
            block_ids=array(job.blocks),
            slot=job.slot,
            slot_generation=job.generation,
            sampling=job.sampling,
            adapters=job.adapters,
            active_from=job.active_from,
        )

    def step(self, new: list[NewRow]) -> StepOutput:
        """Plan and execute one step with everything that runs."""
        self.step_id += 1
        appended: list[tuple[int, int]] = []
        prefills: list[tuple[int, int]] = []
        for job in self.running:
            left = len(job.known) - job.num_computed
            is_decoding = job.num_computed >= len(job.prompt) and left == 1 and job.row not in {r.row for r in new}
            count = 1 if is_decoding else min(left, self.chunk)
            if not is_decoding:
                prefills.append((job.row, count))
            while len(job.blocks) * self.engine.capacities.block_size < job.num_computed + count:
                job.blocks.append(self.free_blocks.pop())
                appended.append((job.row, job.blocks[-1]))
            job.num_computed += count
        freed, self.freed = self.freed, []
        output = self.engine.execute(
            make_plan(self.step_id, freed=freed, new=new, appended=appended, prefills=prefills)
        )
        sampled = dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
        for job in self.running:
            if job.num_computed == len(job.known):
                job.tokens.append(sampled.pop(job.row))
        assert not sampled and len(output.failed_rows) == 0
        return output

    def _release(self, job: Job, *, keep_blocks: bool = False) -> None:
        self.running.remove(job)
        self.freed.append(job.row)
        self.free_rows.append(job.row)
        job.row = -1
        if not keep_blocks:
            self.free_blocks[:0] = job.blocks
            job.blocks = []
            job.num_computed = 0

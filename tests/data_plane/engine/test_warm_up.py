"""A warm-up runs every kind of step, whatever the engine holds, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.engine.warm_up import ADAPTERS, LONG_CHUNK, SHORT_CHUNK, warm_up
from data_plane.plan import StepOutput, StepPlan
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config

JOBS = ([5, 9, 200, 31, 77, 12, 8], [8, 12, 77] * 9)


class Watched(TorchEngine):
    """Keeps its plans and its outputs."""

    seen: list[tuple[StepPlan, StepOutput]]

    def execute(self, plan: StepPlan) -> StepOutput:
        output = super().execute(plan)
        self.seen.append((plan, output))
        return output


def watched(checkpoint: Path, **settings: object) -> Watched:
    """An engine that has not served yet."""
    engine = build_engine(worker_config(checkpoint, **settings))
    engine.__class__ = Watched
    assert isinstance(engine, Watched)
    engine.seen = []
    return engine


def completions(engine: TorchEngine) -> list[list[int]]:
    jobs = [Job(prompt, 6) for prompt in JOBS]
    Planner(engine, chunk=5).run(jobs)
    return [job.tokens for job in jobs]


def test_every_kind_of_step_is_run(checkpoint: Path) -> None:
    engine = watched(checkpoint, max_model_len=None)
    warm_up(engine)
    new = [(plan.prefills[:, 1].max(), row) for plan, _ in engine.seen for row in plan.new_rows]
    with_adapter = {(row.slot_generation, tokens >= LONG_CHUNK - 1) for tokens, row in new if row.slot is not None}
    generations = range(1, len(ADAPTERS) + 1)
    assert with_adapter == {(generation, is_long) for generation in generations for is_long in (True, False)}
    assert {int(tokens) for tokens, row in new if row.slot is None} >= {LONG_CHUNK - 1, SHORT_CHUNK}
    assert max(row.num_computed_tokens for _, row in new) >= 500, "a context over many blocks"
    decodes = [len(output.rows) for plan, output in engine.seen if not plan.new_rows and not len(plan.freed_rows)]
    assert set(decodes) == {1, 3, 16, engine.capacities.max_rows}
    largest, _ = engine.seen[0]
    assert len(largest.new_rows) == engine.capacities.max_rows
    assert largest.prefills[:, 1].sum() == engine.capacities.max_step_tokens
    samplings = {(row.sampling.temperature > 0, row.sampling.top_k > 0) for _, row in new}
    assert samplings == {(False, False), (True, False), (True, True)}
    assert any(output.sampled_logprobs for _, output in engine.seen)
    assert any(len(plan.block_copies) for plan, _ in engine.seen)


def test_every_captured_size_runs_before_it_is_captured(checkpoint: Path) -> None:
    engine = watched(checkpoint)
    warm_up(engine, [1, 2, 8, 24])
    decodes = {len(output.rows) for plan, output in engine.seen if not plan.new_rows and not len(plan.freed_rows)}
    assert decodes >= {1, 2, 8, 24}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_rows": 1, "num_slots": 1, "max_model_len": 2},
        {"num_blocks": 1, "max_model_len": None, "token_budget": 1},
        {"num_blocks": 3, "block_size": 1, "max_model_len": 3, "arena_bytes": 0},
        {"num_blocks": 5, "max_model_len": None, "token_budget": 30, "arena_bytes": 40 << 10},
    ],
)
def test_it_keeps_to_what_a_small_engine_holds(checkpoint: Path, settings: dict[str, int | None]) -> None:
    engine = watched(checkpoint, **settings)
    assert warm_up(engine) == len(engine.seen) > 0
    assert not any(len(output.failed_rows) for _, output in engine.seen)
    assert any(len(output.rows) for plan, output in engine.seen if not plan.new_rows), "nothing decoded"
    assert any(row.slot == 0 for plan, _ in engine.seen for row in plan.new_rows) == (settings.get("arena_bytes") != 0)


def test_an_engine_that_warmed_up_when_it_was_built_is_empty_and_generates_as_one_that_did_not(
    checkpoint: Path,
) -> None:
    warmed = build_engine(worker_config(checkpoint, warm_up="on"))
    assert warmed.slots.used_bytes() == 0
    warmed.arena.check_invariants()
    assert completions(warmed) == completions(build_engine(worker_config(checkpoint)))

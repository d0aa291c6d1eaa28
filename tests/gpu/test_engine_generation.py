"""Generations by the engine on the GPU against transformers and PEFT on the CPU. Needs no server packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_plane.engine.build import build_engine
from data_plane.plan import RowSampling, StepPlan
from tests.data_plane.engine.planner import GREEDY, Planner, array, make_plan
from tests.data_plane.engine.test_engine import PROMPT, new_row
from tests.data_plane.engine.test_oracle import serve, worker_config
from tests.makers import ARCHS, make_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("arch", ARCHS)
def test_mixed_batch_gives_the_tokens_of_transformers_and_peft_alone(arch: str, tmp_path: Path) -> None:
    # One architecture as it is served, behind a warm-up; the others compile only what they run.
    served = serve(arch, tmp_path, device="cuda", warm_up="auto" if arch == "llama" else "off")
    for chunk, preempt_at in [(7, -1), (64, 4)]:
        jobs = served.jobs()
        Planner(served.engine, chunk=chunk, max_running=9).run([job for job, _ in jobs], preempt_at=preempt_at)
        served.check(jobs)


def test_a_steady_step_waits_for_nothing(tmp_path: Path) -> None:
    """CUDA itself raises where a step would wait. Its results come after it."""
    engine = build_engine(worker_config(make_checkpoint(tmp_path / "llama", "llama"), device="cuda"))
    rows = [new_row(row, block_ids=array([2 * row, 2 * row + 1])) for row in range(4)]
    engine.execute(make_plan(1, new=rows, prefills=[(row, len(PROMPT)) for row in range(4)]))
    engine.execute(make_plan(2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [engine.submit(make_plan(step)) for step in (3, 4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [step.wait().rows.tolist() for step in pending] == [[0, 1, 2, 3]] * 2


def test_adapters_come_and_go_beside_steps_that_wait_for_nothing(tmp_path: Path) -> None:
    """Entering an adapter that was loaded, and evicting one, wait for no step that is queued."""
    engine = build_engine(worker_config(make_checkpoint(tmp_path / "llama", "llama"), device="cuda"))
    for slot in range(2):
        engine.arena.load_zeros(slot, 1, 8, is_trained=True)
    rows = [new_row(row, block_ids=array([2 * row, 2 * row + 1]), slot=0, slot_generation=1) for row in range(4)]
    engine.execute(make_plan(1, new=rows, prefills=[(row, len(PROMPT)) for row in range(4)]))
    engine.execute(make_plan(2))
    for step in (3, 5):
        engine.arena.load_zeros(2, step, 8, is_trained=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = [engine.submit(make_plan(step))]
            engine.arena.evict(2, step)
            pending.append(engine.submit(make_plan(step + 1)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [each.wait().rows.tolist() for each in pending] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("graphs", ["off", "1,4,16,32"])
def test_drafts_change_no_token(tmp_path: Path, graphs: str) -> None:
    """In float32. Rows with and without adapters; the second one has penalties, so that its positions are sampled one
    after the other."""
    checkpoint = make_checkpoint(tmp_path / "llama", "llama")
    prompt = [7, 8, 9, 10, 11] * 4
    samplings = [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.05),
        RowSampling(temperature=0.3, top_k=3, seed=5),
        GREEDY,
    ]
    found, num_accepted = {}, {}
    for mode in ("off", "ngram"):
        engine = build_engine(worker_config(checkpoint, device="cuda", speculative=mode, cuda_graphs=graphs))
        engine.arena.load_zeros(0, 1, 8, is_trained=True)
        rows = [
            new_row(
                row,
                token_ids=array(prompt),
                num_prompt_tokens=len(prompt),
                block_ids=array(range(8 * row, 8 * row + 8)),
                sampling=sampling,
                slot=0 if row % 2 else None,
                slot_generation=row % 2,
            )
            for row, sampling in enumerate(samplings)
        ]
        steps = [engine.submit(make_plan(1, new=rows, prefills=[(row, len(prompt)) for row in range(len(rows))]))]
        steps += [engine.submit(StepPlan(step, num_more=3 - (step - 2) % 4)) for step in range(2, 42)]
        outputs = [step.wait() for step in steps]
        found[mode] = [output.token_ids.tolist() for output in outputs]
        num_accepted[mode] = sum(output.num_accepted for output in outputs)
    assert found["ngram"] == found["off"]
    assert num_accepted["off"] == 0 < num_accepted["ngram"]

"""A worker that computes wrongly does not attach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data_plane.errors import SelfCheckFailed
from data_plane.plan import StepOutput, StepPlan
from data_plane.self_check import NUM_STEPS, check_engine
from data_plane.worker import main
from tests.fakes.fleet_rig import CAPACITIES
from tests.fakes.hash_engine import HashEngine
from tests.makers import make_checkpoint


class Broken(HashEngine):
    """Outputs from the given step of all on are not what they should be."""

    def __init__(self, first_step: int, kind: str) -> None:
        super().__init__(CAPACITIES)
        self.num_steps = 0
        self._first_step, self._kind = first_step, kind

    def execute(self, plan: StepPlan) -> StepOutput:
        self.num_steps += 1
        output = super().execute(plan)
        if self.num_steps < self._first_step:
            return output
        if self._kind == "other tokens":
            return replace(output, token_ids=(output.token_ids + 1) % 256)
        return replace(output, rows=output.rows[:0], token_ids=output.token_ids[:0], failed_rows=output.rows)


def test_a_sound_engine_passes_and_is_empty_after_it() -> None:
    engine = Broken(first_step=10**6, kind="")
    check_engine(engine)
    check_engine(engine)
    assert engine.num_steps == 4 * NUM_STEPS and not engine.rows


@pytest.mark.parametrize("first_step", [1, NUM_STEPS, NUM_STEPS + 2])
def test_logits_that_are_not_finite_fail_it(first_step: int) -> None:
    engine = Broken(first_step, "not finite")
    step = (first_step - 1) % NUM_STEPS + 1
    with pytest.raises(SelfCheckFailed, match=f"not finite in step {step}.*fetch the checkpoint again"):
        check_engine(engine)
    assert not engine.rows


def test_tokens_that_differ_the_second_time_fail_it() -> None:
    with pytest.raises(SelfCheckFailed, match="the second time: this device computes wrongly"):
        check_engine(Broken(2 * NUM_STEPS, "other tokens"))


@pytest.mark.parametrize("changes", [{"max_model_len": 2}, {"num_blocks": 1, "block_size": 1}])
def test_a_worker_too_small_for_it_is_not_checked(changes: dict[str, Any]) -> None:
    engine = HashEngine(replace(CAPACITIES, **changes))
    check_engine(engine)
    assert engine.num_resets == 0


@pytest.mark.parametrize("changes", [{"max_step_tokens": 1, "block_size": 1}, {"max_model_len": 5, "vocab_size": 9}])
def test_a_small_worker_is_checked_with_a_shorter_prompt(changes: dict[str, Any]) -> None:
    engine = HashEngine(replace(CAPACITIES, **changes))
    check_engine(engine)
    assert engine.num_resets == 2


def test_a_worker_with_a_damaged_checkpoint_says_so_and_does_not_attach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_checkpoint(tmp_path / "model", arch="llama")
    shard = directory / "model.safetensors"
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    tensors[name] = np.where(np.arange(tensors[name].size).reshape(tensors[name].shape) == 7, np.nan, tensors[name])
    save_file(tensors, shard, metadata={"format": "pt"})
    flags = ["--model", str(directory), "--device", "cpu", "--threads", "1", "--num-blocks", "64"]
    assert main([*flags, "--control-plane", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert "not finite" in error and "fetch the checkpoint again" in error

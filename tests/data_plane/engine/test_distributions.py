"""Whole next-token distributions equal those of transformers and PEFT, for every architecture, kinds in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.settings import SchedulerSettings
from data_plane.engine.build import build_engine
from tests.data_plane.engine.test_oracle import QUERY_VALUE, worker_config
from tests.e2e.distributions import check_distributions
from tests.e2e.scheduled import ingested
from tests.makers import ARCHS, make_adapter, make_checkpoint, make_prompt
from tests.oracle import Oracle


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")  # of lora_bias
@pytest.mark.parametrize("arch", [*ARCHS, "gpt2"])
def test_distributions_are_those_of_transformers_and_peft(arch: str, tmp_path: Path) -> None:
    """Chunked prefills, and an arena and slots for two of the four adapters, so that slots are used again."""
    checkpoint = make_checkpoint(tmp_path / "model", arch)
    some = QUERY_VALUE.get(arch, ["q_proj", "v_proj"])
    paths = {
        "all": make_adapter(tmp_path / "all", checkpoint, rank=8, seed=1),
        "rs": make_adapter(tmp_path / "rs", checkpoint, rank=13, alpha=8, rslora=True, targets=some, seed=2),
        "dora": make_adapter(tmp_path / "dora", checkpoint, rank=4, targets=some, seed=3, use_dora=True),
        # Not "bias": for mixtures, PEFT 0.21 takes that for a part of the tensors' names.
        "biased": make_adapter(tmp_path / "biased", checkpoint, rank=4, targets=some, seed=4, lora_bias=True),
    }
    base_model = BaseModel.load(checkpoint)
    adapters = {name: ingested(path, base_model) for name, path in paths.items()}
    engine = build_engine(worker_config(checkpoint, num_slots=2))
    oracle = Oracle(checkpoint, paths)
    prompts = [make_prompt(seed, length) for seed, length in enumerate((1, 19, 60))]
    check_distributions(
        engine,
        adapters,
        lambda name, ids: oracle.logits(ids, name),
        prompts,
        settings=SchedulerSettings(max_step_tokens=24),
    )

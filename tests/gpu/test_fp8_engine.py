"""Engines on FP8 weights on the GPU: recorded steps give the tokens of others, and a row that is not finite fails
alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from control_plane.registry.model.base_model import BaseModel
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from tests.data_plane.engine.planner import Job, Planner, array, make_plan
from tests.data_plane.engine.test_engine import PROMPT, new_row
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import ingested
from tests.makers import make_adapter, make_checkpoint

pytestmark = pytest.mark.gpu

# All rows decode together, so that eager and recorded steps multiply as many: torch chooses a kernel by their number.
ROWS = 4
POISON = 250  # a token whose embedding is not finite
ADAPTERS: tuple[dict[str, object], ...] = ({"rank": 8}, {"rank": 4, "use_dora": True})


def engine_of(checkpoint: Path, cuda_graphs: str) -> TorchEngine:
    engine = build_engine(
        worker_config(checkpoint, device="cuda", dtype="bfloat16", quantization="fp8", cuda_graphs=cuda_graphs)
    )
    assert (engine.decode_steps.graphs is not None) == (cuda_graphs != "off")
    return engine


def test_recorded_steps_give_the_tokens_of_others(tmp_path: Path) -> None:
    """With and without adapters, one of which has vectors: its graph is recorded while requests wait."""
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    base = BaseModel.load(checkpoint, "bfloat16")
    packed = [
        ingested(make_adapter(tmp_path / str(seed), checkpoint, seed=seed, **form), base)  # type: ignore[arg-type]
        for seed, form in enumerate(ADAPTERS)
    ]
    found = []
    for graphs in ("off", str(ROWS)):
        engine = engine_of(checkpoint, graphs)
        for slot, adapter in enumerate(packed):
            engine.slots.load(slot, 1, adapter.info.digest, adapter)
        for slots in ((None,) * ROWS, (0, None, 0, None), (0, 1, None, 1)):
            jobs = [Job([*PROMPT, number], 6, slot, 1) for number, slot in enumerate(slots)]
            Planner(engine, chunk=64).run(jobs)
            found.append([job.tokens for job in jobs])
        if engine.decode_steps.graphs is not None:
            tiers = [key.tier for key in engine.decode_steps.graphs.keys]
            assert None in tiers and any(tier is not None and tier.has_vectors for tier in tiers)
    assert found[:3] == found[3:]
    assert found[0] != found[1] != found[2], "adapters do nothing"


@pytest.mark.parametrize("graphs", ["off", "2"])
def test_a_row_that_is_not_finite_fails_alone(graphs: str, tmp_path: Path) -> None:
    engine = engine_of(make_checkpoint(tmp_path / "model", "llama"), graphs)
    good, clean = new_row(0, block_ids=array([10, 11])), new_row(1, block_ids=array([20, 21]))
    bad = replace(clean, token_ids=array([4, POISON, 6, 9, 2, 8, 3]))
    begun = [(0, len(PROMPT)), (1, len(PROMPT))]
    expected = [engine.execute(make_plan(1, new=[good, clean], prefills=begun)), engine.execute(make_plan(2))]
    assert [output.failed_rows.tolist() for output in expected] == [[], []]
    engine.execute(make_plan(3, freed=[0, 1]))
    weight = engine.model.model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    weight[POISON] = float("nan")
    outputs = [engine.execute(make_plan(4, new=[good, bad], prefills=begun)), engine.execute(make_plan(5))]
    assert [output.failed_rows.tolist() for output in outputs] == [[1], [1]]
    assert [output.token_ids.tolist() for output in outputs] == [output.token_ids[:1].tolist() for output in expected]
    # The blocks go to somebody else, who must not see what the row left.
    engine.execute(make_plan(6, freed=[0, 1]))
    outputs = [engine.execute(make_plan(7, new=[good, clean], prefills=begun)), engine.execute(make_plan(8))]
    assert [output.failed_rows.tolist() for output in outputs] == [[], []]
    assert [output.token_ids.tolist() for output in outputs] == [output.token_ids.tolist() for output in expected]

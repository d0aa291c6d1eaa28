"""Drafts in bfloat16: every log-probability keeps its bits, whatever rows and drafts share a pass.

Native products and attention give a row the same bits in every batch. Drafts must not change that: they are computed
by the kernels that a decode step runs, not by those of a prefill, which round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.models.loader import LoadedModel
from data_plane.plan import RowSampling, StepOutput
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.planner import GREEDY
from tests.data_plane.engine.test_oracle import worker_config
from tests.data_plane.engine.test_speculation import BLOCK, LOOP, Request, run
from tests.makers import make_adapter

WITH_LOGPROBS = replace(GREEDY, num_logprobs=3)
DRAWN = RowSampling(temperature=0.7, top_k=0, top_p=1.0, seed=11, num_logprobs=3)


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchEngine]:
    """One that drafts and one that does not, in bfloat16 with two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [make_adapter(folder / str(seed), checkpoint, seed=seed) for seed in (1, 2)]
    built = {}
    for speculative in ("off", "ngram"):
        built[speculative] = build_engine(
            worker_config(checkpoint, block_size=BLOCK, num_blocks=600, speculative=speculative, dtype="bfloat16")
        )
        for slot, adapter in enumerate(adapters):
            packed = pack(adapter, built[speculative].capacities.model_fingerprint, torch.bfloat16)
            built[speculative].slots.load(slot, 1, packed.digest, packed)
    return built


def bits(outputs: list[StepOutput], num_rows: int) -> list[list[tuple[int, bytes]]]:
    """By row, its tokens with the bits of their log-probabilities and of the likeliest ones'."""
    found: list[list[tuple[int, bytes]]] = [[] for _ in range(num_rows)]
    for output in outputs:
        for entry in output.sampled_logprobs:
            values = np.concatenate([entry.logprobs.ravel(), entry.top_logprobs.ravel()])
            found[entry.row].append((int(entry.token_ids[0]), values.tobytes()))
    return found


@pytest.mark.parametrize("num_rows", [1, 5, 24])
@pytest.mark.parametrize("sampling", [WITH_LOGPROBS, DRAWN], ids=["greedy", "drawn"])
def test_log_probabilities_keep_their_bits_in_bfloat16(
    engines: dict[str, TorchEngine], monkeypatch: pytest.MonkeyPatch, sampling: RowSampling, num_rows: int
) -> None:
    logits_of: Callable[..., torch.Tensor] = LoadedModel.logits

    def changed(model: LoadedModel, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Raises the logit of the token that goes on with LOOP, so that some drafts are accepted."""
        logits = logits_of(model, ids, positions, kept)
        logits[torch.arange(len(kept)), 7 + (ids[kept] - 6) % 5] += 6
        return logits

    monkeypatch.setattr(LoadedModel, "logits", changed)
    requests = [
        Request(LOOP[: 20 - row % 9], replace(sampling, seed=row), (None, 0, 1)[row % 3]) for row in range(num_rows)
    ]
    found = {}
    for name, engine in engines.items():
        # No preemption: a prompt that is computed again goes through the kernels of prefills.
        outputs, _ = run(engine, requests, num_steps=40, seed=num_rows, preempts=False)
        found[name] = bits(outputs, num_rows)
        accepted = sum(output.num_accepted for output in outputs)
        assert (accepted > 0) is (name == "ngram")
    assert found["ngram"] == found["off"]


def test_a_row_has_the_same_bits_in_every_batch_without_drafts(engines: dict[str, TorchEngine]) -> None:
    """What the test above builds on."""
    first = Request(LOOP, WITH_LOGPROBS, slot=0)
    alone: list[tuple[int, bytes]] | None = None
    for num_rows in (1, 2, 7, 24):
        others = [Request([5 + row, 9, 30 + row], WITH_LOGPROBS, (None, 0, 1)[row % 3]) for row in range(1, num_rows)]
        outputs, _ = run(engines["off"], [first, *others], num_steps=24, seed=1, preempts=False, pauses=False)
        own = bits(outputs, num_rows)[0]
        alone = own if alone is None else alone
        assert own == alone

"""What is kept of a row that returns a vector: the same bits for every way to cut a prompt, and refusals by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_plane.engine.batch import StepBatch
from data_plane.engine.engine import TorchEngine
from data_plane.engine.pooling import Pooler
from data_plane.errors import PlanRefused
from data_plane.plan import NewRow, PoolingKind
from tests.data_plane.engine.planner import GREEDY, array, make_plan

TOKENS = list(range(2, 23))


def new_row(kind: PoolingKind | None, row: int = 0, *, num_computed: int = 0, num_labels: int = 0) -> NewRow:
    blocks = list(range(3 * row, 3 * row + 3))
    return NewRow(
        row,
        array(TOKENS),
        len(TOKENS),
        num_computed,
        array(blocks),
        None,
        0,
        GREEDY,
        pooling=kind,
        num_labels=num_labels,
    )


@pytest.mark.parametrize("kind", PoolingKind)
def test_a_vector_comes_with_the_end_of_the_prefill_and_the_row_stays_idle(
    engine: TorchEngine, kind: PoolingKind
) -> None:
    first = engine.execute(make_plan(1, new=[new_row(kind)], prefills=[(0, 10)]))
    assert (len(first.rows), first.pooled) == (0, [])
    last = engine.execute(make_plan(2, prefills=[(0, 11)]))
    assert (last.rows.tolist(), last.token_ids.tolist(), len(last.failed_rows)) == ([0], [0], 0)
    assert [(entry.row, entry.values.shape) for entry in last.pooled] == [(0, (engine.capacities.hidden_width,))]
    assert len(engine.execute(make_plan(3)).rows) == 0  # it does not decode
    with pytest.raises(PlanRefused):
        engine.execute(make_plan(4, prefills=[(0, 1)]))


def test_a_mean_has_the_same_bits_in_whatever_chunks_its_states_come() -> None:

    class NoHeads:
        def num_labels(self, slot: int) -> int:
            return 0

        def score(self, slot: int, state: torch.Tensor) -> torch.Tensor:
            raise AssertionError("no row has labels")

    states = torch.randn(21, 16, generator=torch.Generator().manual_seed(0)) * 100
    means = []
    for cut in ([21], [1] * 21, [7, 7, 7], [20, 1], [2, 19]):
        pooler = Pooler(max_rows=2, hidden_width=16, heads=NoHeads())
        pooler.add(new_row(PoolingKind.MEAN))
        begin, found = 0, []
        for count in cut:
            is_end = begin + count == 21
            fields = dict.fromkeys(StepBatch.__dataclass_fields__)
            fields |= {
                "rows": np.array([0]),
                "num_tokens": np.array([count]),
                "starts": np.array([0]),
                "pooled_rows": np.array([0] if is_end else [], dtype=np.int64),
            }
            found += pooler.take(StepBatch(**fields), states[begin : begin + count])  # type: ignore[arg-type]
            begin += count
        means.append(found[0].values)
    assert all(np.array_equal(means[0], mean) for mean in means)
    np.testing.assert_allclose(means[0], states.double().mean(dim=0).float().numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (new_row(PoolingKind.MEAN, num_computed=8), "pools mean hidden states, of which 8 are computed"),
        (new_row(PoolingKind.FIRST, num_computed=8), "pools first hidden states"),
        (new_row(PoolingKind.LAST, num_labels=2), "has 2 labels, its adapter has 0"),
        (new_row(None, num_labels=2), "has 2 labels and no pooling"),
    ],
)
def test_a_row_that_cannot_be_pooled_is_refused(engine: TorchEngine, row: NewRow, says: str) -> None:
    with pytest.raises(PlanRefused, match=says):
        engine.execute(make_plan(1, new=[row], prefills=[(0, 3)]))


def test_a_state_that_is_not_finite_fails_its_row_alone(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = type(engine.model).logits_and_hidden

    def spoiled(self: object, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = whole(self, *tensors)  # type: ignore[arg-type]
        hidden = hidden.clone()
        hidden[0] = torch.nan  # the first token of the step, which is row 0's
        return logits, hidden

    monkeypatch.setattr(type(engine.model), "logits_and_hidden", spoiled)
    rows = [new_row(PoolingKind.MEAN), new_row(PoolingKind.LAST, 1), new_row(None, 2)]
    output = engine.execute(make_plan(1, new=rows, prefills=[(0, 21), (1, 21), (2, 21)]))
    assert output.failed_rows.tolist() == [0]
    assert output.rows.tolist() == [1, 2] and output.token_ids[0] == 0
    assert [entry.row for entry in output.pooled] == [1]

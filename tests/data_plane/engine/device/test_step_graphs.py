"""Graphs of decode steps: which one serves a step, and the tokens of replayed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from control_plane.registry.model.base_model import BaseModel
from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.adapters.step.lora_step import LoraStep, LoraTier
from data_plane.engine.build import build_engine
from data_plane.engine.device.step_graphs import TIERS, Graph, GraphKey, StepGraphs
from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowSampling
from kernels.paged_attention import RowBatch
from tests.data_plane.engine.device.recorded_rig import RECORDED_ARCHS, experts_of
from tests.data_plane.engine.device.reruns import Body, Reruns
from tests.data_plane.engine.planner import GREEDY, Job, Planner, array, make_plan
from tests.data_plane.engine.test_device_waits import UPLOAD, Moves, moves
from tests.data_plane.engine.test_engine import PROMPT
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import ingested, reported_by
from tests.makers import make_adapter, make_checkpoint

__all__ = ["moves"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:.*target_parameters", "ignore:.*did not match any targeted")

# transformers moves learned positions to the device that they are on.
LEARNED_POSITIONS = dict.fromkeys(("gpt2", "opt"), ("data_plane/models/loader.py:_logits",))
DRAWN = RowSampling(temperature=0.9, top_k=50, top_p=0.95, seed=7)
ADAPTERS: tuple[dict[str, Any], ...] = ({"rank": 4}, {"rank": 8}, {"rank": 4, "use_dora": True}, {"rank": 20})


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """With adapters in slots 0 to 3: of ranks 4 and 8, one with DoRA, one of rank 20."""
    return engine_with(ADAPTERS, checkpoint, tmp_path_factory.mktemp("adapters"))


def engine_with(adapters: Sequence[dict[str, Any]], checkpoint: Path, folder: Path) -> TorchEngine:
    """An engine without native code, with these adapters in its slots."""
    engine = build_engine(worker_config(checkpoint, native_code="off", num_blocks=64))
    base_model = BaseModel.load(checkpoint)
    for slot, form in enumerate(adapters):
        adapter = make_adapter(folder / str(slot), checkpoint, seed=slot, **form)
        packed = ingested(adapter, base_model, reported_by(engine))
        engine.slots.load(slot, 1, packed.info.digest, packed)
    return engine


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are grouped by adapter as on a GPU."""
    monkeypatch.setattr("data_plane.adapters.step.adapter_steps.runs_triton", lambda tensor: True)


def with_graphs(plain: TorchEngine, recorder: Reruns, sizes: Sequence[int]) -> tuple[TorchEngine, StepGraphs]:
    engine = TorchEngine(plain.model, plain.kv_cache, plain.arena, plain.capacities, decodes_on_device=True)
    engine.decode_steps.record(recorder, sizes, has_adapters=True)
    graphs = engine.decode_steps.graphs
    assert graphs is not None
    return engine, graphs


def jobs(slots: Sequence[int | None], sampling: RowSampling) -> list[Job]:
    return [
        Job(PROMPT[: 3 + index % 4], 12 + index % 3, slot=slot, generation=slot is not None, sampling=sampling)
        for index, slot in enumerate(slots)
    ]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("slots", [[None] * 5, [0, 1, None, 0, 1], [2, None, 1], [3, 0]], ids=str)
def test_replayed_steps_have_the_tokens_of_steps_that_are_not(
    plain: TorchEngine, as_on_a_gpu: None, slots: list[int | None], sampling: RowSampling
) -> None:
    """Among them steps with fewer rows than their graph, and rows that are preempted."""
    recorder = Reruns()
    engine, graphs = with_graphs(plain, recorder, (2, 4))
    expected, found = jobs(slots, sampling), jobs(slots, sampling)
    Planner(plain, chunk=3, max_running=4).run(expected, preempt_at=5)
    Planner(engine, chunk=3, max_running=4).run(found, preempt_at=5)
    assert [job.tokens for job in found] == [job.tokens for job in expected]
    assert recorder.num_replays > 2
    has_vectors = any(key.tier is not None and key.tier.has_vectors for key in graphs.keys)
    assert has_vectors == (2 in slots), "recorded when the first adapter with vectors decodes"


@pytest.mark.parametrize("slots", [[None] * 3, [0, 1, None]], ids=str)
def test_rows_that_pause_are_left_alone_by_replays_for_as_many(
    plain: TorchEngine, as_on_a_gpu: None, slots: list[int | None]
) -> None:
    """What a graph reads of rows may still name those of the step before."""
    recorder = Reruns()
    engine, _ = with_graphs(plain, recorder, (4,))

    def tokens_of(engine: TorchEngine) -> list[dict[int, int]]:
        new = [
            NewRow(
                row=row,
                token_ids=array(PROMPT[: 3 + row]),
                num_prompt_tokens=3 + row,
                num_computed_tokens=0,
                block_ids=array([3 * row, 3 * row + 1, 3 * row + 2]),
                slot=slot,
                slot_generation=0 if slot is None else 1,
                sampling=DRAWN,
            )
            for row, slot in enumerate(slots)
        ]
        plans = [make_plan(1, new=new, prefills=[(row, 3 + row) for row in range(3)]), make_plan(2)]
        plans += [make_plan(3, paused=[2]), make_plan(4), make_plan(5, paused=[0]), make_plan(6)]
        plans += [make_plan(7, resumed=[0, 2]), make_plan(8), make_plan(9, freed=[0, 1, 2])]
        outputs = [engine.execute(plan) for plan in plans]
        return [dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)) for output in outputs]

    expected = tokens_of(plain)
    assert [len(tokens) for tokens in expected] == [3, 3, 2, 2, 1, 1, 3, 3, 0]
    assert tokens_of(engine) == expected
    assert recorder.num_replays == 7


def test_tokens_behind_those_of_a_step_have_no_adapter(
    plain: TorchEngine, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot that a greater step left there may be empty by then, or have another adapter."""
    engine, _ = with_graphs(plain, Reruns(), (4,))
    seen: list[list[int]] = []
    begin_tier = engine.adapter_steps.begin_tier

    def noted(token_slots: torch.Tensor, tier: LoraTier) -> LoraStep:
        seen.append(token_slots.tolist())
        return begin_tier(token_slots, tier)

    monkeypatch.setattr(engine.adapter_steps, "begin_tier", noted)
    new = [
        NewRow(
            row=row,
            token_ids=array(PROMPT[:3]),
            num_prompt_tokens=3,
            num_computed_tokens=0,
            block_ids=array([2 * row, 2 * row + 1]),
            slot=slot,
            slot_generation=1,
            sampling=GREEDY,
        )
        for row, slot in enumerate((0, 1, 0))
    ]
    engine.execute(make_plan(1, new=new, prefills=[(row, 3) for row in range(3)]))
    engine.execute(make_plan(2))
    engine.execute(make_plan(3, freed=[2]))
    assert seen == [[0, 1, 0, -1], [0, 1, -1, -1]]


def test_every_graph_reads_as_far_as_the_longest_row_goes(
    plain: TorchEngine, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU reads each row to its end, whatever a graph was recorded for; a GPU's programs follow from this number."""
    context = plain.model.context
    begin = context.begin
    seen: list[int] = []

    def noted(batch: RowBatch, *adapters: Any) -> None:
        seen.append(batch.max_context_len)
        begin(batch, *adapters)

    monkeypatch.setattr(context, "begin", noted)
    _, graphs = with_graphs(plain, Reruns(), (1, 4))
    assert len(seen) == len(graphs.keys)
    assert min(seen) >= plain.capacities.longest_row


@pytest.mark.parametrize("arch", RECORDED_ARCHS)
def test_replayed_steps_of_every_architecture_have_its_tokens(
    arch: str, as_on_a_gpu: None, tmp_path: Path, moves: Moves
) -> None:
    """And wait for nothing, nor do steps with prompts."""
    checkpoint = make_checkpoint(tmp_path / "model", arch)
    forms = [{"rank": rank} | experts_of(arch, slot) for slot, rank in enumerate((4, 8))]
    plain = engine_with(forms, checkpoint, tmp_path)
    recorder = Reruns()
    engine, _ = with_graphs(plain, recorder, (2, 4))
    expected, found = jobs([0, 1, None, 0], GREEDY), jobs([0, 1, None, 0], GREEDY)
    Planner(plain, chunk=3, max_running=4).run(expected)
    moves.places.clear()
    with moves:
        Planner(engine, chunk=3, max_running=4).run(found)
    assert [job.tokens for job in found] == [job.tokens for job in expected]
    assert recorder.num_replays > 2
    assert set(moves.places) == {UPLOAD, *LEARNED_POSITIONS.get(arch, ())}


class FailingLate(Reruns):
    """Fails once requests wait."""

    is_late = False
    num_tried = 0

    def record(self, body: Body) -> Graph:
        if self.is_late:
            self.num_tried += 1
            raise torch.OutOfMemoryError("no memory left for a graph")
        return super().record(body)


def test_a_graph_that_cannot_be_recorded_while_requests_wait_is_left_out(
    plain: TorchEngine, as_on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FailingLate()
    engine, graphs = with_graphs(plain, recorder, (4,))
    recorder.is_late = True
    expected, found = jobs([2, None], GREEDY), jobs([2, None], GREEDY)  # slot 2 has DoRA
    Planner(plain, chunk=3).run(expected)
    Planner(engine, chunk=3).run(found)
    assert [job.tokens for job in found] == [job.tokens for job in expected]
    assert recorder.num_tried == 1, "it is not tried again in each step"
    assert "graph not recorded" in caplog.text and all(
        key.tier != replace(TIERS[0], has_vectors=True) for key in graphs.keys
    )


def test_recording_changes_no_row_and_no_kv(plain: TorchEngine, as_on_a_gpu: None) -> None:
    before = [cache.clone() for cache in plain.kv_cache.tensors]
    with_graphs(plain, Reruns(), (1, 2))
    assert all(torch.equal(*pair) for pair in zip(plain.kv_cache.tensors, before, strict=True))


def slots_of(*slots: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return array(list(slots))


@pytest.mark.parametrize(
    ("num_rows", "slots", "key"),
    [
        (1, (-1,), GraphKey(1, None)),
        (3, (-1, -1, -1), GraphKey(4, None)),
        (5, (-1,) * 5, None),  # more rows than any graph
        (2, (0, -1), GraphKey(2, TIERS[0])),
        (2, (1, 0), GraphKey(2, TIERS[0])),
        (2, (3, 0), GraphKey(2, TIERS[1])),  # rank 20
        (1, (2,), GraphKey(1, replace(TIERS[0], has_vectors=True))),
    ],
)
def test_the_smallest_graph_that_serves_a_step_is_found(
    plain: TorchEngine, as_on_a_gpu: None, num_rows: int, slots: tuple[int, ...], key: GraphKey | None
) -> None:
    _, graphs = with_graphs(plain, Reruns(), (1, 2, 4))
    assert graphs.find(num_rows, slots_of(*slots)) == key


@pytest.mark.parametrize(("num_rows", "num_adapters", "tier"), [(16, 16, 0), (17, 17, 2), (20, 3, 0), (24, 24, 2)])
def test_a_step_whose_rows_have_an_adapter_each_has_a_graph(
    plain: TorchEngine,
    as_on_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    num_adapters: int,
    tier: int,
) -> None:
    """Also where the size of its graph is between the tiers' numbers of adapters."""
    _, graphs = with_graphs(plain, Reruns(), (16, 24))
    monkeypatch.setattr(AdapterSteps, "tier_of", lambda _, slots: LoraTier(len(slots), 8))
    key = graphs.find(num_rows, slots_of(*(row % num_adapters for row in range(num_rows))))
    assert key == GraphKey(16 if num_rows == 16 else 24, TIERS[tier])


def test_graphs_serve_adapters_beside_one_that_rotates_by_tables_of_its_own(
    plain: TorchEngine, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded, and no row of the step uses it."""
    _, graphs = with_graphs(plain, Reruns(), (2,))
    monkeypatch.setitem(plain.arena.table.rotations, 1, object())
    assert graphs.find(2, slots_of(0, -1)) == GraphKey(2, TIERS[0])
    assert graphs.find(2, slots_of(0, 1)) is None


class Outputs(Reruns):
    """Keeps where graphs leave their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[torch.Tensor] = []

    def record(self, body: Body) -> Graph:
        graph = super().record(body)
        self.logits.append(graph.outputs[0])
        return graph


def test_all_graphs_leave_their_logits_in_the_same_memory(plain: TorchEngine, as_on_a_gpu: None) -> None:
    """65 graphs of up to 256 rows and 128,256 tokens would keep 1.6 GB in bfloat16."""
    recorder = Outputs()
    with_graphs(plain, recorder, (1, 2, 4))
    assert sorted({len(logits) for logits in recorder.logits}) == [1, 2, 4]
    assert len({logits.data_ptr() for logits in recorder.logits}) == 1


def test_tiers_serve_what_needs_no_more() -> None:
    tier = LoraTier(16, 16)
    assert tier.serves(LoraTier(1, 16)) and tier.serves(LoraTier(16, 1))
    assert not tier.serves(LoraTier(17, 16)) and not tier.serves(LoraTier(1, 17))
    assert not tier.serves(LoraTier(1, 1, has_vectors=True))
    assert replace(tier, has_vectors=True).serves(LoraTier(1, 1))

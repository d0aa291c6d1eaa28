"""Drafts where decode steps are built on the device: steps without drafts are those of an engine that never drafts.

They are replayed from graphs, and nobody waits for their results before drafts are looked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_plane.engine.build import build_engine
from data_plane.engine.device.decode_steps import DecodeSteps
from data_plane.engine.device.step_graphs import StepGraphs
from data_plane.engine.engine import TorchEngine
from data_plane.engine.rows import BoolArray
from data_plane.engine.sampling.results import ResultCopies, ResultCopy
from data_plane.engine.speculative.pass_costs import PassCosts
from data_plane.models.loader import LoadedModel
from data_plane.plan import Int32Array, PendingStep, RowSampling, StepPlan
from tests.data_plane.engine.device.reruns import Reruns
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.planner import make_plan
from tests.data_plane.engine.test_device_waits import UPLOAD, Moves, moves as moves
from tests.data_plane.engine.test_oracle import worker_config
from tests.data_plane.engine.test_speculation import BLOCK, BLOCKS_OF_ROW, LOOP, Request, assert_same, run
from tests.data_plane.engine.test_steps_under_way import Clock, LateCopies
from tests.makers import make_adapter

DRAWN = RowSampling(temperature=0.5, top_k=0, top_p=1.0, seed=5, repetition_penalty=1.05)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are grouped by adapter as on a GPU."""
    monkeypatch.setattr("data_plane.adapters.step.adapter_steps.runs_triton", lambda tensor: True)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Raises the logit of the token that goes on with LOOP."""
    logits_of = LoadedModel.logits

    def use(strength: float) -> None:
        def changed(model: LoadedModel, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            logits = logits_of(model, ids, positions, kept).clone()
            logits[torch.arange(len(kept)), 7 + (ids[kept] - 6) % 5] += strength
            return logits

        monkeypatch.setattr(LoadedModel, "logits", changed)

    return use


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """Builds its steps on the host and does not draft; two adapters."""
    engine = build_engine(worker_config(checkpoint, block_size=BLOCK, num_blocks=200, native_code="off"))
    folder = tmp_path_factory.mktemp("adapters")
    for slot, rank in enumerate((4, 8)):
        adapter = make_adapter(folder / str(slot), checkpoint, rank=rank, seed=slot)
        packed = pack(adapter, engine.capacities.model_fingerprint)
        engine.slots.load(slot, 1, packed.digest, packed)
    return engine


def drafting(
    plain: TorchEngine,
    recorder: Reruns | None,
    *,
    mode: str = "ngram",
    copies: ResultCopies | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sizes: tuple[int, ...] = (2, 4),
) -> TorchEngine:
    engine = TorchEngine(
        plain.model,
        plain.kv_cache,
        plain.arena,
        plain.capacities,
        decodes_on_device=True,
        speculative=mode,
        copies=copies,
        clock=clock,
    )
    if recorder is not None:
        engine.decode_steps.record(recorder, sizes, has_adapters=True)
    return engine


def requests() -> list[Request]:
    return [Request(LOOP), Request(LOOP[:13], DRAWN, slot=0), Request([5, 9, 31, 7], DRAWN, slot=1)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Passes with drafts: all of them, and those that were replayed from a graph."""
    counts = {"all": 0, "replayed": 0}
    for name, owner, method in (("all", DecodeSteps, "_run_drafts"), ("replayed", StepGraphs, "run_drafts")):
        original = getattr(owner, method)

        def counted(*args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, method, counted)
    return counts


@pytest.mark.parametrize("sizes", [(2, 4), (4, 64)], ids=["graphs for steps alone", "graphs for drafts"])
@pytest.mark.parametrize("copies", [None, LateCopies()], ids=["in time", "late"])
@pytest.mark.parametrize("seed", range(2))
def test_drafts_beside_replayed_steps_change_no_token(
    plain: TorchEngine,
    loops: Callable[[float], None],
    passes: dict[str, int],
    seed: int,
    copies: ResultCopies | None,
    sizes: tuple[int, ...],
) -> None:
    """Among them rows that pause, and rows that are preempted."""
    loops(6.0)
    recorder = Reruns()
    engine = drafting(plain, recorder, copies=copies, sizes=sizes)
    found, _ = run(engine, requests(), num_steps=48, seed=seed)
    expected, _ = run(plain, requests(), num_steps=48, seed=seed)
    assert_same(found, expected)
    assert sum(output.num_accepted for output in found) > 0
    assert passes["all"] > 0 and recorder.num_replays > passes["replayed"], "no step without drafts was replayed"
    assert passes["replayed"] == passes["all"] if 64 in sizes else passes["replayed"] < passes["all"]


def test_steps_in_which_nothing_can_be_drafted_do_not_wait(
    plain: TorchEngine, loops: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `auto`, where passes with drafts are known to take too long."""
    loops(100.0)
    monkeypatch.setattr(PassCosts, "can_gain", lambda *_, **__: False)
    copies = LateCopies()
    engine = drafting(plain, None, mode="auto", copies=copies)
    pending = [engine.submit(make_plan(1, new=[Request(LOOP).new_row(0)], prefills=[(0, len(LOOP))]))]
    pending += plan_of_four(engine, 2, [(0, 5), (0, 6)])
    assert not any(step.is_done() for step in pending)
    assert [step.wait().token_ids.tolist() for step in pending] == [[7], [8], [9], [10], [11]]


def test_the_time_of_a_step_counts_also_if_it_is_known_after_the_tokens(
    plain: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that returns results reads the clock when it has read the tokens. A step that is submitted meanwhile
    sees these, and not yet the time."""
    seen: list[int] = []

    def noted(_: PassCosts, num_tokens: int, *, has_adapters: bool, time_s: float) -> None:
        seen.append(num_tokens)

    monkeypatch.setattr(PassCosts, "can_gain", lambda *_, **__: False)
    monkeypatch.setattr(PassCosts, "observe", noted)
    copies = LateCopies()
    engine = drafting(plain, None, mode="auto", copies=copies)
    rows = [Request([5]).new_row(row) for row in (0, 1)]
    pending = [engine.submit(make_plan(1, new=rows, prefills=[(0, 1), (1, 1)])), engine.submit(make_plan(2))]
    for copy in copies.started:
        copy.has_come = True
    pending.append(engine.submit(make_plan(3)))
    assert seen == [], "nobody has waited for the second step"
    for step in pending[:2]:
        step.wait()
    pending.append(engine.submit(make_plan(4)))
    assert seen == [2], "the step that decoded; a prompt's time says nothing"


class SlowCopies(LateCopies):
    """The first results take 4 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def start(self, tokens: torch.Tensor, finite: torch.Tensor) -> ResultCopy:
        copy = super().start(tokens, finite)
        if len(self.started) == 1:
            read = copy.read

            def read_slowly() -> tuple[Int32Array, BoolArray]:
                self._clock.now_s += 0.0 if copy.is_done() else 4.0
                return read()

            copy.read = read_slowly  # type: ignore[method-assign]
        return copy


def test_the_time_of_a_step_has_nothing_of_the_steps_that_its_drafts_waited_for(
    plain: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted off twice, it made the time of plain steps negative: with `auto` nothing would be drafted any more."""
    seen: list[float] = []

    def noted(_: PassCosts, num_tokens: int, *, has_adapters: bool, time_s: float) -> None:
        seen.append(time_s)

    monkeypatch.setattr(PassCosts, "can_gain", lambda *_, **__: True)
    monkeypatch.setattr(PassCosts, "observe", noted)
    clock = Clock()
    engine = drafting(plain, None, mode="auto", copies=SlowCopies(clock), clock=clock)
    pending = [engine.submit(make_plan(1, new=[Request([5]).new_row(0)], prefills=[(0, 1)]))]
    pending += [engine.submit(replace(make_plan(2), num_more=1)), engine.submit(make_plan(3))]
    assert clock.now_s == 104.0, "the second step waited for the first one"
    for step in pending:
        step.wait()
        clock.now_s += 1.0
    engine.submit(make_plan(4, freed=[0]))
    assert seen == [1.0, 1.0]


def test_a_plan_without_drafts_waits_for_the_steps_before_it_alone(plain: TorchEngine) -> None:
    """Not for its own steps, one after the other."""
    copies = LateCopies()
    engine = drafting(plain, None, copies=copies)
    first = engine.submit(make_plan(1, new=[Request([5, 9, 31, 7]).new_row(0)], prefills=[(0, 4)]))
    assert not first.is_done()
    pending = plan_of_four(engine, 2, [(0, 1), (0, 2)])
    assert first.is_done(), "drafts were looked for without the row's latest token"
    assert not any(step.is_done() for step in pending)


def test_drafts_follow_tokens_whose_results_were_late(plain: TorchEngine, loops: Callable[[float], None]) -> None:
    """Also where the row's number was that of another row, whose tokens come as late."""
    loops(100.0)
    copies = LateCopies()
    engine = drafting(plain, None, copies=copies)
    other = Request([9, 8, 7, 9, 8, 7]).new_row(0)
    pending = [engine.submit(make_plan(1, new=[other], prefills=[(0, 6)]))]
    row = Request(LOOP).new_row(0)
    pending.append(engine.submit(make_plan(2, freed=[0], new=[row], prefills=[(0, len(LOOP))])))
    assert not any(step.is_done() for step in pending)
    plan = plan_of_four(engine, 3, [(0, 5), (0, 6)])
    outputs = [step.wait() for step in [*pending[1:], *plan]]
    assert [output.token_ids.tolist() for output in outputs] == [[7], [8], [9], [10], [11]]
    assert [output.num_accepted for output in outputs] == [0, 3, 0, 0, 0]


def plan_of_four(engine: TorchEngine, step_id: int, appended: list[tuple[int, int]]) -> list[PendingStep]:
    """Four steps in one plan."""
    first = replace(make_plan(step_id, appended=appended), num_more=3)
    return [
        engine.submit(plan) for plan in (first, *(StepPlan(step_id + 3 - left, num_more=left) for left in (2, 1, 0)))
    ]


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_every_pass_with_drafts_has_a_graph_of_those_that_a_worker_records(
    checkpoint: Path, loops: Callable[[float], None], passes: dict[str, int], num_rows: int
) -> None:
    """Few rows gain most."""
    loops(100.0)
    settings = {"block_size": BLOCK, "num_blocks": 200, "native_code": "off", "speculative": "ngram"}
    config = worker_config(checkpoint, max_rows=num_rows, **settings)
    built = build_engine(config)
    parts = built.model, built.kv_cache, built.arena, built.capacities
    engine = TorchEngine(*parts, decodes_on_device=True, speculative="ngram")
    engine.decode_steps.record(Reruns(), config.graph_sizes("cuda"), has_adapters=False)
    rows = [Request(LOOP[: 20 - row]) for row in range(num_rows)]
    run(engine, rows, num_steps=30, seed=1, preempts=False, pauses=False)
    assert passes["replayed"] == passes["all"] > 5


def test_a_pass_with_drafts_waits_for_its_results_alone(
    plain: TorchEngine, loops: Callable[[float], None], moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU: one copy for its tokens, one for what was accepted. The step behind it brings the rows up to date."""
    monkeypatch.setattr("kernels.devices.packs_uploads", lambda device: True)
    loops(100.0)
    engine = drafting(plain, Reruns(), sizes=(4, 64))
    rows = [Request(LOOP, slot=slot).new_row(row) for row, slot in enumerate((None, 0, 1))]
    engine.execute(make_plan(1, new=rows, prefills=[(row, len(LOOP)) for row in range(3)]))

    def uploads_of(plan: StepPlan) -> int:
        moves.places.clear()
        with moves:
            assert len(engine.submit(plan).wait().rows) == 3
        assert set(moves.places) <= {UPLOAD}
        return moves.places[UPLOAD]

    first = make_plan(2, appended=[(row, row * BLOCKS_OF_ROW + 5) for row in range(3)])
    assert [uploads_of(replace(first, num_more=3))] == [2]
    assert [uploads_of(StepPlan(3 + index, num_more=2 - index)) for index in range(3)] == [0, 0, 0]
    appended = [(row, row * BLOCKS_OF_ROW + 6) for row in range(3)]
    assert [uploads_of(make_plan(6, appended=appended)), uploads_of(make_plan(7))] == [1, 0]

"""Steps whose results the host needs at once are replayed all the same: rows with log-probabilities or a constraint."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowConstraint, RowLogprobs, RowSampling, StepOutput, Vocabulary
from tests.data_plane.constraints.test_rows import HeldLanes, run_all
from tests.data_plane.engine.device.reruns import Reruns
from tests.data_plane.engine.device.test_step_graphs import engine_with
from tests.data_plane.engine.planner import GREEDY, array, make_plan
from tests.data_plane.engine.test_engine import PROMPT, new_row
from tests.makers import make_tokenizer

DRAWN = RowSampling(temperature=0.9, top_k=50, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """With an adapter in slot 0. Its own steps are built on the host."""
    return engine_with([{"rank": 4}], checkpoint, tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def vocabulary(plain: TorchEngine, tmp_path: Path) -> Vocabulary:
    document = (make_tokenizer(tmp_path / "tokenizer", vocab_size=256) / "tokenizer.json").read_text(encoding="utf-8")
    return Vocabulary("v", document, plain.capacities.vocab_size, (0,))


def on_parts_of(plain: TorchEngine, recorder: Reruns | None, lanes: HeldLanes | None = None) -> TorchEngine:
    """Another engine with the parts of `plain`; with a recorder its decode steps of up to four rows are replayed."""
    is_on_device = recorder is not None
    engine = TorchEngine(
        plain.model, plain.kv_cache, plain.arena, plain.capacities, lanes=lanes, decodes_on_device=is_on_device
    )
    if recorder is not None:
        engine.decode_steps.record(recorder, (4,), has_adapters=True)
    return engine


def rows_of_all_kinds(vocabulary: Vocabulary | None) -> list[NewRow]:
    """One with an adapter that draws, one whose log-probabilities are returned; with a vocabulary a constrained one."""
    rows = [
        new_row(0, block_ids=array([0, 1, 2]), slot=0, slot_generation=1, sampling=DRAWN),
        new_row(1, block_ids=array([3, 4, 5]), sampling=replace(GREEDY, num_logprobs=2)),
    ]
    if vocabulary is not None:
        constraint = RowConstraint("letters", "start: /[a-z]+/", vocabulary)
        rows.append(new_row(2, block_ids=array([6, 7, 8]), sampling=DRAWN, constraint=constraint))
    return rows


def what(output: StepOutput) -> tuple[object, ...]:
    found = (output.rows, output.token_ids, output.failed_rows, output.waiting_rows)
    return tuple(numbers.tolist() for numbers in found)


def assert_same_logprobs(found: list[RowLogprobs], expected: list[RowLogprobs]) -> None:
    assert [part.row for part in found] == [part.row for part in expected]
    for part, due in zip(found, expected, strict=True):
        assert (part.first_position, part.token_ids.tolist()) == (due.first_position, due.token_ids.tolist())
        assert part.top_token_ids.tolist() == due.top_token_ids.tolist() and part.ranks.tolist() == due.ranks.tolist()
        np.testing.assert_allclose(part.logprobs, due.logprobs, atol=1e-5)
        np.testing.assert_allclose(part.top_logprobs, due.top_logprobs, atol=1e-5)


def test_log_probabilities_are_those_of_steps_that_are_built_on_the_host(
    plain: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that returns them used to take every other row's step off the device, too."""
    monkeypatch.setattr("data_plane.adapters.step.adapter_steps.runs_triton", lambda tensor: True)

    def outputs_of(engine: TorchEngine) -> list[StepOutput]:
        new = rows_of_all_kinds(None)
        plans = [make_plan(1, new=new, prefills=[(row, len(PROMPT)) for row in range(2)])]
        plans += [make_plan(2 + number) for number in range(8)]
        return [engine.execute(plan) for plan in [*plans, make_plan(10, freed=[0, 1])]]

    recorder = Reruns()
    expected, found = outputs_of(on_parts_of(plain, None)), outputs_of(on_parts_of(plain, recorder))
    assert [what(output) for output in found] == [what(output) for output in expected]
    for output, due in zip(found, expected, strict=True):
        assert_same_logprobs(list(output.sampled_logprobs), list(due.sampled_logprobs))
    assert sum(len(output.sampled_logprobs) for output in found) == 9
    assert recorder.num_replays == 8, "every decode step"


def test_constrained_rows_wait_and_go_on_as_in_steps_that_are_built_on_the_host(
    plain: TorchEngine, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_plane.adapters.step.adapter_steps.runs_triton", lambda tensor: True)

    def outputs_of(recorder: Reruns | None) -> list[StepOutput]:
        lanes = HeldLanes()
        engine = on_parts_of(plain, recorder, lanes)
        outputs = [
            engine.execute(
                make_plan(1, new=rows_of_all_kinds(vocabulary), prefills=[(n, len(PROMPT)) for n in (0, 1, 2)])
            )
        ]
        lanes.read_all()
        for number in range(12):
            if number % 3 != 1:  # the mask of the next token is late in every third step
                run_all(lanes.new)
                run_all(lanes.quick)
            outputs.append(engine.execute(make_plan(2 + number)))
        outputs.append(engine.execute(make_plan(14, freed=[0, 1, 2])))
        return outputs

    recorder = Reruns()
    expected, found = outputs_of(None), outputs_of(recorder)
    assert [what(output) for output in found] == [what(output) for output in expected]
    waits = [2 in output.waiting_rows for output in found]
    assert 3 <= sum(waits) < 10 and not waits[-2], "the row waits in some steps, and goes on"
    tokens = [token for output in found for row, token in zip(output.rows, output.token_ids, strict=True) if row == 2]
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
    letters = {tokenizer.token_to_id(letter) for letter in string.ascii_lowercase}
    assert len(tokens) >= 4 and set(tokens) <= letters
    assert recorder.num_replays == 12, "every decode step, also those in which a row waits"

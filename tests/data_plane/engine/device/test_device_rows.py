"""Steps built from the rows' state on the device are those built on the host, and upload next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_plane.adapters.arena.scaled_columns import ScaledColumns
from data_plane.engine.batch import build_batch
from data_plane.engine.device.device_rows import DeviceRows
from data_plane.engine.engine import TorchEngine
from data_plane.engine.rows import Int64Array, Rows
from data_plane.engine.speculative.draft_passes import DraftPasses, DrawnTokens
from data_plane.errors import PlanRefused
from data_plane.plan import RowSampling
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.planner import GREEDY, Job, Planner, array, make_plan
from tests.data_plane.engine.test_engine import PROMPT, complete, new_row
from tests.makers import make_adapter

DRAWN = RowSampling(temperature=0.9, top_k=50, top_p=0.95, seed=7, repetition_penalty=1.3)
SIZE = 4


@pytest.fixture
def rows(engine: TorchEngine) -> Rows:
    return Rows(
        max_rows=6,
        max_blocks=5,
        num_blocks=64,
        num_host_blocks=0,
        block_size=SIZE,
        vocab_size=256,
        scaled=ScaledColumns(engine.arena.table),
    )


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each upload of device rows."""
    seen: list[int] = []

    def upload(values: Int64Array, device: torch.device) -> torch.Tensor:
        seen.append(values.nbytes)
        return torch.from_numpy(values.copy())

    monkeypatch.setattr("data_plane.engine.device.device_rows.upload", upload)
    return seen


def begin(
    rows: Rows, number: int, num_computed: int, blocks: list[int], slot: int | None = None, active_from: int = 0
) -> None:
    """A row whose prefill has ended, and which has sampled a token."""
    rows.add(
        new_row(
            number,
            token_ids=array(list(range(num_computed))),
            num_prompt_tokens=num_computed,
            block_ids=array(blocks),
            slot=slot,
            active_from=active_from,
        )
    )
    rows.num_computed[number] = num_computed
    rows.note_sampled(np.array([number]))


def steps_agree(rows: Rows, there: DeviceRows, numbers: list[int]) -> None:
    """One step of these rows, built both ways; then the rows are as after it."""
    decoding = np.array(numbers, dtype=np.int64)
    there.last_tokens.copy_(torch.arange(rows.max_rows) + 100)
    expected = build_batch(
        rows,
        decoding,
        array([], 2),
        there.last_tokens,
        num_prompt_logprobs=np.full(rows.max_rows, -1),
        is_pooling=np.zeros(rows.max_rows, dtype=np.bool_),
    )
    slots = rows.adapters.of_tokens(decoding, rows.num_computed[decoding])[0]
    row_ids, actual = there.begin_step(decoding, slots)
    assert expected is not None
    assert row_ids.tolist() == numbers
    assert torch.equal(actual.input_ids, expected.input_ids)
    assert torch.equal(actual.positions, expected.position_ids)
    assert torch.equal(actual.kv_positions, expected.kv_positions)
    assert actual.context_lens.tolist() == expected.attention.context_lens
    for index, length in enumerate(expected.attention.context_lens):
        used = -(-length // SIZE)
        table = there.state.block_tables[numbers[index], :used].numpy()
        assert np.array_equal(table, expected.attention.host_tables[index, :used])
    assert actual.token_slots.tolist() == expected.token_slots.tolist()
    assert actual.completion_index.tolist() == (rows.num_known[decoding] - rows.num_prompt[decoding]).tolist()
    rows.num_computed[decoding] += 1
    rows.note_sampled(decoding)


def test_steps_built_on_the_device_are_those_built_on_the_host(rows: Rows, uploads: list[int]) -> None:
    there = DeviceRows(rows, torch.device("cpu"))
    begin(rows, 4, 6, [7, 2], slot=3)
    begin(rows, 1, 3, [9])
    steps_agree(rows, there, [1, 4])
    steps_agree(rows, there, [4])
    begin(rows, 0, 4, [11, 12], slot=5)
    rows.append_blocks(array([(1, 5), (4, 60)], 2))
    steps_agree(rows, there, [0, 1, 4])
    rows.free(array([1]))
    begin(rows, 1, 9, [30, 31, 32], slot=0)
    steps_agree(rows, there, [0, 1, 4])
    # The row that has the number of another one, with as many tokens and blocks.
    rows.free(array([0]))
    begin(rows, 0, 5, [50, 51])
    steps_agree(rows, there, [0, 1])


def test_a_row_that_sat_out_a_step_is_sent_again(rows: Rows, uploads: list[int]) -> None:
    there = DeviceRows(rows, torch.device("cpu"))
    begin(rows, 2, 6, [7, 2])
    steps_agree(rows, there, [2])
    rows.num_computed[2] -= 1  # as Rows.sit_out, and a speculation that was rejected
    rows.num_known[2] -= 1
    steps_agree(rows, there, [2])


def test_a_steady_step_uploads_appended_blocks_alone(rows: Rows, uploads: list[int]) -> None:
    there = DeviceRows(rows, torch.device("cpu"))
    begin(rows, 1, 4, [9, 10])
    begin(rows, 4, 6, [7, 2])
    steps_agree(rows, there, [1, 4])
    assert len(uploads) == 1
    uploads.clear()
    steps_agree(rows, there, [1, 4])
    assert uploads == []
    rows.append_blocks(array([(4, 60)], 2))
    steps_agree(rows, there, [1, 4])
    assert uploads == [8], "a place and a block"


def test_a_row_with_the_number_of_another_has_its_own_slot(rows: Rows, uploads: list[int]) -> None:
    """As many tokens and blocks, and a step between them in which slots are not read."""
    there = DeviceRows(rows, torch.device("cpu"))
    for slot in (2, 7, None, 7):
        begin(rows, 3, 4, [9, 10], slot=slot)
        if slot == 7:
            there.tables_of(np.array([3]))
        steps_agree(rows, there, [3])
        rows.free(array([3]))


def test_an_adapter_that_begins_behind_its_prompt_is_refused(rows: Rows) -> None:
    """A row has one slot on the device: that of the tokens which it generates."""
    with pytest.raises(PlanRefused, match="new row 1 has an adapter from token 4 on; it may begin within the prompt"):
        begin(rows, 1, 4, [9, 10], slot=2, active_from=4)


def test_the_device_forgets_with_the_rows(rows: Rows, uploads: list[int]) -> None:
    there = DeviceRows(rows, torch.device("cpu"))
    begin(rows, 1, 4, [9, 10])
    steps_agree(rows, there, [1])
    rows.clear()
    there.clear()
    begin(rows, 1, 4, [19, 20])
    steps_agree(rows, there, [1])


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_those_of_an_engine_that_builds_its_steps_on_the_host(
    engine: TorchEngine, checkpoint: Path, tmp_path: Path, sampling: RowSampling
) -> None:
    """With adapters and base rows, prompts in pieces, and rows that are preempted."""
    for slot, rank in enumerate((4, 8)):
        packed = pack(
            make_adapter(tmp_path / f"adapter{slot}", checkpoint, rank=rank, seed=slot),
            engine.capacities.model_fingerprint,
        )
        engine.slots.load(slot, 1, packed.digest, packed)

    def jobs() -> list[Job]:
        return [
            Job(PROMPT[: 3 + index % 4], 9 + index % 3, slot=slot, generation=slot is not None, sampling=sampling)
            for index, slot in enumerate([None, 0, 1, 0, None, 1])
        ]

    there = TorchEngine(engine.model, engine.kv_cache, engine.arena, engine.capacities, decodes_on_device=True)
    found = []
    for each in (engine, there):
        batch = jobs()
        Planner(each, chunk=3, max_running=4).run(batch, preempt_at=5)
        found.append([job.tokens for job in batch])
    assert found[0] == found[1]


def test_a_reset_engine_serves_as_a_new_one(engine: TorchEngine) -> None:
    there = TorchEngine(engine.model, engine.kv_cache, engine.arena, engine.capacities, decodes_on_device=True)
    expected = complete(engine, [Job(PROMPT, 5)])
    assert complete(there, [Job(PROMPT, 5)]) == expected
    there.execute(make_plan(1, new=[new_row(0)], prefills=[(0, 7)]))
    there.reset()
    assert complete(there, [Job(PROMPT, 5)]) == expected


def test_a_pass_with_drafts_says_which_rows_stayed_finite(rows: Rows) -> None:
    """If the last token that counts was not, the row's blocks are made finite before another row fills them."""
    unused: Any = None
    last_tokens = torch.zeros(6, dtype=torch.int64)
    parts = rows, unused, unused, unused, last_tokens
    passes = DraftPasses(*parts, logits=unused, sample=unused)
    for row, blocks in ((1, [9, 10]), (4, [7, 2])):
        begin(rows, row, 4, blocks)
    token_ids = array([50, 51, 52, 60, 61])
    drawn = DrawnTokens(torch.from_numpy(token_ids).long(), token_ids, np.array([True, False, True, True, False]))
    known = rows.num_known.copy()
    passes.keep(drawn, np.array([1, 4]), np.array([2, 1]), np.array([1, 3]))
    assert rows.maybe_non_finite[[1, 4]].tolist() == [True, False]
    assert (rows.num_known - known)[[1, 4]].tolist() == [2, 1]
    assert last_tokens[[1, 4]].tolist() == [51, 60]

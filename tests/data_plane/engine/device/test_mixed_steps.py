"""Steps with prompts on a device: few uploads, and never a block table whose rows the device has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, StepPlan
from kernels import native
from kernels.paged_attention import AttentionBatch
from tests.data_plane.engine.device.launch_traces import launches_noted
from tests.data_plane.engine.device.recorded_rig import BLOCKS, PROMPT, Rig
from tests.data_plane.engine.device.reruns import Reruns
from tests.data_plane.engine.planner import GREEDY, Job, Planner, array, make_plan
from tests.data_plane.engine.test_device_waits import UPLOAD, Moves, moves

__all__ = ["moves"]  # a fixture
BLOCK_SIZE = 8


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)


def row(number: int, slot: int | None = None, *, blocks: int = BLOCKS) -> NewRow:
    """Its blocks are those behind the blocks of the row before."""
    return NewRow(
        row=number,
        token_ids=array(PROMPT),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=array(range(BLOCKS * number, BLOCKS * number + blocks)),
        slot=slot,
        slot_generation=1,
        sampling=GREEDY,
    )


def chunk(step_id: int, number: int, count: int, *new: NewRow) -> StepPlan:
    return make_plan(step_id, new=list(new), prefills=[(number, count)])


def uploads_of(engine: TorchEngine, moves: Moves, plan: StepPlan) -> list[int]:
    """Bytes of each upload of a step with a GPU's branches, of which the launches do nothing."""
    moves.upload_bytes.clear()
    moves.places.clear()
    with launches_noted(None), moves:
        engine.submit(plan)
    assert set(moves.places) == {UPLOAD}
    return list(moves.upload_bytes)


@pytest.mark.parametrize(("slot", "most_uploads"), [(None, 4), (0, 5)], ids=["base", "adapter"])
def test_a_chunk_beside_decodes_has_few_uploads(
    tmp_path: Path, moves: Moves, slot: int | None, most_uploads: int
) -> None:
    """Blocks of the rows, tokens with their positions, lengths, tiles of queries; with adapters the slots of tokens."""
    rig = Rig("llama", tmp_path, Reruns())
    rig.load(0, rank=4)
    for number in range(3):
        rig.add(number, slot)
    sizes = uploads_of(rig.engine, moves, chunk(101, 3, 3, row(3, slot)))
    assert len(sizes) <= most_uploads
    assert sum(sizes) <= 1024, "bytes"


def test_blocks_that_the_device_has_are_not_uploaded_again(tmp_path: Path, moves: Moves) -> None:
    """A second chunk of a row with a few blocks and of one with many: as many bytes."""
    seen = []
    for name, blocks in (("few", 1), ("many", 30)):
        rig = Rig("llama", tmp_path / name, Reruns())
        uploads_of(rig.engine, moves, chunk(1, 0, 2, row(0, blocks=blocks)))
        first = sum(moves.upload_bytes)
        seen.append((first, sum(uploads_of(rig.engine, moves, chunk(2, 0, 2)))))
    (few_first, few), (many_first, many) = seen
    assert many_first == few_first + 29 * 8 and many == few


@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_the_device_has_the_blocks_that_attention_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    """Prompts in chunks beside decodes, rows that are preempted, row numbers that are used again."""
    compared = []

    def build(tables: torch.Tensor, *lengths: Sequence[int], **there: Any) -> AttentionBatch:
        batch = AttentionBatch.build(tables, *lengths, **there)
        assert batch.device_tables is not None and batch.table_rows is not None
        for sequence, (number, length) in enumerate(zip(batch.table_rows, batch.context_lens, strict=True)):
            num_blocks = -(-length // BLOCK_SIZE)
            assert torch.equal(batch.device_tables[number, :num_blocks], tables[sequence, :num_blocks])
            compared.append(num_blocks)
        return batch

    rig = Rig("llama", tmp_path, Reruns())
    monkeypatch.setattr("data_plane.engine.batch.AttentionBatch", SimpleNamespace(build=build))
    assert rig.engine.capacities.block_size == BLOCK_SIZE
    jobs = [Job([5 + i % 90 for i in range(20 + 17 * job)], 9 + job) for job in range(5)]
    Planner(rig.engine, chunk=chunk_tokens, max_running=3).run(jobs, preempt_at=5)
    assert len(compared) > 10 and max(compared) > 2

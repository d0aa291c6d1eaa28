"""The store that is filled beside the API is one that the registry takes, and the points are what they are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving.checkpoints import make_base, make_small_adapter
from benchmarks.serving.growth import counts, main
from benchmarks.serving.registered import fill_store, small_name
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.records import AdapterState
from tests.control_plane.registry.rig import open_registry


async def test_the_registry_opens_a_filled_store_and_registers_the_same_adapter_as_the_same(tmp_path: Path) -> None:
    model_dir = make_base("tiny", tmp_path)
    small = make_small_adapter("tiny", tmp_path)
    store_dir = tmp_path / "store"
    fill_store(store_dir, model_dir, small, 0, 3)
    fill_store(store_dir, model_dir, small, 3, 5)
    registry = await open_registry(str(store_dir), BaseModel.load(model_dir))
    try:
        records, _ = registry.list_part(count=100)
        assert [record.adapter_id for record in records] == [small_name(index) for index in range(5)]
        assert {record.state for record in records} == {AdapterState.ACTIVE}
        assert len({record.active_digest for record in records}) == 5
        before = registry.get(small_name(0))
        files = {path.name: path for path in small.glob("adapter_*")}
        registered = await registry.register(small_name(0), files)
        assert registered.record.active_digest == before.active_digest
        assert not registered.is_repaired, "the weights in the store are whole"
    finally:
        await registry.close()


def test_numbers_of_adapters_come_in_ascending_order() -> None:
    assert counts("100,10,1000") == [10, 100, 1000]
    assert counts("") == []


@pytest.mark.parametrize("repeats", ["0", "9"])
def test_repeats_that_would_send_a_prompt_again_are_refused(repeats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repeats", repeats]) == 2
    assert f"--repeats: {repeats} is not in 1..8" in capsys.readouterr().err

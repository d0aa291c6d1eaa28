"""Adapters whose modules the workers do not serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.errors import (
    AdapterNotServed,
    InvalidRequest,
)
from control_plane.registry.model.served_modules import ModuleKind, ServedModule, WorkerReport
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.records import AdapterState
from tests.control_plane.registry.rig import SHAPES, files, open_registry


def served(*without: str, reason: str = "it sees only some of the tokens") -> WorkerReport:
    """The report of a worker that serves all modules but those whose names end so."""
    return WorkerReport(
        64,
        {
            name: ServedModule(ModuleKind.LINEAR, columns, rows, reason if name.endswith(without) else "")
            for name, (rows, columns) in SHAPES.items()
        },
    )


async def test_an_adapter_that_the_workers_cannot_serve_says_so_until_one_can(tmp_path: Path) -> None:
    """Registered before a worker was there to tell: its requests fail for good, by name, and not as "try again"."""
    reports = WorkerReports()
    registry = await open_registry(str(tmp_path / "store"), reports=reports)
    await registry.register("a", files(tmp_path))
    digest = registry.resolve("a").version.digest
    reports.update([served("v_proj")])
    reason = "it changes model.layers.0.self_attn.v_proj, which takes no adapters: it sees only some of the tokens"
    record = registry.get("a")
    assert (record.state, record.state_reason) == (AdapterState.FAILED, reason)
    assert registry.list_part()[0][0] == record
    for ask in (lambda: registry.resolve("a"), lambda: registry.resolve("a", digest)):
        with pytest.raises(AdapterNotServed, match=r"model\.layers\.0\.self_attn\.v_proj, which takes no adapters"):
            ask()
    with pytest.raises(AdapterNotServed, match="v_proj"):
        await registry.activate("a", digest)
    with pytest.raises(InvalidRequest, match="takes no adapters: it sees only some of the tokens"):
        await registry.register("b", files(tmp_path))
    with pytest.raises(InvalidRequest, match="takes no adapters"):
        await registry.register("b", files(tmp_path), validate_only=True)
    reports.update([served("v_proj"), served()])  # one of two workers can
    assert registry.get("a").state is AdapterState.ACTIVE
    assert registry.resolve("a").version.digest == digest
    await registry.register("b", files(tmp_path))
    await registry.close()


async def test_changes_of_an_adapter_that_is_not_served_are_kept(tmp_path: Path) -> None:
    reports = WorkerReports()
    reports.update([served()])
    registry = await open_registry(str(tmp_path / "store"), reports=reports)
    await registry.register("a", files(tmp_path))
    reports.update([served("q_proj")])
    assert (await registry.update("a", display_name="A")).state is AdapterState.FAILED
    reports.update([served()])
    record = registry.get("a")
    assert (record.display_name, record.state, record.state_reason) == ("A", AdapterState.ACTIVE, "")
    assert (await registry.register("a", files(tmp_path))).record.revision == record.revision, "nothing changed"
    await registry.close()


async def test_judging_many_adapters_again_costs_each_a_look_when_it_is_read(tmp_path: Path) -> None:
    """A worker that attaches must not hold up the server: nothing goes over all records then."""
    reports = WorkerReports()
    registry = await open_registry(str(tmp_path / "store"), reports=reports)
    for index in range(3):
        await registry.register(f"a{index}", files(tmp_path, index))
    looks: list[object] = []
    plain = reports.module_error
    reports.module_error = lambda names: looks.append(names) or plain(names)  # type: ignore[method-assign,func-returns-value]
    reports.update([served()])
    assert looks == []
    for _ in range(5):
        assert registry.resolve("a1")
    assert len(looks) == 1
    await registry.close()

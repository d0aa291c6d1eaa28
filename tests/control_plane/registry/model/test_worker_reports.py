"""What is known of the workers while they are attached, when none is, and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.registry.model.served_modules import ModuleKind, ServedModule, WorkerReport
from control_plane.registry.model.worker_reports import WorkerReports

UP = ServedModule(ModuleKind.LINEAR, 4, 8)
ROUTER = ServedModule(ModuleKind.LINEAR, 4, 2, "it sees only some of the tokens")
MODULES = {"layers.0.up": UP, "layers.0.router": ROUTER}


async def test_context_is_the_longest_of_the_workers_and_never_above_the_limit() -> None:
    reports = WorkerReports(limit=100)
    assert reports.max_model_len == 100
    reports.update([WorkerReport(40), WorkerReport(64)])
    assert reports.max_model_len == 64
    reports.update([WorkerReport(40)])
    assert reports.max_model_len == 40
    reports.update([WorkerReport(4000)])
    assert reports.max_model_len == 100


async def test_what_the_last_workers_served_stays_known_when_they_are_gone() -> None:
    reports = WorkerReports(limit=None)
    assert reports.max_model_len is None
    reports.update([WorkerReport(40, MODULES)])
    reports.update([])
    assert reports.max_model_len == 40 and reports.modules == MODULES
    reports.update([WorkerReport(50)])  # a worker that reports no modules
    assert reports.max_model_len == 50 and reports.modules == MODULES


async def test_an_adapter_is_judged_by_its_first_module_that_is_not_served() -> None:
    reports = WorkerReports()
    assert reports.module_error(["anything"]) == ""
    reports.update([WorkerReport(40, MODULES)])
    assert reports.module_error(["layers.0.up"]) == ""
    assert reports.module_error(["layers.0.up", "layers.0.router"]) == (
        "it changes layers.0.router, which takes no adapters: it sees only some of the tokens"
    )
    assert "layers.1.up, and the workers' model has no such module" in reports.module_error(["layers.1.up"])


async def test_changes_counts_the_changes_of_modules_alone() -> None:
    reports = WorkerReports()
    reports.update([WorkerReport(40, MODULES)])
    before = reports.changes
    reports.update([WorkerReport(41, dict(MODULES))])
    assert reports.changes == before
    reports.update([WorkerReport(41, {"layers.0.up": UP})])
    assert reports.changes == before + 1


async def test_a_restart_knows_what_was_served(tmp_path: Path) -> None:
    file = tmp_path / "workers" / "f.json"
    reports = WorkerReports(file, limit=100)
    for length in range(40, 60):
        reports.update([WorkerReport(length, MODULES)])
    await reports.close()
    again = WorkerReports(file, limit=50)
    assert (again.max_model_len, again.modules) == (50, MODULES)
    assert [path.name for path in file.parent.iterdir()] == ["f.json"]


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b'{"format":1}', b"[1]"])
async def test_a_file_that_cannot_be_read_is_as_none(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "f.json"
    if content is not None:
        file.write_bytes(content)
    reports = WorkerReports(file)
    assert reports.max_model_len is None
    assert ("not read" in caplog.text) == (content is not None)


async def test_a_file_that_cannot_be_written_costs_its_memory_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    reports = WorkerReports(tmp_path / "file" / "f.json")
    reports.update([WorkerReport(40, MODULES)])
    await reports.close()
    assert reports.modules == MODULES
    assert "not remembered" in caplog.text

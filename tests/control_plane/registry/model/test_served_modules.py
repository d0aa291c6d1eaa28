"""What several workers serve together, and how it is written down."""

from __future__ import annotations

import json

import pytest

from control_plane.registry.model.served_modules import (
    ModuleKind,
    ServedModule,
    WorkerReport,
    decode_report,
    encode_report,
    joined,
)

UP = ServedModule(ModuleKind.LINEAR, 4, 8)
HEAD = ServedModule(ModuleKind.HEAD, 4, 16)
ROUTER = ServedModule(ModuleKind.LINEAR, 4, 2, "it sees only some of the tokens")
REPORT = WorkerReport(64, {"up": UP, "head": HEAD, "router": ROUTER})


def test_workers_serve_together_what_any_of_them_serves() -> None:
    router = ServedModule(ModuleKind.LINEAR, 4, 2)
    other = WorkerReport(128, {"up": UP, "router": router})
    assert joined([]) is None
    assert joined([REPORT]) == REPORT
    assert joined([REPORT, other]) == joined([other, REPORT]) == WorkerReport(128, {**REPORT.modules, "router": router})


def test_no_module_is_known_if_one_of_the_workers_reports_none() -> None:
    for silent in ([REPORT, WorkerReport(32)], [WorkerReport(32), REPORT], [REPORT, WorkerReport(32), REPORT]):
        assert joined(silent) == WorkerReport(64)


def test_a_report_is_read_back_as_it_was_written() -> None:
    assert decode_report(encode_report(REPORT)) == REPORT


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        encode_report(REPORT).replace(b'"format":1', b'"format":2'),
        encode_report(REPORT).replace(b'"linear"', b'"cubic"'),
        json.dumps({"format": 1, "max_model_len": 3, "modules": {"a": ["linear", 4]}}).encode(),
    ],
)
def test_a_document_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_report(raw)

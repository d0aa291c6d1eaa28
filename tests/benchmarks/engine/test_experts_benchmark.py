"""The benchmark of experts runs and prints a ratio for each number of rows."""

from __future__ import annotations

import pytest

from benchmarks.engine import experts

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 32, "num_experts": 4, "vocab_size": 256}


def test_every_number_of_rows_has_a_ratio(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(experts, "SHAPE", experts.SHAPE | SMALL)
    assert experts.main(["--rows", "1,3", "--adapters", "2", "--steps", "1", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["rows=1", "rows=3"]
    assert all(float(line.rpartition("ratio=")[2]) > 0 for line in lines)

"""The benchmark of the engine runs, and its driver decodes with the rows and adapters that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engine.__main__ import main, parser
from benchmarks.engine.driver import Driver, load_adapters, make_engine
from benchmarks.serving.checkpoints import make_adapters, make_base


@pytest.fixture(autouse=True)
def threads() -> object:
    """Building an engine sets the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_prints_a_row_for_every_kind_of_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model-shape", "tiny", "--rows", "1,3", "--adapters", "0,2", "--prefill-tokens", "20"]
    assert main([*arguments, "--steps", "1", "--threads", "1", "--cache", str(tmp_path)]) == 0
    shown = capsys.readouterr().err
    for name in ("1 rows, 0 adapters", "3 rows, 0 adapters", "3 rows, 2 adapters", "prefill 20, 0 adapters"):
        assert name in shown
    assert "1 rows, 2 adapters" not in shown


def test_rows_decode_with_the_adapters_that_were_loaded(tmp_path: Path) -> None:
    model_dir = make_base("tiny", tmp_path)
    engine = make_engine(model_dir, threads=1, max_rows=5, tokens_per_row=64, arena_bytes=1 << 20, native_code="on")
    load_adapters(engine, model_dir, make_adapters("tiny", 2, tmp_path))
    driver = Driver(engine)
    driver.begin_decodes(5, 2, num_context=20, num_steps=3)
    assert [engine.inspect(row).slot for row in range(5)] == [0, 1, 0, 1, 0]
    driver.decode()
    assert [engine.inspect(row).num_computed for row in range(5)] == [22] * 5
    driver.end()
    driver.prefill(30, 0)
    assert engine.inspect(0).num_computed == 30
    driver.end()
    assert engine.stats().num_rows == 0


def test_a_chart_without_matplotlib_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--out", str(tmp_path / "report.json"), "--cache", str(tmp_path / "cache")]) == 2
    assert not (tmp_path / "cache").exists()


def test_the_defaults_are_the_rows_and_adapters_of_the_report() -> None:
    args = parser().parse_args([])
    assert (args.rows, args.adapters) == ("1,8,32,64,128", "0,1,16,64")

"""The progress of reading a checkpoint is logged, and transformers' bars come back afterwards."""

from __future__ import annotations

import logging

import pytest
from transformers.utils import logging as transformers_logging

from contract import process_log
from data_plane.models.load_progress import logging_progress

logger = logging.getLogger("motet.test_load_progress")


def test_tensors_of_a_checkpoint_are_reported_and_other_bars_stay_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_log, "PROGRESS_EVERY_S", 0.0)
    items = {f"weight{index}": index for index in range(4)}
    with caplog.at_level(logging.INFO), logging_progress(logger):
        assert list(transformers_logging.tqdm(items.items(), desc="Loading weights")) == list(items.items())
        assert list(transformers_logging.tqdm(range(3), desc="Fetching")) == [0, 1, 2]
        bar = transformers_logging.tqdm(items.items(), desc="Loading weights")
        bar.set_postfix({"any": "method"})
        bar.close()
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights done=1 total=4",
        "loading weights done=2 total=4",
        "loading weights done=3 total=4",
    ]
    assert transformers_logging.set_tqdm_hook(None) is None, "the hook of before is back"
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""

"""A checkpoint without tokenizer.json: what the start says about it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from control_plane.api.text import tokenizer_files

FAILS = "import sys; print('ValueError: no backend\\n(1) a file\\n(2) a class', file=sys.stderr); sys.exit(1)"


def test_failed_conversion_is_one_line_and_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The libraries fail with several lines that do not help a user; the server says that text is off."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    command = ([sys.executable, "-c", FAILS], dict(os.environ))
    monkeypatch.setattr(tokenizer_files, "module_command", lambda *_: command)
    with caplog.at_level(logging.INFO):
        tokenizer, reason = tokenizer_files.load_tokenizer(tmp_path, tmp_path / "cache" / "tokenizer.json")
    assert tokenizer is None and reason.startswith("the checkpoint has no tokenizer.json and its tokenizer could not")
    logged = [(record.levelname, record.getMessage(), vars(record).get("shown")) for record in caplog.records]
    assert logged == [
        ("INFO", "converting tokenizer", "converting the checkpoint's tokenizer; this happens once"),
        ("INFO", "tokenizer conversion failed reason=ValueError: no backend (1) a file (2) a class", None),
    ]

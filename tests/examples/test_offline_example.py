"""The example that needs no server, on a small real checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import ROOT
from tests.examples.conftest import EXAMPLES
from tests.makers import make_adapter, make_checkpoint, make_tokenizer


def test_offline_prints_each_prompt_of_base_model_and_adapter(tmp_path: Path) -> None:
    checkpoint = make_tokenizer(make_checkpoint(tmp_path / "model"))
    adapter = make_adapter(tmp_path / "adapter", checkpoint, seed=1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}
    command = [sys.executable, str(EXAMPLES / "offline.py"), str(checkpoint), str(adapter)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    names = [line.split(":")[0] for line in done.stdout.splitlines() if "|" in line]
    assert names == ["base model", "mine"] * 3

"""The program that `make check-clients` runs with several releases of `openai`, with the release of these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.served_api import serve

PROGRAM = Path(__file__).parent / "programs" / "openai_python.py"


def test_every_call_of_the_program_succeeds(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        environment = {**os.environ, **served.environment}
        done = subprocess.run(
            [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=150
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("all passed")

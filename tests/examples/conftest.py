"""One small system for all examples, and which of them can run here.

The Node client needs node and two npm packages. Where they are not installed its test is left out; CI installs them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, System
from tests.makers import make_adapter, make_checkpoint, make_tokenizer

EXAMPLES = ROOT / "examples"
NODE_PACKAGES = EXAMPLES / "node" / "node_modules" / "@grpc"
collect_ignore_glob = [] if shutil.which("node") and NODE_PACKAGES.is_dir() else ["test_node_*.py"]


@dataclass(frozen=True)
class Examples:
    """A running system with the adapters `legal` and `medical`, and a way to run an example against it."""

    system: System
    checkpoint: Path
    adapter_dirs: dict[str, Path]

    def run(self, *command: str, text: str = "", exit_status: int = 0) -> str:
        """What `python examples/COMMAND` prints. `text` is its standard input."""
        return self.run_program(sys.executable, str(EXAMPLES / command[0]), *command[1:], text=text, status=exit_status)

    def run_program(self, *command: str, text: str = "", status: int = 0) -> str:
        """What a program prints that finds the server by MOTET_SERVER."""
        path = os.pathsep.join([str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "MOTET_SERVER": self.system.address, "PYTHONPATH": path}
        # As bytes: the fake model's text may hold carriage returns, which text mode would change.
        done = subprocess.run(command, cwd=ROOT, env=environment, input=text.encode(), capture_output=True, timeout=150)
        printed = (done.stdout + done.stderr).decode()
        assert done.returncode == status, printed
        return printed


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examples]:
    directory = tmp_path_factory.mktemp("examples")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
    adapter_dirs = {
        name: make_adapter(directory / name, checkpoint, rank=4, alpha=8, targets=["q_proj"], seed=seed)
        for seed, name in enumerate(("legal", "medical"))
    }
    with System(checkpoint, directory, control_flags=["--tenants", str(EXAMPLES / "tenants.json")]) as system:
        system.start_hash_worker()
        for name, adapter_dir in adapter_dirs.items():
            system.client().adapters.register(name, adapter_dir)
        yield Examples(system, checkpoint, adapter_dirs)

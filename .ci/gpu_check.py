"""Checks Motet on a CUDA machine with its own torch: every kernel, small generations by the engine and through the
served system, and the kernels' times.

Called by `make gpu-check`. Installs nothing, needs no redis-py. Each part has a budget of seconds, is ended when it is
spent, and leaves the other parts theirs; times come last. Prints tables. Exit status 0 only if there is a GPU and
everything was checked and passed, 75 if all that was checked passed but something was left out, 1 otherwise.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the checks cannot do without, as `import` names it, and what the served system needs beside it.
NEEDED = ("torch", "transformers", "peft", "safetensors", "numpy", "grpc", "google.protobuf", "pytest")
NEEDED_TO_SERVE = (
    "tokenizers",
    "jinja2",
    "prometheus_client",
    "uvloop",
    "google.rpc",
    "google.longrunning",
    "grpc_health",
)
NEEDED_TO_SERVE += ("grpc_reflection",)
GPU_TESTS = ROOT / "tests" / "gpu"
SERVED_TESTS = "test_served_generation.py"
ENGINE_TESTS = ("test_engine_generation.py", "test_fusion.py")
# Seconds of each part. Together below the eight minutes that all of it may take; every other test of tests/gpu is in
# the first part.
BUDGETS_S = {"kernels": 190.0, "engine": 115.0, "served": 70.0, "times": 95.0}
# The table of times begins no row that late before its budget ends, so that it ends by itself.
LAST_ROW_S = 20.0
# Exit status of a part, and of the whole, that passed but left something out; benchmarks.kernels.bench has it too.
# pytest ends with 0 to 5.
INCOMPLETE = 75


@dataclass(frozen=True)
class Outcome:
    """How one part went."""

    part: str
    seconds: float
    status: int | None  # exit status; None where the budget ran out

    @property
    def word(self) -> str:
        if self.status is None:
            return "FAILED: budget spent"
        return {0: "passed", INCOMPLETE: "incomplete"}.get(self.status, f"FAILED: status {self.status}")


def main() -> int:
    missing = [name for name in NEEDED if not is_importable(name)]
    if "torch" in missing:
        print("gpu-check: this Python has no torch; choose another with make gpu-check PYTHON=...")
        return 1
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device here; nothing was checked")
        return 1
    print(f"gpu-check: {torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    if missing:
        print(f"gpu-check: this Python lacks {', '.join(missing)}, which the checks need")
        return 1
    cannot_serve = [name for name in NEEDED_TO_SERVE if not is_importable(name)]
    outcomes = []
    with tempfile.TemporaryDirectory() as tmp:
        for part, files in test_parts(is_served=not cannot_serve).items():
            report = Path(tmp) / f"{part}.xml"
            outcomes.append(run_part(part, pytest_command(files, report)))
            if report.exists():
                print_table(report)
    benchmark = [sys.executable, "-m", "benchmarks.kernels.bench", "--device", "cuda", "--short"]
    outcomes.append(run_part("times", [*benchmark, "--limit-s", str(BUDGETS_S["times"] - LAST_ROW_S)]))
    return conclude(outcomes, cannot_serve)


def conclude(outcomes: Sequence[Outcome], cannot_serve: Sequence[str]) -> int:
    """Say how each part ended and what that makes of the whole; the exit status."""
    print(f"\n{'part':<10} {'seconds':>8} {'budget':>8}  ended")
    for outcome in outcomes:
        print(f"{outcome.part:<10} {outcome.seconds:>8.1f} {BUDGETS_S[outcome.part]:>8.0f}  {outcome.word}")
    if cannot_serve:
        print(f"{'served':<10} {'':>8} {'':>8}  not run: this Python lacks {', '.join(cannot_serve)}")
    if any(outcome.status not in (0, INCOMPLETE) for outcome in outcomes):
        status, word = 1, "FAILED"
    elif cannot_serve or any(outcome.status == INCOMPLETE for outcome in outcomes):
        status, word = INCOMPLETE, "INCOMPLETE: what was checked passed, see above for what was left out,"
    else:
        status, word = 0, "passed"
    print(f"gpu-check: {word} in {sum(outcome.seconds for outcome in outcomes):.0f} s")
    return status


def is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_parts(*, is_served: bool) -> dict[str, list[Path]]:
    """The files of each part: every test file is in one, but for the served generations where they cannot run."""
    by_part: dict[str, list[Path]] = {"kernels": [], "engine": [], "served": []}
    for path in sorted(GPU_TESTS.glob("test_*.py")):
        part = "served" if path.name == SERVED_TESTS else "engine" if path.name in ENGINE_TESTS else "kernels"
        by_part[part].append(path)
    if not is_served:
        del by_part["served"]
    return by_part


def pytest_command(files: Sequence[Path], report: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / ".ci" / "gpu-pytest.ini"), "--rootdir", str(ROOT)]
    # A file that cannot be imported fails alone.
    command.append("--continue-on-collection-errors")
    return [*command, "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *map(str, files)]


def run_part(part: str, command: Sequence[str]) -> Outcome:
    """Run one part in a process group of its own, for its budget at most: what it started ends with it."""
    budget_s = BUDGETS_S[part]
    print(f"\ngpu-check: {part}, at most {budget_s:.0f} s", flush=True)
    begin_s = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
    status: int | None = None
    try:
        status = process.wait(budget_s)
    except subprocess.TimeoutExpired:
        pass  # told by the status
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Outcome(part, time.monotonic() - begin_s, status)


def environment() -> dict[str, str]:
    """Where child processes find the code."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path}


def print_table(report: Path) -> None:
    """One line per test function: cases passed, time, what it recorded."""
    rows: dict[str, list[ElementTree.Element]] = collections.defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").split("[")[0]
        rows[f"{case.get('classname', '').rsplit('.', 1)[-1]}.{name}"].append(case)
    print(f"\n{'check':<72} {'passed':>9} {'seconds':>8}  figures")
    for name, cases in rows.items():
        passed = sum(1 for case in cases if not any(case.findall(tag) for tag in ("failure", "error", "skipped")))
        seconds = sum(float(case.get("time", 0)) for case in cases)
        figures = [f"{item.get('name')}={item.get('value')}" for case in cases for item in case.iter("property")]
        print(f"{name:<72} {passed:>4}/{len(cases):<4} {seconds:>8.1f}  {' '.join(figures)}")


if __name__ == "__main__":
    sys.exit(main())

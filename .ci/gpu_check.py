"""Checks Motet on a CUDA machine with its own torch: every kernel, small generations by the engine and through the
served system, and the kernels' times.

Called by `make gpu-check`. Installs nothing, needs no redis-py. Prints a table; exit status 0 only if
there is a GPU and everything passed.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the checks cannot do without, as `import` names it, and what the served system needs beside it.
NEEDED = ("torch", "transformers", "peft", "safetensors", "numpy", "grpc", "google.protobuf", "pytest")
NEEDED_TO_SERVE = ("tokenizers", "jinja2", "fsspec", "uvloop", "google.rpc", "google.longrunning", "grpc_health")
NEEDED_TO_SERVE += ("grpc_reflection",)
SERVED_TESTS = ROOT / "tests" / "gpu" / "test_served_generation.py"
LIMIT_S = 460.0  # of everything
TESTS_LIMIT_S = 380.0


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
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.xml"
        begin_s = time.monotonic()
        code = run_tests(report, is_served=not cannot_serve)
        if not report.exists():
            print(f"gpu-check: pytest ended with status {code} and wrote no report")
            return code or 1
        print_table(report)
        if cannot_serve:
            print(f"not run: the served generations; this Python lacks {', '.join(cannot_serve)}")
    code = run_benchmark(LIMIT_S - (time.monotonic() - begin_s)) or code
    print(f"gpu-check: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - begin_s:.0f} s")
    return code


def is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def run_tests(report: Path, *, is_served: bool) -> int:
    """pytest's exit status; 1 if it ran past the limit. The served generations only where `is_served`."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / ".ci" / "gpu-pytest.ini"), "--rootdir", str(ROOT)]
    command += ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(ROOT / "tests" / "gpu")]
    command += [] if is_served else [f"--ignore={SERVED_TESTS}"]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(), timeout=TESTS_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"gpu-check: not done after {TESTS_LIMIT_S:.0f} s")
        return 1
    return done.returncode


def run_benchmark(limit_s: float) -> int:
    """The kernels' times in their short form, printed as they come; its exit status, 1 if it ran past the limit."""
    print("\nthe kernels' times", flush=True)
    command = [sys.executable, "-m", "benchmarks.kernels.bench", "--device", "cuda", "--short"]
    try:
        return subprocess.run(command, cwd=ROOT, env=environment(), timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"gpu-check: the benchmark was not done after {limit_s:.0f} s")
        return 1


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

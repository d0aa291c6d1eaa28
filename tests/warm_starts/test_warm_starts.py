"""A forked process is to those that started it what a new one is."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.system import Child
from tests.e2e.harness import wait_until
from tests.warm_starts.processes import WarmStarts, start_warm, warm_starts

PROGRAM = "tests.warm_starts.program"
READY = re.compile(r"ready (?P<said>.*)")


@pytest.fixture(scope="module")
def starts() -> Iterator[WarmStarts]:
    starts = WarmStarts(["decimal"])
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
    starts = WarmStarts(["no_such_module"])
    for _ in range(2):
        with pytest.raises(EOFError):
            child(starts, tmp_path, "exit", "0", SAID="x")
    starts.close()


def test_what_decides_imports_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a process is a new interpreter, which reads the variables itself."""
    assert start_warm.__module__ == warm_starts.__module__
    monkeypatch.setattr("tests.warm_starts.processes.WARM", frozenset({PROGRAM}))
    monkeypatch.setattr("tests.warm_starts.processes.warm_starts", lambda: WarmStarts(["decimal"]))
    usual = {"SAID": "x", "OMP_NUM_THREADS": "1"}
    for variable, is_forked in (
        ({}, True),
        ({"TRITON_CACHE_DIR": "elsewhere"}, False),
        ({"OMP_NUM_THREADS": "2"}, False),
    ):
        process = Child(
            "child", ["-m", PROGRAM, "exit", "0"], tmp_path / "log", environment=usual | variable, start=start_warm
        )
        assert process.wait_ready(READY, 60.0)["said"].endswith(str(is_forked))
        assert exit_code_of(process) == 0

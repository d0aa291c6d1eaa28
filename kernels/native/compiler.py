"""The C compiler: which one there is, what it calls itself, and how sources become one library. No torch."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# A file takes 3 s of a fast core at most. A compiler that takes longer than this hangs.
COMPILE_TIMEOUT_S = 300.0
VERSION_TIMEOUT_S = 10.0
_MAX_MESSAGE = 2000  # characters of what a compiler says

Compiler = Sequence[str]  # the command and flags that come before all others


class CompilerFailed(Exception):
    """The compiler failed; the text is its own output."""


def find_compiler() -> Compiler | None:
    """The command that CC holds, else cc, gcc or clang. None elsewhere than on Linux and macOS."""
    if not sys.platform.startswith(("linux", "darwin")):
        return None
    commands = [["cc"], ["gcc"], ["clang"]]
    if os.environ.get("CC", "").strip():
        try:
            commands = [shlex.split(os.environ["CC"])]
        except ValueError:  # a quotation that does not end
            return None
    return next((command for command in commands if shutil.which(command[0])), None)


def missing_compiler() -> str:
    """One line for people: that there is no compiler, and what to do."""
    looked_for = os.environ.get("CC", "").strip() or "cc, gcc, clang"
    return f"no C compiler ({looked_for}): install gcc or clang, or name one with CC"


def tell_missing_compiler() -> None:
    """Print what `make setup` says where there is no compiler: one line. Else nothing."""
    if find_compiler() is None:
        print(
            f"== {missing_compiler()}. Without one everything works, but a CPU serves several times slower, in plain "
            "torch, and the tests of native code are left out"
        )


def identity_of(compiler: Compiler) -> str:
    """What the compiler says of its version, with the flags of its command. Raises CompilerFailed."""
    said = _run([*compiler, "--version"], VERSION_TIMEOUT_S)
    return "\n".join([*compiler[1:], said])


def compile_library(compiler: Compiler, flags: Sequence[str], sources: Sequence[Path], folder: Path) -> Path:
    """Compile the sources, several at a time, and link them in `folder`. Raises CompilerFailed, OSError."""
    objects = [folder / f"{number}.o" for number in range(len(sources))]
    with ThreadPoolExecutor(_num_cores(), thread_name_prefix="native-compile") as pool:
        jobs = [
            pool.submit(_run, [*compiler, *flags, "-c", str(source), "-o", str(made)], COMPILE_TIMEOUT_S)
            # The largest first: it takes longest.
            for source, made in sorted(zip(sources, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)
        ]
        try:
            for job in jobs:
                job.result()
        finally:  # what has not begun is not needed after a failure
            pool.shutdown(wait=True, cancel_futures=True)
    library = folder / "library.so"
    _run([*compiler, *flags, "-shared", "-pthread", "-o", str(library), *map(str, objects)], COMPILE_TIMEOUT_S)
    return library


def _run(command: Sequence[str], timeout_s: float) -> str:
    """What the command wrote. It gets a process group of its own, since a compiler's own children outlive it."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CompilerFailed(f"{shlex.join(command)} did not end within {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        said = output.read().decode("utf-8", errors="replace").strip()
    if status != 0:
        raise CompilerFailed(f"{shlex.join(command)} ended with status {status}: {_one_line(said)}")
    return said


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_line(said: str) -> str:
    """The text on one line, as long as a log has room for."""
    return " | ".join(line.strip() for line in said.splitlines() if line.strip())[:_MAX_MESSAGE]

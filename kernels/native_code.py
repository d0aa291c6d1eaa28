"""C for the CPU, compiled where it runs: `load` gives a source file of this package as a library.

Compiled once per process, in about a second, into a folder that is gone when the library is loaded: nothing of it can
be stale, torn or another user's. Without a C compiler there is no library, and callers have a way in plain torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

# Sums keep the order that the source gives them, and NaN stays NaN: nothing of -ffast-math but fused multiply-adds.
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
TIMEOUT_S = 120

_is_off = False


def turn_off() -> None:
    """Let nothing be compiled in this process: everything runs in plain torch."""
    global _is_off
    _is_off = True
    load.cache_clear()


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The compiled source, or None, said once in the log, where it cannot be had."""
    compiler = find_compiler()
    if _is_off:
        reason = "it was turned off"
    elif sys.byteorder != "little":
        reason = "this CPU is big-endian"
    elif compiler is None:
        reason = f"no C compiler, CC={os.environ.get('CC', '')}; install gcc or clang"
    else:
        try:
            return _compile(compiler, source)
        except (OSError, subprocess.SubprocessError) as error:
            told = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            logger.warning("native code is off source=%s compiler=%s reason=%s", source.name, compiler, told)
            return None
    logger.info("native code is off source=%s reason=%s", source.name, reason)
    return None


def find_compiler() -> list[str] | None:
    """The command that CC holds, else cc, gcc or clang. None elsewhere than on Linux and macOS."""
    if not sys.platform.startswith(("linux", "darwin")):
        return None
    commands = [shlex.split(os.environ["CC"])] if os.environ.get("CC", "").strip() else [["cc"], ["gcc"], ["clang"]]
    return next((command for command in commands if shutil.which(command[0])), None)


def _compile(compiler: list[str], source: Path) -> ctypes.CDLL:
    """Raises OSError or SubprocessError."""
    with tempfile.TemporaryDirectory(prefix="motet-") as folder:
        library = Path(folder) / f"{source.stem}.so"
        command = [*compiler, *FLAGS, "-shared", "-o", str(library), str(source)]
        environment = {**os.environ, "LC_ALL": "C"}
        subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, env=environment
        )
        return ctypes.CDLL(str(library))

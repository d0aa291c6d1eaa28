"""C for the CPU, compiled where it runs: `load` gives a source file of this package as a library.

Compiled once per machine and compiler into the user's cache folder. Without a C compiler there is none, and callers
have a way in plain torch. MOTET_NATIVE=0 in the environment turns it off.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

# Sums keep the order that the source gives them, and NaN stays NaN: nothing of -ffast-math but fused multiply-adds.
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The compiled source, or None, said once in the log, where it cannot be had."""
    if os.environ.get("MOTET_NATIVE", "1") == "0":
        logger.info("native code is off source=%s reason=MOTET_NATIVE=0", source.name)
        return None
    compiler = find_compiler()
    if compiler is None:
        logger.info("native code is off source=%s reason=no C compiler; install gcc or clang", source.name)
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, source)))
    except (OSError, subprocess.SubprocessError) as error:
        told = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        logger.warning("native code is off source=%s compiler=%s reason=%s", source.name, compiler, told)
        return None


def find_compiler() -> str | None:
    """What CC names, else cc, gcc or clang. None elsewhere than on Linux and macOS."""
    if not sys.platform.startswith(("linux", "darwin")):
        return None
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def openmp_parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP that torch runs its own operators with, or None.

    A second pool of threads would fight with torch's, whose threads spin for a while after each operator.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    mapped = {line[line.find("/") :] for line in maps.read_text().splitlines() if "/" in line}
    for path in sorted(path for path in mapped if "omp" in Path(path).name and ".so" in path):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):  # replaced on disk since it was loaded, or no OpenMP
            continue
    return None


def _compiled(compiler: str, source: Path) -> Path:
    """Path of the library, made if it is not there. Raises OSError or CalledProcessError."""
    macros = _run(
        [compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull]
    )  # the compiler's version and the CPU's features
    key = hashlib.sha256(repr((FLAGS, macros)).encode() + source.read_bytes()).hexdigest()
    folder = _cache_folder()
    library = folder / f"{source.stem}-{key[:32]}.so"
    if not library.exists():
        # Several workers may compile at once: each into a name of its own, and the last one to be done is kept.
        handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            _run([compiler, *FLAGS, "-shared", "-o", made, str(source)])
            Path(made).replace(library)
        finally:
            Path(made).unlink(missing_ok=True)
    return library


def _cache_folder() -> Path:
    """XDG_CACHE_HOME/motet or ~/.cache/motet, the user's alone; a temporary one where that cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "motet"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="motet-"))


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

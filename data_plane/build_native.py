"""`motet worker --build-native`: compile the C for the CPU ahead, for workers without a compiler. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from motet.command_line import Parser

from kernels.native.build import PREBUILT, prebuild
from kernels.native.compiler import CompilerFailed

FLAG = "--build-native"
HELP = f"{FLAG} [--native-cache DIR] alone compiles the C for every CPU of this kind, names the files, and ends."


def is_requested(argv: Sequence[str]) -> bool:
    """Whether a worker's command line is for this command."""
    return FLAG in argv


def run(argv: Sequence[str]) -> int:
    """Compile into the folder, with a line for each file; the process exit code."""
    parser = Parser(prog="motet worker", description="Compile the C for the CPU ahead, for every CPU of this kind.")
    parser.add_argument(FLAG, action="store_true", required=True, help="this command")
    parser.add_argument(
        "--native-cache",
        type=Path,
        default=os.environ.get("MOTET_NATIVE_CACHE") or PREBUILT,
        metavar="DIR",
        help="folder for the libraries (default: MOTET_NATIVE_CACHE, else a folder beside the code)",
    )
    folder = parser.parse_args(argv).native_cache
    try:
        for path in prebuild(Path(folder)):
            print(f"motet worker compiled {path}", flush=True)
    except (CompilerFailed, OSError) as error:
        print(f"{parser.prog}: {FLAG}: {error}", file=sys.stderr)
        return 1
    return 0

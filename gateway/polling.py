"""Which thread of gRPC reads the connections to Motet. Imports nothing of gRPC, which must not be loaded yet.

By default a thread reads a connection and wakes another one for each message of each stream. gRPC's older way reads in
the thread that waits for messages: of the CPU time of a stream's token it takes a third less (benchmarks/LOG.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

# gRPC reads it once, when it is loaded.
VARIABLE, SETTING = "GRPC_EXPERIMENTS", "-event_engine_client"


def choose(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Choose the older way for this process and its children; False where the environment has a choice already."""
    if VARIABLE in environ:
        return False
    environ[VARIABLE] = SETTING
    return True


def begin_again(argv: Sequence[str]) -> NoReturn:
    """Run `python -m gateway ARGV` in the place of this process: one that had loaded gRPC before the choice."""
    # What this process can import: the command `motet` may have found the server's parts beside itself.
    import motet

    roots = [str(Path(__file__).parents[1]), str(Path(motet.__file__).parents[1])]
    path = os.pathsep.join(filter(None, [*dict.fromkeys(roots), os.environ.get("PYTHONPATH", "")]))
    # -P: a folder `gateway` where the command is run is not imported.
    command = [sys.executable, "-P", "-m", "gateway", *argv]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})

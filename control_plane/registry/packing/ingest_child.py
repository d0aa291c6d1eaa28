"""Packs adapters in a process of its own: `python -m control_plane.registry.packing.ingest_child`, run by the pool.

An adapter that takes all memory, or never ends, ends this process and nothing else; and what it computes takes no turn
of the server's interpreter. Standard input is a socket: a frame with the limits comes in, then one for each adapter,
and each gets one frame back. The kernel kills the process by SIGPROF when an adapter takes more CPU time than it may.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from dataclasses import is_dataclass
from enum import Enum
from io import BufferedRWPair, BytesIO
from pathlib import Path, PurePath
from typing import Any

from control_plane.errors import MotetError
from control_plane.registry.companions.packing import pack_whole

HEADER = struct.Struct("<Q")
NICENESS = 10  # streams of tokens go first


class Results(pickle.Unpickler):
    """Reads what a child sent: values of ours only, since the child read what a client sent."""

    def find_class(self, module: str, name: str) -> Any:
        """A dataclass, an error or an enumeration of the control plane, or a path. Raises UnpicklingError."""
        found = getattr(importlib.import_module(module), name, None) if _is_known(module) else None
        is_value = isinstance(found, type) and (
            is_dataclass(found) or issubclass(found, (MotetError, OSError, Enum, PurePath))
        )
        if not is_value:
            raise pickle.UnpicklingError(f"{module}.{name} is not a result of packing")
        return found


def _is_known(module: str) -> bool:
    return module in ("builtins", "pathlib") or module.startswith("control_plane.")


def read_result(frame: bytes) -> Any:
    """What packing returned. Raises what it raised."""
    outcome = Results(BytesIO(frame)).load()
    if "result" in outcome:
        return outcome["result"]
    if "failure" in outcome:
        raise RuntimeError(f"packing an adapter failed: {outcome['failure']}")
    if "memory" in outcome:
        raise MemoryError
    # Not called: constructors of errors take other arguments than those that they keep.
    error = outcome["error"].__new__(outcome["error"], *outcome["args"])
    error.__dict__.update(outcome["state"])
    raise error


def main() -> int:
    """Pack adapters until the server closes the socket, or is gone."""
    with contextlib.suppress(ConnectionError):
        _serve()
    return 0


def _serve() -> None:
    with socket.socket(fileno=sys.stdin.fileno()) as sock, sock.makefile("rwb") as stream:
        limits = pickle.loads(_read(stream) or pickle.dumps({}))
        with contextlib.suppress(OSError):
            os.nice(NICENESS)
        _limit_memory(limits.get("memory_bytes", 0))
        while (request := _read(stream)) is not None:
            job = pickle.loads(request)
            _limit_cpu(job.pop("cpu_s"))
            frame = pickle.dumps(_outcome(job))
            _limit_cpu(0.0)
            stream.write(HEADER.pack(len(frame)) + frame)
            stream.flush()


def _outcome(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": pack_whole(job["files"], job["base_model"], **job["arguments"])}
    except MemoryError:
        return {"memory": True}
    except (MotetError, OSError) as error:
        return {"error": type(error), "args": error.args, "state": error.__dict__}
    except Exception:
        return {"failure": traceback.format_exc()}


def _read(stream: BufferedRWPair[Any, Any]) -> bytes | None:
    """The next frame's bytes; None where the server closed the socket."""
    header = stream.read(HEADER.size)
    return bytes(stream.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


def _limit_memory(num_bytes: int) -> None:
    """Bound what is allocated from here on. Only Linux reports what is in use, and only there the bound holds."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):
        return
    if num_bytes:
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu(seconds: float) -> None:
    """Kill this process by SIGPROF once it used so much CPU time. No bound on Windows, which has no such timer."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    sys.exit(main())

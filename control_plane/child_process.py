"""Child processes of the control plane: started without a fork, waited for on the event loop.

Python's `subprocess` starts them by vfork, which runs no fork handlers. uvloop's `create_subprocess_exec` forks:
gRPC's handlers then run in the child, start threads there, and kill it by SIGSEGV before the program runs
(7 of 40 starts, measured with grpcio 1.85.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from contract.redaction import without_secrets

_ROOT = Path(__file__).resolve().parents[1]


def module_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment that run a module of this installation, from whatever directory."""
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**environment_without_secrets(), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return [sys.executable, "-P", "-m", module, *arguments], environment


def environment_without_secrets() -> dict[str, str]:
    """The environment for a child that needs no secret: without this server's settings and without credentials."""
    return {name: value for name, value in without_secrets(os.environ).items() if not name.startswith("MOTET_")}


class ChildProcess:
    """One running child, in a session of its own: Ctrl-C in a terminal does not reach it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; call this inside a running event loop. Raises OSError where the program cannot be run.

        None for `stderr` means: as this process; for `environment`: as this process, without its secrets.
        """
        environment = environment_without_secrets() if environment is None else environment
        self._popen = subprocess.Popen(
            argv, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
        )
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name=f"wait-{self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._popen.returncode if self._ended.is_set() else None

    async def wait(self) -> int:
        """Its exit status, once it ended."""
        await self._ended.wait()
        return int(self._popen.returncode)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self._popen.kill()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._ended.set)

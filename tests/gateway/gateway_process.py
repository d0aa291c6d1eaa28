"""A gateway as a process of its own, before a running system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from benchmarks.system import Child
from contract.ready_lines import GATEWAY_READY
from tests.secret_scan import ENVIRONMENT, SCAN


class Gateway:
    """`motet gateway`. A context manager; a second `start` uses the port that the first one got."""

    def __init__(self, server: str, work_dir: Path, flags: Sequence[str] = ()) -> None:
        self.address = ""  # HOST:PORT, once started
        self.process: Child
        self._server = server
        self._log = work_dir / "logs" / "gateway.log"
        self._flags = flags

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        listen = self.address or "127.0.0.1:0"
        arguments = ["-m", "motet", "gateway", "--listen", listen, "--server", self._server, *self._flags]
        self.process = Child("gateway", arguments, self._log, environment=ENVIRONMENT)
        self.address = self.process.wait_ready(GATEWAY_READY, 120.0)["listen"]
        SCAN.look_at_arguments(self.process.pid)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        code = self.process.stop()
        SCAN.look_at_files("the log of", [self._log])
        assert code == 0, f"the gateway ended with {code}\n{self.process.log_tail()}"

"""How a process that ends is started again."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.ready_lines import gateway_ready
from gateway.config import GatewayConfig
from gateway.http.server import address_of, bound
from gateway.http.settings import HttpSettings
from gateway.processes.supervisor import FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S, Supervisor, supervise

# It gets ready and ends at once.
ENDS = f"print({gateway_ready('127.0.0.1:1')!r})"


class Clock:
    """Each process runs for `runs_s` of its time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.runs_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.runs_s / 2
        return self.now_s


class Rig:
    """A supervisor of one process, stopped after `most` pauses."""

    def __init__(self, directory: Path, program: str, most: int) -> None:
        (directory / "metrics").mkdir()
        self.clock = Clock()
        self.pauses: list[float] = []
        self._most = most
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        config = GatewayConfig(http=HttpSettings(processes=1, drain_timeout_s=0))
        self.supervisor = Supervisor(
            config, self._listener, directory, command=("-c", program), sleep=self._sleep, clock=self.clock
        )

    async def _sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        if len(self.pauses) == 8:
            self.clock.runs_s = 2 * STEADY_S
        if len(self.pauses) == self._most:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        try:
            return await self.supervisor.run()
        finally:
            self._listener.close()


async def test_pauses_double_up_to_a_bound_and_begin_anew_behind_a_steady_process(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ENDS, 10)
    assert await rig.run() == 0
    doubled = [min(FIRST_PAUSE_S * 2**number, MAX_PAUSE_S) for number in range(8)]
    assert rig.pauses == pytest.approx([*doubled, FIRST_PAUSE_S, FIRST_PAUSE_S])
    assert MAX_PAUSE_S in rig.pauses


async def test_a_process_that_never_gets_ready_is_not_started_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "raise SystemExit(3)", 10)
    assert await rig.run() == 1
    assert rig.pauses == []


async def test_a_process_that_does_not_end_is_killed_and_the_status_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.processes.supervisor.STOP_MARGIN_S", 0.0)
    stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    rig = Rig(tmp_path, f"{stubborn}; {ENDS}; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)", 10)
    assert await rig.run() == 1
    assert rig.pauses == []


async def test_a_signal_that_comes_while_a_process_is_being_started_stops_that_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def start_beside_a_signal(*arguments: str, **settings: Any) -> asyncio.subprocess.Process:
        child = await start(*arguments, **settings)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(20):  # turns of the loop, in which the signal is handled
            await asyncio.sleep(0)
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_beside_a_signal)
    rig = Rig(tmp_path, f"{ENDS}; import time; time.sleep(600)", 10)
    assert await rig.run() == 1  # that process knew nothing of signals yet
    assert rig.pauses == []


def test_a_port_that_processes_of_another_gateway_share_is_not_taken() -> None:
    """Connections would go to the one or the other."""
    with bound(HttpSettings(listen="127.0.0.1:0"), is_shared=True) as other:
        other.listen()
        config = GatewayConfig(http=HttpSettings(listen=address_of(other), processes=2))
        with pytest.raises(OSError, match=r"--listen: 127\.0\.0\.1:\d+ cannot be listened on: Address already in use"):
            supervise(config)


@pytest.mark.parametrize("begun", [b"", pickle.dumps(("settings", "place"))[:-9]], ids=["nothing", "a part"])
def test_a_process_whose_supervisor_ends_before_it_has_settings_ends_without_a_traceback(begun: bytes) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "gateway.processes.child", "127.0.0.1:0"],
        input=begun,
        capture_output=True,
        timeout=120,
    )
    assert (child.returncode, child.stderr) == (1, b"")

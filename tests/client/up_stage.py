"""Stand-ins for the processes that `motet up` starts, and what they reported."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from motet.cli.supervisor import Supervisor

# Each stand-in writes what happens to it into the file events, one word a line.
BEGIN = """
    import os, signal, sys
    events, behaviour = sys.argv[1:3]
    def tell(word, *more):
        with open(events, "a") as file: print(word, os.getpid(), *(more or sys.argv[3:]), file=file)
    def begin(name, *more):
        def stop(number, frame):
            tell(name + "-stopped", *more)
            if behaviour != "stubborn":
                sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        tell(name + "-started")
    def serve(ready):
        print(ready, flush=True)
        while True:
            signal.pause()
"""
CONTROL = """
    begin("control")
    if behaviour == "broken":
        sys.exit("no such model")
    if behaviour == "misused":
        sys.exit(2)
    print("something for people", flush=True)
    serve("motet control-plane ready clients=127.0.0.1:7001 workers=0.0.0.0:7002")
"""
WORKER = """
    begin("worker")
    if behaviour == "broken":
        sys.exit(3)
    serve("motet worker ready worker_id=w0 epoch=1")
"""
GATEWAY = """
    begin("gateway", *sorted(os.environ))
    if behaviour == "broken":
        sys.exit(3)
    serve("motet gateway ready listen=127.0.0.1:7003")
"""


class Stage:
    """The stand-ins' scripts and what they reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = folder / "events"
        self.events.touch()
        for name, source in (("control.py", CONTROL), ("worker.py", WORKER), ("gateway.py", GATEWAY)):
            (folder / name).write_text(textwrap.dedent(BEGIN + source))

    def command(self, name: str, behaviour: str = "normal") -> list[str]:
        return [sys.executable, "-S", str(self.folder / name), str(self.events), behaviour]

    def reported(self) -> list[list[str]]:
        return [line.split() for line in self.events.read_text().splitlines()]

    def words(self) -> list[str]:
        return [line[0] for line in self.reported()]

    def pids(self, word: str) -> list[int]:
        return [int(line[1]) for line in self.reported() if line[0] == word]

    def supervisor(self, *, control: str = "normal", worker: str = "normal", **settings: Any) -> Supervisor:
        return Supervisor(
            control_command=self.command("control.py", control),
            worker_command=lambda address: [*self.command("worker.py", worker), address],
            environment=dict(os.environ),
            drain_timeout_s=20.0,
            **settings,
        )


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Naps:
    """Stands in for sleep: records, then ends the run by a signal at nap `last`."""

    def __init__(self, last: int, clock: list[float]) -> None:
        self.seconds: list[float] = []
        self._last = last
        self._clock = clock

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._clock[0] += seconds
        if len(self.seconds) == self._last:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()  # until the supervisor cancels it


async def when_printed(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """What was printed up to and with `text`, on either stream."""
    seen = ""
    async with asyncio.timeout(30):
        while text not in seen:
            await asyncio.sleep(0.01)
            seen += "".join(capsys.readouterr())
    return seen


async def when_reported(stage: Stage, word: str) -> None:
    """Returns once a child reported `word`."""
    async with asyncio.timeout(30):
        while word not in stage.words():
            await asyncio.sleep(0.01)

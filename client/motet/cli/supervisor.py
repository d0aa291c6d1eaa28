"""Runs a control plane, one worker and an HTTP gateway if wanted as child processes and never leaves one behind.

Worker and gateway are started again when they die; the end of the control plane is the end of everything. The children
tell by one line on standard output that they are ready; their logs go straight to standard error, and this process
writes what it does beside them, in the same form.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from contract.json_log import JsonFormatter
from contract.ready_lines import CONTROL_PLANE_READY, GATEWAY_READY, WORKER_READY
from contract.redaction import without_secrets
from motet.command_line import WRONG_COMMAND_LINE

_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 1 << 20

FIRST_RESTART_S = 0.5
MAX_RESTART_S = 30.0
STEADY_S = 60.0  # a worker that was ready this long starts again at the first delay
STOP_MARGIN_S = 5.0  # what the control plane gets beyond its drain timeout
WORKER_STOP_S = 10.0

_CONTROL, _WORKER, _GATEWAY = "control plane", "worker", "gateway"


class ChildFailed(Exception):
    """A child ended that everything else needs. `exit_code` is what this command ends with."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Child:
    """One child process. `ready` is done with the match once it printed its ready line."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, pattern: re.Pattern[str]) -> None:
        self.name = name
        self.process = process
        self.ready: asyncio.Future[re.Match[str]] = asyncio.get_running_loop().create_future()
        self._pattern = pattern
        self._reader = asyncio.create_task(self._read())

    async def wait(self) -> int:
        """Its exit code, once it ended and everything it printed was read."""
        code = await self.process.wait()
        await self._reader
        return code

    async def wait_ready(self) -> re.Match[str]:
        """Its ready line. Raises ChildFailed if it ends before."""
        ended = asyncio.create_task(self.wait())
        try:
            either: list[asyncio.Future[Any]] = [ended, self.ready]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.ready.done():
                return self.ready.result()
            code = ended.result()
            # It said itself why, on the standard error that it shares with this process.
            raise ChildFailed(
                f"the {self.name} did not start ({describe(code)}); the reason is above",
                exit_code=code if code == WRONG_COMMAND_LINE else 1,
            )
        finally:
            ended.cancel()

    async def stop(self, bound_s: float) -> None:
        """SIGTERM, then SIGKILL for it and what it started if it is still there after `bound_s`."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                async with asyncio.timeout(bound_s):
                    await self.process.wait()
            except TimeoutError:
                self.kill()
        await self.wait()

    def kill(self) -> None:
        """SIGKILL for it and its process group, which is its own."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        assert self.process.stdout is not None, "started with a pipe"
        async for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            match = self._pattern.match(text)
            if match is None:
                print(text, file=sys.stderr, flush=True)
            elif not self.ready.done():
                self.ready.set_result(match)


class _Announce(Protocol):
    def __call__(self, match: re.Match[str], *, is_first: bool) -> None: ...


class Supervisor:
    """Starts, watches and stops them. One use."""

    def __init__(
        self,
        *,
        control_command: Sequence[str],
        worker_command: Callable[[str], Sequence[str]],  # given the address to attach to
        environment: dict[str, str],
        drain_timeout_s: float,
        gateway_command: Callable[[str], Sequence[str]] | None = None,  # given the address of the control plane
        worker_stop_s: float = WORKER_STOP_S,
        log_format: str = "text",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control_command = control_command
        self._worker_command = worker_command
        self._gateway_command = gateway_command
        self._environment = environment
        self._drain_timeout_s = drain_timeout_s
        self._worker_stop_s = worker_stop_s
        self._json = JsonFormatter("motet up") if log_format == "json" else None
        self._sleep = sleep
        self._clock = clock
        self._children: dict[str, _Child] = {}  # by name, the latest of each
        self._stop_requested = asyncio.Event()

    async def run(self) -> int:
        """Runs until SIGINT, SIGTERM or SIGHUP (exit code 0) or until something ends that should not (1).

        A child that did not start because its command line is wrong gives 2.
        """
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        work = asyncio.create_task(self._run_all())
        stop = asyncio.create_task(self._stop_requested.wait())
        failure: ChildFailed | OSError | None = None
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return 0
            work.result()
            raise AssertionError("_run_all ends by an error only")
        except (ChildFailed, OSError) as error:
            failure = error
            return error.exit_code if isinstance(error, ChildFailed) else 1
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            await self._stop_children()
            if failure is not None:  # last, below what the other child said when it was stopped
                self._log(str(failure))
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        """The first one stops in order, the second at once."""
        if self._stop_requested.is_set():
            for child in self._children.values():
                child.kill()
        else:
            self._log("stopping; once more to stop at once")
            self._stop_requested.set()

    async def _run_all(self) -> None:
        control = await self._start(_CONTROL, self._control_command, CONTROL_PLANE_READY)
        ready = await control.wait_ready()
        clients, workers = ready["clients"], _reachable(ready["workers"])

        def worker_ready(match: re.Match[str], *, is_first: bool) -> None:
            worker_id = match["worker_id"]
            if is_first:
                print(f"motet ready: clients at {clients}, worker {worker_id} attached to {workers}", flush=True)
            else:
                self._log(f"worker {worker_id} attached again")

        def gateway_ready(match: re.Match[str], *, is_first: bool) -> None:
            if is_first:
                print(f"motet ready: HTTP at {match['listen']}", flush=True)
            else:
                self._log(f"the gateway is at {match['listen']} again")

        keeping = [self._keep(_WORKER, self._worker_command(workers), WORKER_READY, worker_ready)]
        if self._gateway_command is not None:
            command = self._gateway_command(_reachable(clients))
            keeping.append(self._keep(_GATEWAY, command, GATEWAY_READY, gateway_ready))
        keepers = [asyncio.create_task(keep) for keep in keeping]
        ended = asyncio.create_task(control.wait())
        try:
            await asyncio.wait({*keepers, ended}, return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
            raise ChildFailed(f"the control plane ended with {describe(ended.result())}")
        finally:
            for task in (*keepers, ended):
                task.cancel()
            await asyncio.gather(*keepers, ended, return_exceptions=True)

    async def _keep(self, name: str, command: Sequence[str], pattern: re.Pattern[str], announce: _Announce) -> None:
        """Keeps one child running. Raises ChildFailed if the first one never gets ready: its flags are wrong then."""
        delay_s = FIRST_RESTART_S
        is_first = True
        while True:
            child = await self._start(name, command, pattern)
            ready_s: float | None = None
            try:
                match = await child.wait_ready()
                ready_s = self._clock()
                announce(match, is_first=is_first)
                is_first = False
            except ChildFailed:
                if is_first:
                    raise
            code = await child.wait()
            if ready_s is not None and self._clock() - ready_s >= STEADY_S:
                delay_s = FIRST_RESTART_S
            self._log(f"the {name} ended with {describe(code)}; starting it again in {delay_s:g} s")
            await self._sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_RESTART_S)

    async def _start(self, name: str, command: Sequence[str], pattern: re.Pattern[str]) -> _Child:
        # A gateway hands on its clients' keys. It needs none itself, and it is what strangers talk to.
        environment = without_secrets(self._environment) if name == _GATEWAY else self._environment
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches this process only, which stops the children in order
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self._children[name] = child = _Child(name, process, pattern)
        return child

    def _log(self, text: str) -> None:
        """One line about a child, and no other one: no part of `text` is a client's."""
        line = f"motet up: {text}"
        if self._json is not None:
            record = {"name": "motet.up", "levelno": logging.INFO, "levelname": "INFO", "msg": text}
            line = self._json.format(logging.makeLogRecord(record))
        print(line, file=sys.stderr, flush=True)

    async def _stop_children(self) -> None:
        """The gateway first, whose requests finish; then the control plane, whose streams finish on the worker."""
        drain_s = self._drain_timeout_s + STOP_MARGIN_S
        for name, bound_s in ((_GATEWAY, drain_s), (_CONTROL, drain_s), (_WORKER, self._worker_stop_s)):
            if (child := self._children.get(name)) is not None:
                await child.stop(bound_s)


def describe(exit_code: int) -> str:
    """An exit code for people."""
    if exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"


def _die_with_parent(parent_pid: int) -> Callable[[], None] | None:
    """A call that makes Linux send the child SIGTERM when this process dies, however it dies; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)

    return in_child


def _reachable(address: str) -> str:
    """An address to dial for one that is listened on: any interface becomes the loopback one."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}"}.get(host, address)

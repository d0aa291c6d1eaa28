"""A redis-server as the embedded one, but one that permits `INFO memory`: the embedded one lets nobody read that."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from control_plane.host_cache.embedded import START_TIMEOUT_S, find_redis_server

_PAUSE_S = 0.02


class PlainRedis:
    """A context manager. On a Unix socket, nothing on disk."""

    def __init__(self, directory: Path) -> None:
        socket = directory / "redis.sock"
        self.url = f"unix://{socket}"
        self._client = redis.Redis.from_url(self.url)
        self._command = [
            str(find_redis_server()),
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--unixsocketperm",
            "700",
        ]
        self._command += ["--save", "", "--appendonly", "no", "--maxmemory", "0", "--dir", str(directory)]
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        end_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self._client.ping()
                return self
            except redis.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    self._process.kill()
                    raise
            time.sleep(_PAUSE_S)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def held_bytes(self) -> float:
        """What it holds by its own count: keys, values, and buffers of its clients."""
        return float(self._client.info("memory")["used_memory"])

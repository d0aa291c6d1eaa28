"""Fixtures of the host cache's tests."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control_plane.host_cache.rig import FakeStore, RedisProcess


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def redis_process() -> Iterator[RedisProcess]:
    with tempfile.TemporaryDirectory(prefix="motet-t-") as directory:
        process = RedisProcess(Path(directory))
        yield process
        process.signal(signal.SIGCONT)
        process.kill()

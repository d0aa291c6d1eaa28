"""Fixtures of the host cache's tests."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from contract.redis_access import RedisAccess
from control_plane.host_cache.redis_cache import RedisHostCache
from control_plane.host_cache.weights import AdapterWeights
from tests.control_plane.host_cache.rig import BUDGET, Clock, FakeStore, RedisProcess, make_weights


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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def cache(redis_process: RedisProcess, clock: Clock) -> AsyncIterator[RedisHostCache]:
    # The time limit holds on a busy machine too.
    made = RedisHostCache(
        RedisAccess(url=redis_process.url), budget_bytes=BUDGET, call_timeout_s=20.0, clock=clock, seed=1
    )
    await made.check()
    yield made
    await made.close()


@pytest.fixture
def weights(cache: RedisHostCache, store: FakeStore) -> AdapterWeights:
    return make_weights(cache, store)

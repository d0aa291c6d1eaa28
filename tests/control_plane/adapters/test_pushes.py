"""The order in which a pushed version comes to workers, requests, host cache and store, and what a failure leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from control_plane.adapters.life_cycle import Registration
from control_plane.adapters.pushes import Pushed, Pushes
from control_plane.errors import StoreUnavailable
from control_plane.registry.records import Registered
from tests.control_plane.api.fake_adapters import DIGEST, adapter_record, adapter_version


class Parts:
    """Everything that a push calls. Notes the order."""

    def __init__(self, *, num_workers: int, store_fails: bool = False, cache_fails: bool = False) -> None:
        self.order: list[str] = []
        self.cached, self.is_held = asyncio.Event(), asyncio.Event()
        self.is_held.set()
        self._workers = [object()] * num_workers
        self._store_fails, self._cache_fails = store_fails, cache_fails
        self.preloads = self

    # ---- fleet ----

    def choose_workers(self, _digest: str) -> list[object]:
        return self._workers

    def cancel_unload(self, _digest: str) -> None:
        return

    async def preload(self, _ref: object, _tenant: str, workers: list[object]) -> list[str]:
        self.order.append("loaded")
        return ["w"] * len(workers)

    # ---- weights ----

    @contextlib.contextmanager
    def fresh(self, _blob: object) -> Iterator[None]:
        yield
        self.order.append("files are gone")

    async def cache_fresh(self, _blob: object) -> None:
        await self.is_held.wait()
        if self._cache_fails:
            raise OSError("the disk")
        self.order.append("cached")
        self.cached.set()

    async def drop(self, _digest: str) -> None:
        self.order.append("dropped")

    # ---- registry, life cycle ----

    def find(self, _name: str) -> None:
        return None

    def is_named(self, _digest: str) -> bool:
        return False

    async def register(self, _registration: object, _files: object, *, publish: Any, inherited: object) -> Registered:
        packed = SimpleNamespace(digest=DIGEST, manifest=b"", chunks=(), arena_bytes=1)
        async with publish(packed):
            self.order.append("visible")
            if self._store_fails:
                await asyncio.sleep(0)  # the cache is being written
                raise StoreUnavailable("the store is away")
            if self.is_held.is_set() and not self._cache_fails:
                await self.cached.wait()
            self.order.append("stored")
        return Registered(DIGEST, adapter_record("poet", (adapter_version(DIGEST, number=1),), DIGEST), None)


async def push(parts: Parts) -> Pushed:
    fake = cast("Any", parts)
    pushes = Pushes(base_model=fake, registry=fake, life_cycle=fake, weights=fake, fleet=fake)
    return await pushes.push(Registration(adapter_id="poet"), {})


async def test_a_version_for_one_worker_is_visible_before_it_is_cached() -> None:
    parts = Parts(num_workers=1)
    pushed = await push(parts)
    assert parts.order == ["loaded", "visible", "cached", "stored", "files are gone"]
    assert pushed.worker_ids == ("w",)


async def test_several_workers_load_from_the_cache() -> None:
    parts = Parts(num_workers=2)
    await push(parts)
    assert parts.order[:3] == ["cached", "loaded", "visible"]


async def test_a_version_that_is_not_stored_is_not_cached_later() -> None:
    parts = Parts(num_workers=1, store_fails=True)
    parts.is_held.clear()
    with pytest.raises(StoreUnavailable):
        await push(parts)
    parts.is_held.set()
    await asyncio.sleep(0)
    assert parts.order == ["loaded", "visible", "dropped"]


async def test_a_push_whose_version_cannot_be_cached_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(num_workers=1, cache_fails=True)
    assert (await push(parts)).registered.digest == DIGEST
    assert parts.order == ["loaded", "visible", "stored", "files are gone"]
    assert f"pushed version not cached digest={DIGEST} error=the disk" in caplog.text

"""A store that hangs: who waits gets an error, other names go on, and what was begun is made to its end in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.errors import StoreUnavailable
from control_plane.registry.changes import Changes
from control_plane.registry.registry import Registry
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.store_calls import StoreCalls
from tests.control_plane.registry.rig import files, open_registry

TIMEOUT_S = 3.0  # calls that do not hang take less, also on a busy machine


class HangingFiles(DirectoryStore):
    """Writes of one file hang until `is_back`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_back = threading.Event()
        self.hung_path = ""
        self.written: list[bytes] = []

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        self._hang(key, content)
        return super().put_if_absent(key, content)

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
        self._hang(key, content)
        return super().replace_if_match(key, content, tag)

    def _hang(self, key: str, content: bytes | Path) -> None:
        if key == self.hung_path:
            assert self.is_back.wait(120)
            assert isinstance(content, bytes)
            self.written.append(content)


@pytest.fixture
def storage(tmp_path: Path) -> HangingFiles:
    return HangingFiles(tmp_path / "store")


@pytest.fixture
async def registry(storage: HangingFiles) -> AsyncIterator[Registry]:
    opened = await open_registry(storage, calls=StoreCalls(timeout_s=TIMEOUT_S))
    yield opened
    storage.is_back.set()
    await opened.close()


async def ended(registry: Registry) -> None:
    while registry.stats().num_changes:
        await asyncio.sleep(0)


async def test_a_change_that_hangs_is_reported_and_made_to_its_end(
    registry: Registry, storage: HangingFiles, tmp_path: Path
) -> None:
    await registry.register("a", files(tmp_path, 1))
    storage.hung_path = "adapters/a.json"
    with pytest.raises(StoreUnavailable, match="the change may still be made"):
        await registry.update("a", display_name="first")
    assert registry.get("a").display_name == ""
    # Nothing of this name until the first change has ended: the store could keep the older of the two.
    with pytest.raises(StoreUnavailable, match="an earlier change waits"):
        await registry.update("a", display_name="second")
    # Another name goes on.
    assert (await registry.register("b", files(tmp_path, 2))).record.active_digest
    storage.is_back.set()
    await ended(registry)
    assert registry.get("a").display_name == "first"
    assert (await registry.update("a", display_name="third")).display_name == "third"
    assert [b'"third"' in data for data in storage.written] == [False, True]


async def test_a_registration_that_hangs_lets_its_caller_go(
    registry: Registry, storage: HangingFiles, tmp_path: Path
) -> None:
    storage.hung_path = "adapters/a.json"
    waiting = asyncio.ensure_future(registry.register("a", files(tmp_path, 1)))
    with pytest.raises(StoreUnavailable):
        await waiting
    cancelled = asyncio.ensure_future(registry.register("b", files(tmp_path, 2)))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    storage.is_back.set()
    await ended(registry)
    assert registry.resolve("a")


async def test_closing_does_not_wait_for_a_store_that_hangs(
    storage: HangingFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = StoreCalls(timeout_s=TIMEOUT_S)
    registry = await open_registry(storage, calls=calls)
    await registry.register("a", files(tmp_path, 1))
    storage.hung_path = "adapters/a.json"
    with pytest.raises(StoreUnavailable):
        await registry.update("a", display_name="x")
    close = Changes.close
    monkeypatch.setattr(Changes, "close", lambda self: close(self, timeout_s=0.05))
    await registry.close()
    # The lock stays with the process: the change may still come.
    with pytest.raises(OSError, match="in use"):
        DirectoryStore(storage.root).fence.lock()
    storage.is_back.set()
    await ended(registry)
    storage.fence.close()

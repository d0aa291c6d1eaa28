"""A registry over local files, and one over an object store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.registry.registry import Registry
from control_plane.registry.store.open_store import open_store
from control_plane.registry.store.store import FencedStore
from tests.control_plane.registry.rig import open_registry


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> FencedStore:
    return open_store(str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}")


@pytest.fixture
async def registry(storage: FencedStore) -> AsyncIterator[Registry]:
    opened = await open_registry(storage)
    yield opened
    await opened.close()

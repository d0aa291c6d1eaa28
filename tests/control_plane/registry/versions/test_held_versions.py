"""Versions that are held: none is active until somebody activates one, over a restart too."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.errors import AdapterNotActive, AdapterVersionActive
from control_plane.registry.records import NONE_ACTIVE, AdapterState
from control_plane.registry.versions.rollout import VersionRollout
from tests.control_plane.registry.rig import files, open_registry

HELD = VersionRollout(is_held=True)


async def test_a_held_first_version_is_not_active_until_it_is_activated(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    registry = await open_registry(store)
    digest = (await registry.register("a", files(tmp_path, 1), rollout=HELD)).digest
    for _ in range(2):
        record = registry.get("a")
        assert (record.state, record.state_reason, record.active_version) == (AdapterState.FAILED, NONE_ACTIVE, None)
        with pytest.raises(AdapterNotActive, match="no version is active"):
            registry.resolve("a")
        assert registry.resolve("a", digest).version.digest == digest
        with pytest.raises(AdapterVersionActive, match="the only one"):
            await registry.begin_delete_version("a", digest)
        await registry.close()
        registry = await open_registry(store)
    assert (await registry.activate("a", digest)).state is AdapterState.ACTIVE
    assert registry.resolve("a").version.digest == digest
    await registry.close()


async def test_a_held_version_leaves_the_active_one_and_a_plain_one_takes_its_place(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    held = (await registry.register("a", files(tmp_path, 1), rollout=HELD)).digest
    again = await registry.register("a", files(tmp_path, 2), rollout=HELD)
    assert again.record.active_digest == "" and again.record.last_number == 2
    plain = (await registry.register("a", files(tmp_path, 3))).digest
    assert registry.resolve("a").version.digest == plain
    await registry.register("a", files(tmp_path, 1), rollout=HELD)
    assert registry.resolve("a").version.digest == plain != held
    await registry.close()

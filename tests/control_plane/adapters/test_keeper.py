"""What the server deletes by itself: expired names, and versions beyond those that are kept. Over a real registry."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.adapters.keeper import RETRY_S, Keeper
from control_plane.adapters.life_cycle import AdapterLifeCycle, Registration
from control_plane.adapters.operations import OperationStore
from control_plane.errors import AdapterNotFound, AdapterVersionHeld, MotetError, NoFormerVersion, StoreUnavailable
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.records import AdapterRecord
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.versions.record_changes import RolloutChange
from control_plane.registry.versions.rollout import Canary, VersionRollout
from tests.control_plane.api.fake_adapters import FakeWeights
from tests.control_plane.api.fakes import FakeFleet
from tests.control_plane.registry.rig import CALLS, base_model, files


class Kept:
    """A registry with a keeper and a clock that stands still."""

    def __init__(self, registry: Registry, tmp_path: Path) -> None:
        self.registry, self.tmp_path = registry, tmp_path
        self.operations = OperationStore()
        self.life_cycle = AdapterLifeCycle(
            registry=registry, weights=FakeWeights([]), fleet=FakeFleet([]), operations=self.operations
        )
        self.in_use: set[str] = set()
        self.now_s = CLOCK.now_s
        self.keeper = Keeper(registry, self.life_cycle, self.in_use.__contains__, clock=CLOCK)

    async def add(self, seed: int, adapter_id: str = "a", **rollout: object) -> str:
        way = VersionRollout(**rollout)  # type: ignore[arg-type]
        registered = await self.life_cycle.register(Registration(adapter_id, rollout=way), files(self.tmp_path, seed))
        return registered.digest

    async def tick(self) -> None:
        """Let the keeper look, and its deletions end."""
        await self.keeper.tick()
        for operation in self.operations.page(1000, "")[0]:
            assert await operation.wait(30) and operation.error is None

    def digests(self, adapter_id: str = "a") -> list[str]:
        return [version.digest for version in self.registry.get(adapter_id).versions]


class Enough(Exception):
    """Ends the keeper's loop."""


class Clock:
    """Stands still until a test moves it."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()


async def opened(tmp_path: Path) -> Registry:
    return await Registry.open(
        store=ArtifactStore(str(tmp_path / "store")),
        base_model=base_model(),
        calls=CALLS,
        max_adapter_bytes=1 << 20,
        reports=WorkerReports(),
        clock=CLOCK,
    )


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    CLOCK.now_s = 1000.0
    registry = await opened(tmp_path)
    yield Kept(registry, tmp_path)
    await registry.close()


async def test_only_the_newest_versions_are_kept(kept: Kept) -> None:
    digests = [await kept.add(seed, keep_versions=2) for seed in range(4)]
    await kept.tick()
    assert kept.digests() == digests[:1:-1]
    with pytest.raises(AdapterNotFound):
        kept.registry.resolve("a", digests[0])
    assert not ArtifactStore(str(kept.tmp_path / "store")).has_blob(digests[0])


async def test_versions_that_something_needs_stay_until_nothing_does(kept: Kept) -> None:
    labelled, canary, used, spare, former, active = [await kept.add(seed) for seed in range(6)]
    change = RolloutChange(version_labels={"stable": labelled}, canary=Canary(canary, 10), keep_versions=1)
    kept.in_use.add(used)
    await kept.registry.update("a", rollout=change)
    await kept.tick()
    assert kept.digests() == [active, former, used, canary, labelled] and spare not in kept.digests()
    kept.in_use.clear()
    await kept.tick()
    assert kept.digests() == [active, former, canary, labelled]
    await kept.registry.update("a", rollout=RolloutChange(version_labels={}, ends_canary=True))
    await kept.tick()
    assert kept.digests() == [active, former]  # a rollback would take it


async def test_an_expired_adapter_is_deleted_by_the_server(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    digest = await kept.add(0, ttl_s=60.0)
    await kept.add(0, "b", ttl_s=50.0)
    await kept.registry.update("b", rollout=RolloutChange(expire_time_s=5000.0))
    await kept.add(1, "c", ttl_s=50.0)
    await kept.registry.update("c", rollout=RolloutChange(ends_expiry=True))
    await kept.tick()
    assert kept.registry.resolve("a").version.digest == digest
    CLOCK.now_s += 60.0
    with caplog.at_level(logging.INFO, logger="motet.audit"):
        await kept.tick()
    [line] = [record.getMessage() for record in caplog.records if record.name == "motet.audit"]
    assert "action=adapter.delete resource=adapters/a" in line and "principal=server" in line
    with pytest.raises(AdapterNotFound):
        kept.registry.get("a")
    assert kept.registry.resolve("b") and kept.registry.resolve("c")


async def test_an_expiry_survives_a_restart(kept: Kept) -> None:
    await kept.add(0, ttl_s=60.0)
    await kept.registry.close()
    CLOCK.now_s += 100.0
    registry = await opened(kept.tmp_path)
    again = Kept(registry, kept.tmp_path)
    with pytest.raises(AdapterNotFound, match="expired"):
        registry.resolve("a")
    rounds = 0

    async def wait(_event: object, _timeout_s: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            raise Enough

    again.keeper = Keeper(registry, again.life_cycle, again.in_use.__contains__, clock=CLOCK, wait=wait)
    with pytest.raises(Enough):
        await again.keeper.run()
    for operation in again.operations.page(10, "")[0]:
        await operation.wait(30)
    with pytest.raises(AdapterNotFound, match="does not exist"):
        registry.get("a")
    await registry.close()


async def test_a_deletion_that_fails_is_tried_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    await kept.add(0, ttl_s=60.0)
    digests = [await kept.add(seed, "b", keep_versions=1) for seed in range(1, 4)]

    async def broken(*_arguments: object, **_more: object) -> None:
        raise StoreUnavailable("away")

    CLOCK.now_s += 60.0
    with monkeypatch.context() as patch:
        patch.setattr(kept.life_cycle, "delete", broken)
        patch.setattr(kept.life_cycle, "delete_version", broken)
        await kept.tick()
    assert kept.registry.get("a") and len(kept.digests("b")) == 3
    await kept.tick()
    assert kept.registry.get("a") and kept.digests("b") == digests[:0:-1]
    CLOCK.now_s += RETRY_S
    await kept.tick()
    with pytest.raises(AdapterNotFound):
        kept.registry.get("a")


@pytest.mark.parametrize("seed", range(3))
async def test_random_walk_over_rollouts_keeps_every_promise(kept: Kept, seed: int) -> None:
    """Register, activate, roll back, label, canary, delete, keep: nothing that is needed is ever gone."""
    choices = random.Random(seed)
    known: list[str] = []
    for _ in range(120):
        record: AdapterRecord | None = kept.registry.find("a")
        digests = [version.digest for version in record.versions] if record else []
        one = choices.choice(digests) if digests else ""
        try:
            match choices.randrange(8) if record else 0:
                case 0 | 1:
                    is_active_kept = choices.random() < 0.3
                    known.append(await kept.add(choices.randrange(20), is_active_kept=is_active_kept))
                case 2:
                    await kept.registry.activate("a", one)
                case 3:
                    await kept.registry.roll_back("a")
                case 4:
                    labels = {f"l{number}": choices.choice(digests) for number in range(choices.randrange(3))}
                    await kept.registry.update("a", rollout=RolloutChange(version_labels=labels))
                case 5:
                    ends = choices.random() < 0.5
                    canary = None if ends else Canary(one, choices.randrange(1, 1001))
                    await kept.registry.update("a", rollout=RolloutChange(canary=canary, ends_canary=ends))
                case 6:
                    await kept.life_cycle.delete_version("a", one)
                case 7:
                    await kept.registry.update("a", rollout=RolloutChange(keep_versions=choices.randrange(5)))
        except (AdapterVersionHeld, NoFormerVersion) as error:
            assert error.reason
        except MotetError as error:
            assert error.reason in ("VERSION_ACTIVE", "FIELD_INVALID"), error
        kept.in_use.clear()
        kept.in_use.update(choice for choice in known if choices.random() < 0.1)
        await kept.tick()
        check(kept)
    await kept.registry.close()
    again = await opened(kept.tmp_path)
    assert again.get("a") == kept.registry.get("a")
    await again.close()


def check(kept: Kept) -> None:
    record = kept.registry.get("a")
    digests = [version.digest for version in record.versions]
    rollout, store = record.rollout, ArtifactStore(str(kept.tmp_path / "store"))
    assert record.active_digest in digests and all(store.has_blob(digest) for digest in digests)
    assert set(rollout.version_labels.values()) <= set(digests) and set(rollout.previous_digests) <= set(digests)
    assert rollout.canary is None or rollout.canary.digest in set(digests) - {record.active_digest}
    assert record.active_digest not in rollout.previous_digests
    assert set(rollout.excess(digests, record.active_digest)) <= kept.in_use
    for key in ("x", "y"):
        assert kept.registry.resolve("a", key=key).version.digest in digests

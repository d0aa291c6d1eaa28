"""Versions by number, label and share; staged registration; the way back by compare-and-set."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.checks import Violations
from control_plane.errors import (
    AdapterNotFound,
    AdapterVersionHeld,
    EtagMismatch,
    InvalidRequest,
    NoFormerVersion,
)
from control_plane.registry.registry import Registry
from control_plane.registry.versions.record_changes import RolloutChange
from control_plane.registry.versions.rollout import Canary, VersionRollout
from control_plane.registry.versions.version_names import VersionName, version_name_of
from tests.control_plane.registry.rig import files, open_registry

KEYS = [f"user-{number}" for number in range(300)]


async def registered(registry: Registry, tmp_path: Path, *seeds: int, **rollout: object) -> list[str]:
    """The digests of versions of "a", one for each seed."""
    way = VersionRollout(**rollout)  # type: ignore[arg-type]
    return [(await registry.register("a", files(tmp_path, seed), rollout=way)).digest for seed in seeds]


def shares(registry: Registry) -> dict[str, set[str]]:
    """The keys that get each version."""
    found: dict[str, set[str]] = {}
    for key in KEYS:
        found.setdefault(registry.resolve("a", key=key).version.digest, set()).add(key)
    return found


async def test_requests_name_a_version_by_number_or_label(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    first, second = await registered(registry, tmp_path, 1, 2)
    await registry.update("a", rollout=RolloutChange(version_labels={"stable": first}))
    assert registry.resolve("a").version.digest == second
    assert registry.resolve("a", selector="1").version.digest == first
    assert registry.resolve("a", selector="2").version.digest == second
    assert registry.resolve("a", selector="stable").version.digest == first
    for missing in ("3", "canary"):
        with pytest.raises(AdapterNotFound, match=missing):
            registry.resolve("a", selector=missing)
    await registry.close()
    again = await open_registry(str(tmp_path / "store"))
    assert again.resolve("a", selector="stable").version.digest == first
    await again.close()


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("a", VersionName("a")),
        ("adapters/a", VersionName("a")),
        ("a@7", VersionName("a", "7")),
        ("adapters/a.b@stable", VersionName("a.b", "stable")),
    ],
)
def test_names_are_parsed(name: str, parsed: VersionName) -> None:
    violations = Violations()
    assert version_name_of(name, "", "adapter", violations) == parsed and not violations


@pytest.mark.parametrize("name", ["a@", "@1", "a@0", "a@01", "a@1@2", "a@-1", "a@1234567890", "a@Up", "a@x.y", "A@1"])
def test_bad_names_of_versions_are_refused(name: str) -> None:
    violations = Violations()
    version_name_of(name, "", "adapter", violations)
    with pytest.raises(InvalidRequest, match="adapter"):
        violations.raise_if_any()


def test_a_name_with_a_version_and_a_digest_is_refused() -> None:
    violations = Violations()
    version_name_of("a@1", "0" * 64, "adapter", violations)
    with pytest.raises(InvalidRequest, match="give one of them"):
        violations.raise_if_any()


async def test_a_staged_version_gets_no_requests_until_it_is_the_canary(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    (first,) = await registered(registry, tmp_path, 1, is_active_kept=True)  # a name's first version is active
    (second,) = await registered(registry, tmp_path, 2, is_active_kept=True, labels=("next",))
    assert shares(registry).keys() == {first}
    assert registry.resolve("a", selector="next").version.digest == second
    await registry.update("a", rollout=RolloutChange(canary=Canary(second, 250)))
    few = shares(registry)[second]
    assert 40 < len(few) < 110
    await registry.update("a", rollout=RolloutChange(canary=Canary(second, 500)))
    assert few < shares(registry)[second]
    (third,) = await registered(registry, tmp_path, 3, canary_per_mille=1000)
    assert shares(registry) == {third: set(KEYS)}
    await registry.update("a", rollout=RolloutChange(ends_canary=True))
    assert shares(registry) == {first: set(KEYS)}


async def test_promoting_the_canary_ends_it_and_rolling_back_returns(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    (first,) = await registered(registry, tmp_path, 1)
    (second,) = await registered(registry, tmp_path, 2, canary_per_mille=10)
    promoted = await registry.activate("a", second, expected_digest=first)
    assert promoted.rollout.canary is None and promoted.rollout.previous_digests == (first,)
    with pytest.raises(EtagMismatch):
        await registry.activate("a", second, expected_digest=first)
    back = await registry.roll_back("a", expected_digest=second)
    assert back.active_digest == first and back.rollout.previous_digests == ()
    with pytest.raises(EtagMismatch):  # the same rollback sent twice
        await registry.roll_back("a", expected_digest=second)
    with pytest.raises(EtagMismatch):
        await registry.roll_back("a", promoted.etag)
    with pytest.raises(NoFormerVersion):
        await registry.roll_back("a")


async def test_a_canary_of_the_active_version_or_of_none_is_refused(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    with pytest.raises(InvalidRequest, match="canary_per_mille"):
        await registered(registry, tmp_path, 1, canary_per_mille=10)
    (first,) = await registered(registry, tmp_path, 1)
    with pytest.raises(InvalidRequest, match="active"):
        await registry.update("a", rollout=RolloutChange(canary=Canary(first, 10)))
    with pytest.raises(AdapterNotFound):
        await registry.update("a", rollout=RolloutChange(canary=Canary("0" * 64, 10)))
    with pytest.raises(AdapterNotFound):
        await registry.update("a", rollout=RolloutChange(version_labels={"x": "0" * 64}))


async def test_a_version_with_a_label_or_a_share_is_not_deleted(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    first, second, _ = await registered(registry, tmp_path, 1, 2, 3)
    change = RolloutChange(version_labels={"stable": first}, canary=Canary(second, 10))
    await registry.update("a", rollout=change)
    for digest, word in ((first, "stable"), (second, "canary")):
        with pytest.raises(AdapterVersionHeld, match=word):
            await registry.begin_delete_version("a", digest)
    await registry.update("a", rollout=RolloutChange(version_labels={}, ends_canary=True))
    await registry.begin_delete_version("a", second)
    assert registry.get("a").rollout.previous_digests == (first,)


async def test_an_expired_name_serves_no_new_requests(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))  # its clock counts up with every look
    await registered(registry, tmp_path, 1, ttl_s=5.0)
    assert registry.resolve("a")
    assert registry.get("a").rollout.expire_time_s is not None
    with pytest.raises(AdapterNotFound, match="expired"):
        for _ in range(10):
            registry.resolve("a")

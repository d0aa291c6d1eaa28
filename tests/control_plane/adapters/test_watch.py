"""What a watch of adapters reports: to whom, in which order, and what happens after a break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest

from control_plane.access.principal import Principal, Role, of_roles
from control_plane.access.visibility import Visibility
from control_plane.adapters.watch.change_log import ChangeLog
from control_plane.adapters.watch.tokens import ResumeTokens, is_token
from control_plane.adapters.watch.watch import AdapterWatches, Changed, ChangeKind, Event, Moved, Resync, Synced
from control_plane.caller import Caller, acting_as
from control_plane.registry.ownership_change import OwnershipChange
from control_plane.registry.registry import Registry
from tests.control_plane.registry.rig import files, open_registry


def tenant(name: str) -> Caller:
    roles = of_roles([Role.ADAPTERS_WRITE])
    return Caller(tenant=name, principal=Principal(f"key:{name}", roles, (name,)))


class Rig:
    """A registry with watches, and places that a test sets."""

    def __init__(self, registry: Registry, tmp_path: Path, max_changes: int = 100) -> None:
        self.registry, self.tmp_path = registry, tmp_path
        self.cached: set[str] = set()
        self.workers: dict[str, tuple[str, ...]] = {}
        self.watches = AdapterWatches(
            registry,
            cached_digests=lambda: self.cached,
            workers_by_digest=lambda: dict(self.workers),
            log=ChangeLog(max_changes=max_changes),
        )

    async def add(self, name: str, seed: int = 0) -> str:
        return (await self.registry.register(name, files(self.tmp_path, seed))).digest

    def watch(self, name: str = "", token: str = "", *, with_residency: bool = False) -> Watch:
        return self.watches.watch(name, token, with_residency=with_residency)


Watch = AsyncGenerator[tuple[str, Event]]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    registry = await open_registry(str(tmp_path / "store"))
    yield Rig(registry, tmp_path)
    await registry.close()


async def next_of(watch: Watch) -> Event:
    return (await asyncio.wait_for(anext(watch), 30))[1]


async def snapshot_of(watch: Watch) -> tuple[list[str], str]:
    """The names of a snapshot, and the token at its end."""
    assert isinstance(await next_of(watch), Resync)
    names: list[str] = []
    while True:
        token, event = await asyncio.wait_for(anext(watch), 30)
        if isinstance(event, Synced):
            return names, token
        assert token == "" and isinstance(event, Changed) and event.kind is ChangeKind.PRESENT
        names.append(event.record.adapter_id)


async def kinds_of(watch: Watch, count: int) -> list[tuple[ChangeKind, str]]:
    found = []
    for _ in range(count):
        event = await next_of(watch)
        assert isinstance(event, Changed), event
        found.append((event.kind, event.record.adapter_id))
    return found


async def test_a_snapshot_then_every_change_in_order(rig: Rig) -> None:
    await rig.add("old")
    watch = rig.watch()
    assert (await snapshot_of(watch))[0] == ["old"]
    first = await rig.add("a", 1)
    second = await rig.add("a", 2)
    await rig.registry.activate("a", first)
    await rig.registry.begin_delete_version("a", second)
    await rig.registry.update("a", display_name="x")
    await rig.registry.begin_delete("a")
    await rig.registry.finish_delete("a")
    assert [kind for kind, name in await kinds_of(watch, 7) if name == "a"] == [
        ChangeKind.CREATED,
        ChangeKind.VERSION_ADDED,
        ChangeKind.VERSION_ACTIVATED,
        ChangeKind.VERSION_DELETED,
        ChangeKind.UPDATED,
        ChangeKind.UPDATED,  # it is being deleted
        ChangeKind.DELETED,
    ]


async def test_a_watch_goes_on_after_the_token_and_never_leaves_a_gap(rig: Rig) -> None:
    watch = rig.watch()
    _, token = await snapshot_of(watch)
    await watch.aclose()
    await rig.add("a")
    await rig.add("b")
    again = rig.watch(token=token)
    token, event = await anext(again)
    assert isinstance(event, Changed) and event.record.adapter_id == "a"
    assert await kinds_of(rig.watch(token=token), 1) == [(ChangeKind.CREATED, "b")]
    for number in range(101):  # more than the log remembers
        await rig.registry.update("a", display_name=str(number))
    names, _ = await snapshot_of(rig.watch(token=token))
    assert names == ["a", "b"]
    other = AdapterWatches(rig.registry, cached_digests=set, workers_by_digest=dict)
    assert isinstance(await next_of(other.watch("", token, with_residency=False)), Resync)  # of another process


async def test_a_slow_reader_gets_a_snapshot_again(rig: Rig) -> None:
    await rig.add("a")
    watch = rig.watch()
    await snapshot_of(watch)
    for number in range(150):
        await rig.registry.update("a", display_name=str(number))
    assert (await snapshot_of(watch))[0] == ["a"]
    await rig.registry.update("a", display_name="last")
    assert await kinds_of(watch, 1) == [(ChangeKind.UPDATED, "a")]


async def test_others_see_only_what_they_may_and_lose_what_they_may_not_see_any_more(rig: Rig) -> None:
    with acting_as(tenant("acme")):
        await rig.add("a")
        await rig.add("public", 1)
        own = rig.watch()
        assert (await snapshot_of(own))[0] == ["a", "public"]
    with acting_as(tenant("zebra")):
        others = rig.watch()
        assert (await snapshot_of(others))[0] == []
    with acting_as(tenant("acme")):
        for visibility in (Visibility.PUBLIC, Visibility.PRIVATE):
            await rig.registry.update("public", ownership=OwnershipChange(visibility=visibility))
        await rig.registry.update("a", display_name="hidden")
        await rig.registry.update("public", ownership=OwnershipChange(visibility=Visibility.PUBLIC))
        assert [kind for kind, _ in await kinds_of(own, 4)] == [ChangeKind.UPDATED] * 4
    with acting_as(tenant("zebra")):
        assert await kinds_of(others, 3) == [
            (ChangeKind.CREATED, "public"),
            (ChangeKind.DELETED, "public"),
            (ChangeKind.CREATED, "public"),
        ]


async def test_one_adapter_is_watched_before_it_exists(rig: Rig) -> None:
    watch = rig.watch("a")
    assert (await snapshot_of(watch))[0] == []
    await rig.add("b")
    await rig.add("a", 1)
    assert await kinds_of(watch, 1) == [(ChangeKind.CREATED, "a")]


async def test_places_are_reported_when_they_change_and_workers_to_admins_only(rig: Rig) -> None:
    with acting_as(tenant("acme")):
        digest = await rig.add("a")
        own = rig.watch(with_residency=True)
        await snapshot_of(own)
    watch = rig.watch(with_residency=True)
    await snapshot_of(watch)
    rig.cached.add(digest)
    event = await next_of(watch)
    assert isinstance(event, Moved) and event.placements.is_host_cached and event.placements.worker_ids == ()
    rig.workers[digest] = ("w0", "w1")
    event = await next_of(watch)
    assert isinstance(event, Moved) and event.placements.worker_ids == ("w0", "w1")
    rig.workers.clear()
    rig.cached.clear()
    event = await next_of(watch)
    assert isinstance(event, Moved) and not event.placements.is_host_cached and not event.placements.worker_ids
    rig.cached.add(digest)
    rig.workers[digest] = ("w0",)
    with acting_as(tenant("acme")):
        await rig.registry.set_pinned("a")
        assert await kinds_of(own, 1) == [(ChangeKind.UPDATED, "a")]
        event = await next_of(own)
        assert isinstance(event, Moved) and event.placements.is_host_cached and event.placements.worker_ids == ()


def test_tokens_are_opened_by_the_process_that_sealed_them_and_show_no_number() -> None:
    tokens = ResumeTokens()
    sealed = {tokens.seal(number) for number in (0, 7, 7, 2**40)}
    assert len(sealed) == 4 and all(map(is_token, sealed))
    assert sorted(number for token in sealed if (number := tokens.open(token)) is not None) == [0, 7, 7, 2**40]
    assert all(ResumeTokens().open(token) is None for token in sealed)
    one = tokens.seal(5)
    assert tokens.open(one[:-1] + ("0" if one[-1] != "0" else "1")) is None


def test_the_log_knows_what_it_forgot() -> None:
    log = ChangeLog(max_changes=3)
    assert log.after(0) == []
    for _ in range(5):
        log.add(None, None)
    assert log.after(1) is None and len(log.after(2) or []) == 3 and log.after(5) == []

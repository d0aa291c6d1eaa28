"""Two registries on one storage at once, as when a lease failed: neither damages what the other acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from control_plane.errors import AdapterNotActive, AdapterNotFound, AdapterVersionActive, EtagMismatch, StoreUnavailable
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.records import AdapterState
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.blob_claims import GRACE_S
from control_plane.registry.store.store import LEFTOVER_AGE, FencedStore
from tests.control_plane.registry.rig import CALLS, base_model, files
from tests.control_plane.registry.store.buckets import KINDS, cloud_urls, unfenced

NAMES = ("a", "b", "c")
NUM_SEEDS = 6
REFUSALS = (AdapterNotActive, AdapterNotFound, AdapterVersionActive, EtagMismatch, StoreUnavailable)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with cloud_urls(tmp_path_factory.mktemp("credentials")) as found:
        yield found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def opened(storage: FencedStore, ticks: Iterator[float]) -> Registry:
    """One more server. All have one clock, whose every reading is another one."""
    return await Registry.open(
        store=ArtifactStore(storage, clock=lambda: next(ticks)),
        base_model=base_model(),
        calls=CALLS,
        max_adapter_bytes=1 << 20,
        reports=WorkerReports(),
        clock=lambda: next(ticks),
    )


@asynccontextmanager
async def two_servers(kind: str, tmp_path: Path, urls: Mapping[str, str]) -> AsyncIterator[tuple[Registry, Registry]]:
    ticks = itertools.count(1e9, 0.25)
    pair = [await opened(unfenced(kind, tmp_path, urls), ticks) for _ in range(2)]
    try:
        yield pair[0], pair[1]
    finally:
        for registry in pair:
            await registry.close()


def active(registry: Registry, name: str) -> str:
    return registry.get(name).active_digest


async def test_the_second_change_of_a_name_is_refused_and_reads_what_the_first_one_made(
    kind: str, tmp_path: Path, urls: Mapping[str, str]
) -> None:
    async with two_servers(kind, tmp_path, urls) as (first, second):
        await first.register("a", files(tmp_path, 1))
        with pytest.raises(EtagMismatch, match="changed by another server that uses the same artifact store; read it"):
            await second.register("a", files(tmp_path, 2), labels={"by": "second"})
        assert active(second, "a") == active(first, "a") and second.resolve("a")
        registered = await second.register("a", files(tmp_path, 2), labels={"by": "second"})
        with pytest.raises(EtagMismatch):
            await first.update("a", display_name="x")
        assert first.get("a") == second.get("a") == registered.record
        await first.begin_delete("a")
        await first.finish_delete("a")
        with pytest.raises(EtagMismatch):
            await second.set_pinned("a")
        with pytest.raises(AdapterNotFound):
            second.get("a")


async def test_a_deletion_does_not_take_what_it_did_not_see(kind: str, tmp_path: Path, urls: Mapping[str, str]) -> None:
    async with two_servers(kind, tmp_path, urls) as (first, second):
        await first.register("a", files(tmp_path, 1))
        with pytest.raises(EtagMismatch):
            await second.register("a", files(tmp_path, 2))
        newer = (await second.register("a", files(tmp_path, 2))).record.active_digest
        with pytest.raises(EtagMismatch):
            await first.begin_delete("a")
        assert active(first, "a") == newer and first.resolve("a")


async def test_weights_stay_while_the_other_server_has_a_name_for_them(
    kind: str, tmp_path: Path, urls: Mapping[str, str]
) -> None:
    async with two_servers(kind, tmp_path, urls) as (first, second):
        digest = (await first.register("a", files(tmp_path, 1))).record.active_digest
        await second.register("b", files(tmp_path, 1))
        await first.begin_delete("a")
        await first.finish_delete("a")
        store = ArtifactStore(unfenced(kind, tmp_path, urls))
        assert store.has_blob(digest)
        await second.begin_delete("b")
        await second.finish_delete("b")
        assert not store.has_blob(digest) and store.list_names().blobs == ()


def killed(prefix: str) -> NoReturn:
    raise OSError("killed")


async def test_weights_that_another_server_deletes_cannot_be_registered_until_it_is_done(
    kind: str, tmp_path: Path, urls: Mapping[str, str]
) -> None:
    """And a server that died while it deleted them keeps nobody away for ever."""
    now_s = 1e9
    storage = unfenced(kind, tmp_path, urls)
    first = ArtifactStore(storage, clock=lambda: now_s)
    second = ArtifactStore(unfenced(kind, tmp_path, urls), clock=lambda: now_s)
    digest, chunk = "a" * 64, files(tmp_path)["adapter_config.json"]
    first.claim_blob(digest)
    first.put_chunk(digest, 0, chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "list", killed)
        with pytest.raises(StoreUnavailable):
            first.delete_blob(digest)
    with pytest.raises(StoreUnavailable, match="another server is deleting these weights"):
        second.claim_blob(digest)
    now_s += GRACE_S + 1
    second.claim_blob(digest)
    assert not second.is_whole_chunk(digest, 0, 1, "")
    second.put_chunk(digest, 0, chunk)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_two_servers_do_what_they_acknowledged_is_there(
    kind: str, tmp_path: Path, urls: Mapping[str, str], seed: int
) -> None:
    """A random walk of changes, some at once, some after a restart of one of the two, which cleans up."""
    generator = random.Random(seed)
    ticks = itertools.count(1e9, 0.25)
    servers = [await opened(unfenced(kind, tmp_path, urls), ticks) for _ in range(2)]
    num_acknowledged = num_refused = 0

    async def change(registry: Registry, name: str) -> tuple[str, str]:
        """Make a change; the name, and the digest that it made the active one."""
        seed = generator.randrange(NUM_SEEDS)
        action = generator.choice(("register", "register", "update", "activate", "delete version", "delete"))
        record = registry.get(name) if action != "register" else None
        digest = generator.choice([v.digest for v in record.versions]) if record and record.versions else ""
        match action:
            case "register":
                return name, (await registry.register(name, files(tmp_path, seed))).record.active_digest
            case "update":
                await registry.update(name, display_name=f"by {generator.random()}")
            case "activate":
                return name, (await registry.activate(name, digest)).active_digest
            case "delete version":
                await registry.begin_delete_version(name, digest)
                await registry.finish_delete_version(digest)
            case "delete":
                await registry.begin_delete(name)
                await registry.finish_delete(name)
        return name, ""

    for _ in range(40):
        if generator.random() < 0.1:
            place = generator.randrange(2)
            await servers[place].close()
            servers[place] = await opened(unfenced(kind, tmp_path, urls), ticks)
        chosen = servers if generator.random() < 0.7 else [generator.choice(servers)]
        results = await asyncio.gather(
            *(change(server, generator.choice(NAMES)) for server in chosen), return_exceptions=True
        )
        acknowledged = [result for result in results if not isinstance(result, BaseException)]
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, REFUSALS), result
        num_acknowledged += len(acknowledged)
        num_refused += len(results) - len(acknowledged)
        stored = await whole(kind, tmp_path, urls, ticks)
        if len({name for name, _ in acknowledged}) == len(acknowledged):  # else the last one counts
            assert all(stored[name] == digest for name, digest in acknowledged if digest)
    assert num_acknowledged > 5 and num_refused
    for registry in servers:
        await registry.close()


async def whole(kind: str, tmp_path: Path, urls: Mapping[str, str], ticks: Iterator[float]) -> dict[str, str]:
    """The active digest of each name, as a third server finds them: each whole, with every version's weights."""
    store = ArtifactStore(unfenced(kind, tmp_path, urls))
    third = await opened(unfenced(kind, tmp_path, urls), ticks)
    for record in third.list_part()[0]:
        assert record.state is AdapterState.ACTIVE, record.state_reason
        assert all(store.has_blob(version.digest) for version in record.versions)
        for version in record.versions:
            assert third.resolve(record.adapter_id, version.digest)
    await third.close()
    return {record.adapter_id: record.active_digest for record in third.list_part()[0]}


def test_what_is_long_past_is_shorter_than_what_is_left_over() -> None:
    assert LEFTOVER_AGE.total_seconds() > GRACE_S

"""Versions by name, shares of requests, loads, pins and watches, through a running system, the SDK and the CLI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import motet
import pytest
from motet import AdapterCanary, AdapterEventKind, AdapterTier, ResidencyOutcome, VersionRollout
from motet.cli.main import main

from tests.e2e.harness import System, active_version, wait_until
from tests.makers import make_adapter, make_checkpoint

WORKER_FLAGS = ["--block-size", "4", "--num-blocks", "512", "--token-budget", "64", "--max-model-len", "256"]
Capture = pytest.CaptureFixture[str]
Add = Callable[..., motet.Adapter]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), arch="llama")


@pytest.fixture(scope="module")
def system(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(checkpoint, tmp_path_factory.mktemp("system")) as system:
        system.start_hash_worker(flags=WORKER_FLAGS)
        yield system


@pytest.fixture
def client(system: System) -> Iterator[motet.Client]:
    with system.client() as client:
        yield client


@pytest.fixture
def add(client: motet.Client, checkpoint: Path, tmp_path: Path) -> Add:
    def add(name: str, seed: int, rollout: VersionRollout | None = None) -> motet.Adapter:
        directory = make_adapter(tmp_path / f"{seed}", checkpoint, rank=4, alpha=8, targets=["q_proj"], seed=seed)
        return client.adapters.register(name, directory, rollout=rollout)

    return add


def digest_used(client: motet.Client, adapter: str, **options: str) -> str:
    stream = client.generate([1, 2, 3], adapter=adapter, max_tokens=2, **options)  # type: ignore[arg-type]
    return stream.result().started.adapter_digest


def test_requests_name_versions_and_keys_share_the_canary(
    system: System, client: motet.Client, add: Add, capsys: Capture
) -> None:
    first = active_version(add("poet", 1)).digest
    staged = add("poet", 2, VersionRollout(keep_active=True, version_labels=("next",)))
    assert staged.registration is not None and staged.registration.version is not None
    second = staged.registration.version.digest
    assert digest_used(client, "poet") == digest_used(client, "poet@1") == first
    assert digest_used(client, "poet@2") == digest_used(client, "poet@next") == second
    with pytest.raises(motet.NotFound):
        digest_used(client, "poet@nothing")
    with pytest.raises(motet.InvalidArgument):
        digest_used(client, "poet@1", adapter_digest=first)
    keys = [f"user-{number}" for number in range(12)]
    client.adapters.set_canary("poet", AdapterCanary(second, 500))
    chosen = {key: digest_used(client, "poet", routing_key=key) for key in keys}
    assert set(chosen.values()) == {first, second}
    client.adapters.set_canary("poet", AdapterCanary(second, 800))
    assert all(digest_used(client, "poet", routing_key=key) == second for key in keys if chosen[key] == second)
    server = ["--server", system.address]
    assert main(["adapters", *server, "canary", "poet", "--promote"]) == 0
    assert digest_used(client, "poet") == second
    assert main(["adapters", *server, "rollback", "poet"]) == 0
    assert digest_used(client, "poet") == first
    assert main(["adapters", *server, "label", "poet", "stable", "@1"]) == 0
    assert digest_used(client, "poet@stable") == first
    assert main(["adapters", *server, "versions", "poet"]) == main(["adapters", *server, "get", "poet"]) == 0
    assert "stable" in capsys.readouterr().out


def test_loads_and_pins_bring_adapters_to_the_worker_before_a_request(
    system: System, client: motet.Client, add: Add
) -> None:
    add("early", 3)
    [result] = client.adapters.load("early")
    assert (result.tier, result.outcome) == (AdapterTier.ARENA, ResidencyOutcome.LOADED) and result.worker_id
    assert client.adapters.load("early")[0].outcome is ResidencyOutcome.WAS_LOADED
    assert client.adapters.unload("early")[0].outcome is ResidencyOutcome.UNLOADED
    assert main(["adapters", "--server", system.address, "load", "early", "--host-cache"]) == 0
    add("pinned", 4)
    client.adapters.pin("pinned")
    wait_until(
        lambda: any(place.tier is AdapterTier.ARENA for place in client.adapters.get("pinned").placements),
        "the pinned adapter in the arena",
    )
    assert client.adapters.unload("pinned")[0].outcome is ResidencyOutcome.PINNED


def test_a_watch_reports_changes_and_goes_on_behind_its_token(client: motet.Client, add: Add) -> None:
    watch = client.adapters.watch("seen", timeout_s=60.0)
    assert [next(watch).kind, next(watch).kind] == [AdapterEventKind.RESYNC, AdapterEventKind.SYNCED]
    add("seen", 5)
    created = next(watch)
    assert (created.kind, created.adapter_id) == (AdapterEventKind.CREATED, "seen") and created.adapter is not None
    client.adapters.update("seen", display_name="x")
    again = client.adapters.watch("seen", resume_token=created.resume_token, timeout_s=60.0)
    assert next(again).kind is AdapterEventKind.UPDATED


async def test_the_asyncio_client_watches_too(system: System, checkpoint: Path, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "watched", checkpoint, rank=4, alpha=8, targets=["q_proj"], seed=7)
    async with motet.AsyncClient(system.address) as client:
        await client.adapters.register("watched", directory)
        await client.adapters.load("watched")
        watch = client.adapters.watch(with_residency=True, timeout_s=60.0)
        kinds = set()
        async for event in watch:
            kinds.add(event.kind)
            if event.kind is AdapterEventKind.MOVED:
                break
        assert {AdapterEventKind.RESYNC, AdapterEventKind.PRESENT, AdapterEventKind.SYNCED} < kinds


def test_an_adapter_expires(client: motet.Client, add: Add) -> None:
    add("brief", 6, VersionRollout(ttl_s=0.5))

    def is_gone() -> bool:
        try:
            client.adapters.get("brief")
        except motet.NotFound:
            return True
        return False

    wait_until(is_gone, "the end of the adapter")

"""Adapters from the operator's directories: named at the start, or in a directory that is watched. A real registry."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.access.principal import Principal, Role, of_roles
from control_plane.access.visibility import Visibility
from control_plane.adapters.directories.registrar import AdapterNotRegistered, DirectoryRegistrar
from control_plane.adapters.directories.settings import DirectorySettings
from control_plane.adapters.directories.watcher import DirectoryWatcher
from control_plane.adapters.life_cycle import AdapterLifeCycle, Registration
from control_plane.adapters.operations import OperationStore
from control_plane.adapters.sources.adapter_directory import find_files
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import Caller, acting_as
from control_plane.errors import StoreUnavailable
from control_plane.registry.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from tests.control_plane.api.fake_adapters import FakeWeights
from tests.control_plane.api.fakes import FakeFleet
from tests.control_plane.registry.rig import CALLS, base_model, files

Log = pytest.LogCaptureFixture


class Rig:
    """A registry, a directory and what watches it."""

    def __init__(self, registry: Registry, tmp_path: Path, owner: str | None = None) -> None:
        self.registry, self.tmp_path = registry, tmp_path
        self.life_cycle = AdapterLifeCycle(
            registry=registry, weights=FakeWeights([]), fleet=FakeFleet([]), operations=OperationStore()
        )
        self.directory = tmp_path / "watched"
        self.directory.mkdir(exist_ok=True)
        self.registrar = DirectoryRegistrar(registry, self.life_cycle, AuditLog(), CALLS, owner=owner)
        self.watcher = DirectoryWatcher(self.directory, self.registrar, interval_s=1.0)

    def put(self, name: str, seed: int) -> Path:
        """An adapter in a folder; one that is there is replaced."""
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        for file_name, path in files(self.tmp_path, seed).items():
            shutil.copy(path, folder / file_name)
        return folder

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            await self.watcher.look()

    def digests(self, name: str) -> list[str]:
        record = self.registry.find(name)
        return [] if record is None else [version.digest for version in record.versions]

    def active(self, name: str = "a") -> str:
        return self.registry.get(name).active_digest


async def opened(tmp_path: Path) -> Registry:
    return await Registry.open(
        store=ArtifactStore(str(tmp_path / "store")),
        base_model=base_model(),
        calls=CALLS,
        max_adapter_bytes=1 << 20,
        reports=WorkerReports(),
    )


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    registry = await opened(tmp_path)
    yield Rig(registry, tmp_path)
    await registry.close()


async def test_named_directories_are_registered_and_public(rig: Rig) -> None:
    folder = rig.put("x", 1)
    await rig.registrar.register_all([("a", folder), ("b", folder)])
    record = rig.registry.get("a")
    assert record.ownership.visibility is Visibility.PUBLIC and record.versions[0].source == str(folder)
    assert rig.digests("a") == rig.digests("b")


async def test_with_an_owner_they_are_private_to_it(rig: Rig) -> None:
    owned = Rig(rig.registry, rig.tmp_path, owner="acme")
    await owned.registrar.register_all([("a", owned.put("x", 1))])
    ownership = rig.registry.get("a").ownership
    assert (ownership.owner, ownership.visibility) == ("acme", Visibility.PRIVATE)


async def test_a_name_of_another_tenant_is_not_taken_over(rig: Rig) -> None:
    user = Principal(name="key:1", roles=of_roles({Role.ADAPTERS_WRITE}), tenants=("acme",))
    with acting_as(Caller(tenant="acme", principal=user)):
        await rig.life_cycle.register(Registration("a"), files(rig.tmp_path, 5))
    with pytest.raises(AdapterNotRegistered, match="--adapter: a: adapter_id: the name 'a' is taken"):
        await rig.registrar.register_all([("a", rig.put("x", 1))])


async def test_a_start_with_known_bytes_takes_no_rollback_back(rig: Rig) -> None:
    first = rig.put("x", 1)
    await rig.registrar.register_all([("a", first)])
    one = rig.active()
    await rig.registrar.register_all([("a", rig.put("x", 2))])
    assert rig.active() != one
    await rig.life_cycle.roll_back("a")
    await rig.registrar.register_all([("a", first)])  # it has the bytes of the second version
    assert rig.active() == one and len(rig.digests("a")) == 2


async def test_a_directory_that_is_no_adapter_is_named(rig: Rig) -> None:
    folder = rig.put("x", 1)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(
        AdapterNotRegistered, match=r"--adapter: a: .*directory '.*/x' has no adapter_model.safetensors"
    ):
        await rig.registrar.register_all([("a", folder)])


async def test_a_folder_is_registered_when_two_looks_found_it_the_same(rig: Rig) -> None:
    rig.put("a", 1)
    await rig.look(1)
    assert rig.digests("a") == []
    await rig.look(1)
    assert len(rig.digests("a")) == 1
    await rig.look(3)
    assert len(rig.digests("a")) == 1


async def test_a_copy_that_goes_on_is_waited_for(rig: Rig) -> None:
    whole = rig.put("b", 1)
    weights = (whole / WEIGHTS_FILE).read_bytes()
    half = rig.directory / "a"
    half.mkdir()
    for size in (100, 200, len(weights)):
        (half / WEIGHTS_FILE).write_bytes(weights[:size])
        await rig.look(1)
        assert rig.digests("a") == []
    shutil.copy(whole / CONFIG_FILE, half / CONFIG_FILE)
    await rig.look(2)
    assert rig.digests("a") == rig.digests("b") != []


async def test_a_changed_folder_is_the_next_version_and_former_bytes_are_active_again(rig: Rig) -> None:
    active = []
    for seed in (1, 2, 1):
        rig.put("a", seed)
        await rig.look()
        active.append(rig.active())
    assert active[0] == active[2] != active[1] and len(rig.digests("a")) == 2


async def test_a_server_that_starts_again_leaves_a_rollback_as_it_is(rig: Rig) -> None:
    for seed in (1, 2):
        rig.put("a", seed)
        await rig.look()
    await rig.life_cycle.roll_back("a")
    active = rig.active()
    again = Rig(rig.registry, rig.tmp_path)
    await again.look(3)
    assert rig.active() == active


async def test_a_removed_folder_leaves_the_adapter_and_one_that_returns_is_looked_at(rig: Rig) -> None:
    folder = rig.put("a", 1)
    await rig.look()
    shutil.rmtree(folder)
    await rig.look()
    assert len(rig.digests("a")) == 1
    rig.put("a", 2)
    await rig.look()
    assert len(rig.digests("a")) == 2


async def test_what_cannot_be_registered_is_named_once_and_the_others_go_on(rig: Rig, caplog: Log) -> None:
    caplog.set_level(logging.WARNING)
    bad = rig.put("bad", 1)
    (bad / CONFIG_FILE).write_text('{"peft_type": "IA3"}')
    rig.put("Not A Name!", 1)
    rig.put("good", 1)
    (rig.directory / ".hidden").mkdir()
    (rig.directory / "a-file").write_text("x")
    await rig.look(5)
    assert len(rig.digests("good")) == 1 and rig.digests("bad") == []
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert any("folder=bad" in line and "IA3" in line for line in lines)
    assert any("folder=Not A Name!" in line and "not a valid adapter id" in line for line in lines)
    rig.put("bad", 3)
    await rig.look()
    assert len(rig.digests("bad")) == 1


async def test_a_link_out_of_the_directory_is_refused(rig: Rig, caplog: Log) -> None:
    outside = rig.put("x", 1).rename(rig.tmp_path / "outside")
    (rig.directory / "a").symlink_to(outside)
    await rig.look()
    assert rig.digests("a") == [] and "leads out of its root" in caplog.text


async def test_a_file_that_becomes_a_link_out_of_the_directory_is_never_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    outside = rig.put("x", 1).rename(rig.tmp_path / "outside")
    weights = rig.put("a", 2) / WEIGHTS_FILE

    def find_and_swap(folder: Path, described: str, *, below: Path) -> dict[str, Path]:
        found = find_files(folder, described, below=below)
        weights.unlink()
        weights.symlink_to(outside / WEIGHTS_FILE)
        return found

    monkeypatch.setattr("control_plane.adapters.directories.watcher.find_files", find_and_swap)
    await rig.look()
    assert rig.digests("a") == [] and "leads out of its root" in caplog.text


async def test_a_store_that_is_away_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    rig.put("a", 1)
    register = rig.life_cycle.register

    async def refuse(*_arguments: object, **_more: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(rig.life_cycle, "register", refuse)
    await rig.look(4)
    assert caplog.text.count("adapter directory waits folder=a") == 1
    monkeypatch.setattr(rig.life_cycle, "register", register)
    await rig.look(1)
    assert len(rig.digests("a")) == 1


async def test_the_loop_survives_a_directory_that_is_gone(rig: Rig, caplog: Log) -> None:
    class Enough(Exception):
        pass

    looks = 0

    async def sleep(seconds: float) -> None:
        nonlocal looks
        assert seconds == 7.0
        looks += 1
        if looks == 3:
            raise Enough

    shutil.rmtree(rig.directory)
    watcher = DirectoryWatcher(rig.directory, rig.registrar, interval_s=7.0, sleep=sleep)
    with pytest.raises(Enough):
        await watcher.run()
    assert caplog.text.count("look at adapter directory failed") == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"adapters": (("A B", Path()),)}, "--adapter: 'A B' is not a valid adapter id"),
        ({"adapters": (("a", Path()), ("a", Path()))}, "--adapter: name 'a' is given twice"),
        ({"adapters": (("a", Path("/none")),)}, "--adapter: a: /none is not a directory"),
        ({"adapter_dir": Path("/none")}, "--adapter-dir: /none is not a directory"),
        ({"adapter_owner": "A B"}, "--adapter-owner: 'A B' is not a valid tenant"),
        ({"adapter_dir_interval_s": 0.0}, "--adapter-dir-interval-s: 0.0 is below 0.1"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DirectorySettings(**settings)  # type: ignore[arg-type]

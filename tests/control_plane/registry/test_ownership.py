"""Adapters of several tenants in one registry: whom they belong to, who finds them, who changes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from control_plane.access.name_prefixes import reserve
from control_plane.access.principal import ANYBODY, Principal, Role, of_roles
from control_plane.access.visibility import NOBODYS, Ownership, Visibility
from control_plane.caller import Caller, acting_as
from control_plane.errors import (
    AdapterNameTaken,
    AdapterNotActive,
    AdapterNotFound,
    EtagMismatch,
    InvalidRequest,
    MotetError,
    PermissionDenied,
)
from control_plane.registry.catalog import versions_page
from control_plane.registry.ownership_change import OwnershipChange
from control_plane.registry.registry import Registry, count_visible
from tests.control_plane.registry.rig import files, open_registry, write_adapter

PRIVATE, SHARED, PUBLIC = Visibility
WITH_LABS = OwnershipChange(visibility=SHARED, shared_with=("labs",))


def caller(tenant: str, *roles: Role, adapters: tuple[str, ...] | None = None) -> Caller:
    return Caller(tenant, Principal(f"key:{tenant}", of_roles(roles or (Role.ADAPTERS_WRITE,)), (tenant,), adapters))


ACME, LABS, OTHER = caller("acme"), caller("labs"), caller("other")
ADMIN = caller("ops", Role.ADMIN)


async def register(
    registry: Registry, who: Caller, name: str, tmp_path: Path, seed: int = 0, change: OwnershipChange | None = None
) -> Ownership:
    with acting_as(who):
        registered = await registry.register(name, files(tmp_path, seed), ownership=change or OwnershipChange())
        return registered.record.ownership


def names(registry: Registry, who: Caller) -> list[str]:
    with acting_as(who):
        return [record.adapter_id for record in registry.list_part()[0]]


async def test_a_new_adapter_is_its_tenants_and_private(registry: Registry, tmp_path: Path) -> None:
    assert await register(registry, ACME, "poet", tmp_path) == Ownership("acme")
    assert await register(registry, Caller("acme", ANYBODY), "free", tmp_path) == NOBODYS
    assert await register(registry, ACME, "shared", tmp_path, change=WITH_LABS) == Ownership("acme", SHARED, ("labs",))
    public = OwnershipChange(visibility=PUBLIC)
    assert await register(registry, ACME, "public", tmp_path, change=public) == Ownership("acme", PUBLIC)
    assert await register(registry, ADMIN, "given", tmp_path, change=OwnershipChange(owner="labs")) == Ownership("labs")
    assert names(registry, ACME) == ["poet", "public", "shared"]
    assert names(registry, LABS) == ["given", "public", "shared"]
    assert names(registry, OTHER) == ["public"]
    for who, num_visible in ((ACME, 3), (LABS, 3), (OTHER, 1), (ADMIN, 5)):
        with acting_as(who):
            assert registry.stats().num_visible == await count_visible(registry) == num_visible
    assert names(registry, ADMIN) == names(registry, Caller()) == ["free", "given", "poet", "public", "shared"]


async def test_owners_outlive_a_restart(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    registry = await open_registry(place)
    await register(registry, ACME, "shared", tmp_path, change=WITH_LABS)
    await register(registry, ACME, "poet", tmp_path)
    await registry.close()
    registry = await open_registry(place)
    assert (names(registry, ACME), names(registry, LABS), names(registry, OTHER)) == (
        ["poet", "shared"],
        ["shared"],
        [],
    )
    await registry.close()


CALLS: dict[str, Callable[[Registry, str], object]] = {
    "get": lambda registry, name: registry.get(name),
    "resolve": lambda registry, name: registry.resolve(name),
    "resolve a digest": lambda registry, name: registry.resolve(name, "0" * 64),
    "changeable": lambda registry, name: registry.changeable(name),
    "versions": lambda registry, name: versions_page(registry.get(name)),
    "update": lambda registry, name: registry.update(name, display_name="x"),
    "update with an etag": lambda registry, name: registry.update(name, etag="x"),
    "activate": lambda registry, name: registry.activate(name, "0" * 64),
    "pin": lambda registry, name: registry.set_pinned(name),
    "unpin": lambda registry, name: registry.clear_pinned(name),
    "delete": lambda registry, name: registry.begin_delete(name),
    "delete a version": lambda registry, name: registry.begin_delete_version(name, "0" * 64),
}
CHANGES = {name: call for name, call in CALLS.items() if name not in ("get", "resolve", "resolve a digest", "versions")}


async def outcome(who: Caller, call: Callable[[Registry, str], object], registry: Registry, name: str) -> object:
    with acting_as(who):
        try:
            result = call(registry, name)
            return await result if isinstance(result, Awaitable) else result
        except MotetError as error:
            return type(error), str(error), vars(error)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_hidden_name_is_answered_like_a_name_that_nobody_has(
    registry: Registry, tmp_path: Path, call: Callable[[Registry, str], object]
) -> None:
    """In the message, its suggestions and its details, word for word, also while it is being deleted."""
    await register(registry, LABS, "acme-poem", tmp_path)
    before = await outcome(LABS, call, registry, "acme-poet")
    await register(registry, ACME, "acme-poet", tmp_path)
    await register(registry, ACME, "acme-poets", tmp_path, 1, WITH_LABS)
    assert isinstance(before, tuple) and before[0] is AdapterNotFound
    hidden = await outcome(OTHER, call, registry, "acme-poet")
    assert hidden == await outcome(OTHER, call, await open_registry(str(tmp_path / "empty")), "acme-poet")
    for name in ("acme-poet", "acme-poex"):  # one is hidden, one is nobody's
        found = await outcome(LABS, call, registry, name)
        assert isinstance(found, tuple)
        kind, message, _ = found
        assert kind is AdapterNotFound
        assert message == (
            f"adapter {name!r} does not exist; did you mean 'acme-poem', 'acme-poets'? ListAdapters "
            "(`motet adapters list`) shows all adapters"
        )
    with acting_as(ACME):
        await registry.begin_delete("acme-poet")
    assert await outcome(OTHER, call, registry, "acme-poet") == hidden


@pytest.mark.parametrize("call", CHANGES.values(), ids=CHANGES)
async def test_who_sees_an_adapter_of_others_cannot_change_it(
    registry: Registry, tmp_path: Path, call: Callable[[Registry, str], object]
) -> None:
    await register(registry, ACME, "poet", tmp_path, change=WITH_LABS)
    before = registry.get("poet")
    with acting_as(LABS):
        assert registry.resolve("poet").version == before.active_version
        with pytest.raises(PermissionDenied, match="'poet' belongs to another tenant: tenant 'labs' may use it"):
            result = call(registry, "poet")
            assert isinstance(result, Awaitable)
            await result
    assert registry.get("poet") is before


async def test_the_adapters_of_a_credential_hide_the_others(registry: Registry, tmp_path: Path) -> None:
    for name in ("poet", "prose"):
        await register(registry, ACME, name, tmp_path)
    narrow = caller("acme", Role.ADAPTERS_WRITE, adapters=("po*",))
    assert names(registry, narrow) == ["poet"]
    with acting_as(narrow):
        assert (registry.stats().num_visible, await count_visible(registry)) == (None, 1)
        assert (await registry.update("poet", display_name="P")).display_name == "P"
        with pytest.raises(AdapterNotFound):
            registry.get("prose")
        for name in ("prose", "proverbs"):  # one that is there, and one that nobody has
            with pytest.raises(PermissionDenied, match=f"this credential may not use adapter '{name}'"):
                await registry.register(name, files(tmp_path))


async def test_a_taken_name_is_refused_without_a_word_of_its_owner(registry: Registry, tmp_path: Path) -> None:
    await register(registry, ACME, "hidden", tmp_path)
    await register(registry, ACME, "seen", tmp_path, 1, WITH_LABS)
    before = registry.get("hidden"), registry.get("seen"), registry.stats()
    for validate_only in (True, False):
        with acting_as(LABS):
            with pytest.raises(AdapterNameTaken) as taken:
                await registry.register("hidden", files(tmp_path, 2), validate_only=validate_only)
            with pytest.raises(PermissionDenied, match="'seen' belongs to another tenant"):
                await registry.register("seen", files(tmp_path, 2), validate_only=validate_only)
        assert str(taken.value) == "adapter_id: the name 'hidden' is taken; use another name"
    with acting_as(ACME):
        await registry.begin_delete("hidden")
    with acting_as(LABS), pytest.raises(AdapterNameTaken, match="is taken; use another name"):
        await registry.register("hidden", files(tmp_path, 2))
    with acting_as(ACME), pytest.raises(AdapterNotActive, match="is being deleted"):
        await registry.register("hidden", files(tmp_path, 2))
    assert (registry.get("seen"), registry.stats()) == before[1:]


async def test_of_two_tenants_that_register_one_name_at_once_one_gets_it(registry: Registry, tmp_path: Path) -> None:
    """Both pass the first check. One is refused when it holds the name's lock, and its weights are not stored."""
    for turn in range(4):
        name, order = f"race-{turn}", [ACME, LABS] if turn % 2 else [LABS, ACME]
        results = await asyncio.gather(
            *(register(registry, who, name, tmp_path, 10 * turn + at) for at, who in enumerate(order)),
            return_exceptions=True,
        )
        refused = [result for result in results if isinstance(result, AdapterNameTaken)]
        assert len(refused) == 1 and str(refused[0]) == f"adapter_id: the name '{name}' is taken; use another name"
        winner = order[next(at for at, result in enumerate(results) if isinstance(result, Ownership))]
        record = registry.get(name)
        assert (record.ownership, len(record.versions)) == (Ownership(winner.tenant), 1)
        assert registry.stats().num_stored == turn + 1, "the loser's weights are in no store"
        with acting_as(winner):
            assert registry.resolve(name).version == record.active_version


async def test_an_adapter_given_away_meanwhile_is_not_changed_by_its_former_owner(
    registry: Registry, tmp_path: Path
) -> None:
    """What a caller may do is judged while it holds the name."""
    await register(registry, ACME, "poet", tmp_path)
    with acting_as(ADMIN):
        given = asyncio.ensure_future(registry.update("poet", ownership=OwnershipChange(owner="labs")))
    with acting_as(ACME):
        change = asyncio.ensure_future(registry.update("poet", display_name="mine"))
        version = asyncio.ensure_future(registry.register("poet", files(tmp_path, 1)))
    assert (await given).ownership == Ownership("labs")
    with pytest.raises(AdapterNotFound):
        await change
    with pytest.raises(AdapterNameTaken):
        await version
    record = registry.get("poet")
    assert (record.display_name, len(record.versions), registry.stats().num_stored) == ("", 1, 1)


async def test_updates_change_who_sees_an_adapter(registry: Registry, tmp_path: Path) -> None:
    await register(registry, ACME, "poet", tmp_path)
    with acting_as(ACME):
        etag = registry.get("poet").etag
        shared = await registry.update("poet", ownership=WITH_LABS, etag=etag)
        assert shared.ownership == Ownership("acme", SHARED, ("labs",)) and shared.etag != etag
        with pytest.raises(EtagMismatch):
            await registry.update("poet", ownership=OwnershipChange(visibility=PUBLIC), etag=etag)
        assert names(registry, LABS) == ["poet"] and names(registry, OTHER) == []
        other = await registry.update("poet", ownership=OwnershipChange(shared_with=("other",)))
        assert other.ownership == Ownership("acme", SHARED, ("other",))
        assert names(registry, LABS) == [] and names(registry, OTHER) == ["poet"]
        assert (await registry.update("poet", display_name="x")).ownership == other.ownership
        await registry.update("poet", ownership=OwnershipChange(visibility=PUBLIC))
        assert names(registry, LABS) == names(registry, OTHER) == ["poet"]
        private = await registry.update("poet", ownership=OwnershipChange(visibility=PRIVATE))
        assert private.ownership == Ownership("acme") and names(registry, LABS) == []
        for change, words in (
            (OwnershipChange(visibility=SHARED), "shared_with: is empty with visibility shared"),
            (OwnershipChange(shared_with=("labs",)), "names tenants, and the adapter would be private"),
            (
                OwnershipChange(visibility=PUBLIC, shared_with=("labs",)),
                "names tenants, and the adapter would be public",
            ),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await registry.update("poet", ownership=change)
            with pytest.raises(InvalidRequest, match=words):
                await registry.register("other", files(tmp_path), ownership=change)
        for owner in ("labs", ""):
            with pytest.raises(PermissionDenied, match="only an admin may name another tenant than 'acme'"):
                await registry.update("poet", ownership=OwnershipChange(owner=owner))
            with pytest.raises(PermissionDenied, match="owner: only an admin"):
                await registry.register("poet", files(tmp_path), ownership=OwnershipChange(owner=owner))
        assert await register(registry, ACME, "own", tmp_path, change=OwnershipChange(owner="acme")) == Ownership(
            "acme"
        )
    with acting_as(ADMIN):
        given = await registry.update("poet", ownership=OwnershipChange(owner="labs", visibility=PUBLIC))
        assert given.ownership == Ownership("labs", PUBLIC)
        assert (await registry.update("poet", ownership=OwnershipChange(owner=""))).ownership == Ownership("", PUBLIC)


async def test_a_version_keeps_the_ownership_or_sets_it(registry: Registry, tmp_path: Path) -> None:
    await register(registry, ACME, "poet", tmp_path, change=WITH_LABS)
    assert await register(registry, ADMIN, "poet", tmp_path, 1) == Ownership("acme", SHARED, ("labs",))
    with acting_as(ACME):
        before = registry.get("poet")
        again = await registry.register("poet", files(tmp_path, 1), ownership=OwnershipChange(visibility=PRIVATE))
        assert again.previous is before and again.record.ownership == Ownership("acme")
        assert again.record.versions == before.versions and again.record.etag != before.etag
        assert (await registry.register("poet", files(tmp_path, 1))).record is again.record
    assert names(registry, LABS) == []


async def test_a_registration_gives_no_adapter_to_another_tenant(registry: Registry, tmp_path: Path) -> None:
    """An admin that mistakes a name must not hand the versions of one tenant to another one."""
    await register(registry, ACME, "poet", tmp_path)
    await register(registry, Caller("acme", ANYBODY), "free", tmp_path)
    with pytest.raises(AdapterNameTaken, match="taken by tenant 'acme'; use another name, or change the owner first"):
        await register(registry, ADMIN, "poet", tmp_path, 1, OwnershipChange(owner="labs"))
    assert await register(registry, ADMIN, "poet", tmp_path, 1, OwnershipChange(owner="acme")) == Ownership("acme")
    assert await register(registry, ADMIN, "free", tmp_path, 1, OwnershipChange(owner="labs")) == Ownership("labs")


async def test_weights_that_two_tenants_have_are_found_by_each_under_its_own_name_only(
    registry: Registry, tmp_path: Path
) -> None:
    with acting_as(ACME):
        first = await registry.register("poet", files(tmp_path))
        other = await registry.register("poet", files(tmp_path, 1))
    digest, hidden = first.record.active_digest, other.record.active_digest
    with acting_as(LABS):
        checked = await registry.register("prose", files(tmp_path), validate_only=True)
        mine = await registry.register("prose", files(tmp_path))
        assert (mine.previous, mine.is_repaired, checked.previous) == (None, False, None)
        assert (mine.record.active_digest, len(mine.record.versions)) == (digest, 1)
        assert mine.record.versions[0].create_time_s > first.record.versions[0].create_time_s
        assert registry.resolve("prose", digest).ref.digest == digest
        with pytest.raises(AdapterNotFound, match=f"'prose' has no version {hidden}"):
            registry.resolve("prose", hidden)
        with pytest.raises(AdapterNotFound, match="'poet' does not exist"):
            registry.resolve("poet", digest)
        with pytest.raises(AdapterNotFound, match="no version"):
            await registry.begin_delete_version("prose", hidden)
        await registry.begin_delete("prose")
        await registry.finish_delete("prose")
    with acting_as(ACME):
        assert registry.resolve("poet", digest).ref.digest == digest


async def test_reserved_names_are_registered_by_their_tenant_alone(tmp_path: Path) -> None:
    prefixes = reserve({"acme": ("acme-",)})
    registry = await open_registry(str(tmp_path / "store"), prefixes=prefixes)
    refusals = []
    for _ in range(2):  # while the name is nobody's, and while it is a hidden one
        with acting_as(LABS), pytest.raises(PermissionDenied) as caught:
            await registry.register("acme-poet", files(tmp_path))
        refusals.append(str(caught.value))
        await register(registry, ACME, "acme-poet", tmp_path)
    text = "adapter_id: names that begin with 'acme-' are reserved for another tenant; use another name"
    assert refusals == [text] * 2, "a refusal that does not say whether the name is taken"
    assert await register(registry, LABS, "acme", tmp_path) == Ownership("labs")
    # An admin registers it for the tenant, unless it says otherwise.
    assert await register(registry, ADMIN, "acme-tool", tmp_path) == Ownership("acme")
    named = OwnershipChange(owner="ops")
    assert await register(registry, ADMIN, "acme-probe", tmp_path, change=named) == Ownership("ops")
    assert await register(registry, ADMIN, "tool", tmp_path) == Ownership("ops")
    assert await register(registry, Caller("labs", ANYBODY), "acme-free", tmp_path) == NOBODYS
    await registry.close()
    # A name that was given away before it was reserved stays its owner's.
    registry = await open_registry(str(tmp_path / "store"), prefixes=reserve({"acme": ("acme",)}))
    assert await register(registry, LABS, "acme", tmp_path, 1) == Ownership("labs")
    await registry.close()


async def test_a_record_that_cannot_be_read_is_shown_to_admins_only(tmp_path: Path) -> None:
    store = tmp_path / "store"
    registry = await open_registry(str(store))
    await register(registry, ACME, "poet", tmp_path, change=OwnershipChange(visibility=PUBLIC))
    await registry.close()
    (store / "adapters" / "poet.json").write_text("{")
    registry = await open_registry(str(store))
    assert names(registry, ACME) == names(registry, LABS) == [] and names(registry, ADMIN) == ["poet"]
    with acting_as(ACME), pytest.raises(AdapterNameTaken):
        await registry.register("poet", files(tmp_path))
    mended = await register(registry, ADMIN, "poet", tmp_path, change=OwnershipChange(owner="acme"))
    assert mended == Ownership("acme") and names(registry, ACME) == ["poet"]
    await registry.close()


async def test_refusals_come_before_the_files_are_read(registry: Registry, tmp_path: Path) -> None:
    await register(registry, ACME, "poet", tmp_path)
    broken = write_adapter(tmp_path / "broken", weights=b"x")
    with acting_as(LABS):
        with pytest.raises(AdapterNameTaken):
            registry.check_registrable("poet")
        with pytest.raises(AdapterNameTaken):
            await registry.register("poet", broken)
        assert registry.check_registrable("mine") == Ownership("labs")

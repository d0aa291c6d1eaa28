"""Pins against changes of the adapter that happen at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from control_plane.access.visibility import Ownership
from control_plane.adapters.pins import Pins
from control_plane.errors import PinBudgetExceeded, QuotaExceeded
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST, FakeRegistry, FakeWeights
from tests.control_plane.api.fakes import FakeFleet


class MeanwhileWeights(FakeWeights):
    """While a pin is under way, a new version of "a" becomes active."""

    def __init__(self, registry: FakeRegistry) -> None:
        super().__init__([])
        self._registry = registry

    async def pin(self, digest: str, holder: str = "") -> None:
        await super().pin(digest, holder)
        await self._registry.activate("a", OTHER_DIGEST)


async def test_version_that_became_active_during_a_pin_is_the_pinned_one() -> None:
    registry, fleet = FakeRegistry(), FakeFleet([])
    weights = MeanwhileWeights(registry)
    registry.add("a", DIGEST, OTHER_DIGEST)
    record = await Pins(registry, weights, fleet).pin("a")
    assert record.active_digest == OTHER_DIGEST
    assert weights.pinned == [*fleet.pinned] == [OTHER_DIGEST]


@pytest.mark.parametrize("change", ["unpinned", "deleted", "updated again"])
async def test_pin_follows_what_the_registry_says_by_then(change: str) -> None:
    registry, fleet, weights = FakeRegistry(), FakeFleet([]), FakeWeights([])
    pins = Pins(registry, weights, fleet)
    registry.add("a", DIGEST, OTHER_DIGEST)
    await pins.pin("a")
    updated = await registry.activate("a", OTHER_DIGEST)
    # Before the one who updated it comes to move the pin, somebody else is faster.
    if change == "unpinned":
        await pins.unpin("a")
    elif change == "deleted":
        del registry.records["a"]
        await pins.forget("a")
    else:
        registry.records["a"] = replace(updated, active_digest=DIGEST)
        await pins.follow("a")
    await pins.follow(updated.adapter_id)
    expected = [DIGEST] if change == "updated again" else []
    assert weights.pinned == [*fleet.pinned] == expected


async def test_a_store_that_hangs_for_one_name_holds_up_no_other() -> None:
    registry, fleet, weights = FakeRegistry(), FakeFleet([]), FakeWeights([])
    pins = Pins(registry, weights, fleet)
    registry.add("hung", DIGEST)
    registry.add("other", OTHER_DIGEST)
    gate = weights.pin_gate = asyncio.Event()
    hung = asyncio.ensure_future(pins.pin("hung"))
    await asyncio.wait_for(weights.pin_begun.wait(), 30)
    weights.pin_gate = None
    async with asyncio.timeout(30):
        assert (await pins.pin("other")).is_pinned
        await pins.unpin("other")
    gate.set()
    assert (await hung).is_pinned


async def test_two_names_of_one_digest_pin_it_once_whatever_the_order() -> None:
    registry, fleet, weights = FakeRegistry(), FakeFleet([]), FakeWeights([])
    pins = Pins(registry, weights, fleet)
    names = [f"n{number}" for number in range(5)]
    for name in names:
        registry.add(name, DIGEST)
    await asyncio.gather(*(pins.pin(name) for name in names))
    assert weights.pinned == [*fleet.pinned] == [DIGEST]
    await asyncio.gather(*(pins.unpin(name) for name in names[1:]), pins.pin(names[0]))
    assert weights.pinned == [*fleet.pinned] == [DIGEST]
    await pins.unpin(names[0])
    assert weights.pinned == [*fleet.pinned] == []


async def test_each_tenant_holds_its_own_pin_of_weights_that_several_have() -> None:
    """What a pin costs does not depend on what others have pinned. The devices have the weights pinned once."""
    registry, fleet, weights = FakeRegistry(), FakeFleet([]), FakeWeights([])
    pins = Pins(registry, weights, fleet)
    for name, owner in (("a1", "acme"), ("a2", "acme"), ("b", "labs"), ("c", "")):
        registry.records[name] = replace(registry.add(name, DIGEST), ownership=Ownership(owner))
        await pins.pin(name)
    assert weights.pins == [(DIGEST, "acme"), (DIGEST, "labs"), (DIGEST, "")]
    assert [*fleet.pinned] == [DIGEST]
    registry.records["c"] = replace(registry.records["c"], ownership=Ownership("ops"))
    await pins.follow("c")
    assert weights.pins == [(DIGEST, "acme"), (DIGEST, "labs"), (DIGEST, "ops")]
    for name in ("a1", "c", "b"):
        await pins.unpin(name)
        assert [*fleet.pinned] == [DIGEST]
    assert weights.pins == [(DIGEST, "acme")]
    await pins.unpin("a2")
    assert not weights.pins and not fleet.pinned


async def test_a_tenant_pins_no_more_than_its_quota_and_takes_nothing_from_others() -> None:
    registry, fleet, weights = FakeRegistry(), FakeFleet([]), FakeWeights([])
    pins = Pins(registry, weights, fleet, {"acme": 1500, "labs": None}.__getitem__)  # a version has 1000 bytes
    for name, digest, owner in (
        ("a1", DIGEST, "acme"),
        ("a2", DIGEST, "acme"),
        ("a3", OTHER_DIGEST, "acme"),
        ("b1", DIGEST, "labs"),
        ("b2", OTHER_DIGEST, "labs"),
        ("c1", OTHER_DIGEST, ""),
    ):
        registry.records[name] = replace(registry.add(name, digest), ownership=Ownership(owner))
    await pins.pin("a1")
    await pins.pin("a2")  # the same weights: once for the tenant
    with pytest.raises(QuotaExceeded, match=r"tenant acme: 1000 bytes are pinned, and 1000 more .* is 1500") as caught:
        await pins.pin("a3")
    assert (caught.value.tenant, caught.value.quota, caught.value.limit) == ("acme", "max_pinned_bytes", 1500)
    assert not registry.records["a3"].is_pinned and weights.pins == [(DIGEST, "acme")]
    for name in ("b1", "b2", "c1"):
        await pins.pin(name)
    await pins.unpin("a1")
    with pytest.raises(QuotaExceeded):
        await pins.pin("a3")
    await pins.unpin("a2")
    await pins.pin("a3")


async def test_a_pin_that_fails_is_not_counted() -> None:
    registry, fleet, weights = FakeRegistry(), FakeFleet([]), FakeWeights([])
    pins = Pins(registry, weights, fleet, lambda _tenant: 1000)
    registry.records["a"] = replace(registry.add("a", DIGEST), ownership=Ownership("acme"))
    weights.max_pinned = 0
    with pytest.raises(PinBudgetExceeded):
        await pins.pin("a")
    weights.max_pinned = 1
    await pins.pin("a")


async def test_two_pins_at_the_same_time_do_not_exceed_the_quota() -> None:
    registry, fleet, weights = FakeRegistry(), FakeFleet([]), FakeWeights([])
    pins = Pins(registry, weights, fleet, lambda _tenant: 1500)
    for name, digest in (("a", DIGEST), ("b", OTHER_DIGEST)):
        registry.records[name] = replace(registry.add(name, digest), ownership=Ownership("acme"))
    gate = weights.pin_gate = asyncio.Event()
    first = asyncio.ensure_future(pins.pin("a"))
    await asyncio.wait_for(weights.pin_begun.wait(), 30)
    with pytest.raises(QuotaExceeded):
        await pins.pin("b")
    gate.set()
    assert (await first).is_pinned

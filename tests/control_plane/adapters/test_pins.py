"""Pins against changes of the adapter that happen at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from control_plane.access.visibility import Ownership
from control_plane.adapters.pins import Pins
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

"""The life cycle as an entrance other than gRPC calls it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.access.principal import Principal, Role, of_roles
from control_plane.access.visibility import Ownership
from control_plane.adapters.life_cycle import AdapterLifeCycle, Placements, Registration
from control_plane.adapters.operations import OperationStore
from control_plane.adapters.sources.adapter_source import LocalSource
from control_plane.caller import Caller, acting_as
from control_plane.errors import AdapterNotActive, AdapterNotFound, Exhausted, OperationNotFound
from control_plane.registry.ownership_change import OwnershipChange
from control_plane.store_calls import StoreCalls
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST, FakeRegistry, FakeWeights
from tests.control_plane.api.fakes import FakeFleet


class Tiers:
    """A life cycle over fakes."""

    def __init__(self, *, max_running: int = 64) -> None:
        self.registry = FakeRegistry()
        self.weights, self.fleet = FakeWeights(self.registry.calls), FakeFleet(self.registry.calls)
        self.operations = OperationStore(max_running=max_running)
        self.life_cycle = AdapterLifeCycle(
            registry=self.registry, weights=self.weights, fleet=self.fleet, operations=self.operations
        )


async def test_an_admin_job_deletes_an_adapter_and_the_audit_log_names_it(caplog: pytest.LogCaptureFixture) -> None:
    tiers = Tiers()
    tiers.registry.add("poet", DIGEST, OTHER_DIGEST)
    with caplog.at_level(logging.INFO, logger="motet.audit"), acting_as(Caller(principal=Principal("retention job"))):
        operation = await tiers.life_cycle.delete_version("poet", OTHER_DIGEST)
        assert await operation.wait(60) and operation.error is None
        with pytest.raises(AdapterNotFound):
            await tiers.life_cycle.delete("nobody")
    assert [call[0] for call in tiers.registry.calls] == [
        "begin_delete_version",
        "unload",
        "drop",
        "finish_delete_version",
    ]
    assert [record.getMessage() for record in caplog.records if record.name == "motet.audit"] == [
        f"action=adapter.delete_version resource=adapters/poet digest={OTHER_DIGEST} tenant=default "
        "principal=retention job peer= outcome=success reason=",
        "action=adapter.delete resource=adapters/nobody digest= tenant=default principal=retention job peer= "
        "outcome=denied reason=ADAPTER_NOT_FOUND",
    ]


async def test_placements_report_every_tier() -> None:
    tiers = Tiers()
    record = tiers.registry.add("poet")
    assert tiers.life_cycle.placements(record) == Placements(True, True, ("w0",))
    assert tiers.life_cycle.placements(tiers.registry.add("bard", OTHER_DIGEST)) == Placements(True, False, ())


async def test_registering_as_an_operation_gives_what_registering_gives() -> None:
    tiers = Tiers()
    operation = tiers.life_cycle.start_registering(Registration("poet", display_name="Poet"), NO_FILES)
    assert await operation.wait(60)
    assert operation.registered is not None and operation.registered.record.display_name == "Poet"
    assert tiers.weights.stored == [DIGEST]


async def test_deletions_that_wait_for_streams_stop_nobody_elses_work() -> None:
    tiers = Tiers(max_running=1)
    life_cycle, registry = tiers.life_cycle, tiers.registry
    names = [f"n{number}" for number in range(70)]
    for number, name in enumerate(names):
        registry.add(name, f"{number:064x}")  # weights of its own: its deletion waits
    registry.add("poet", DIGEST, OTHER_DIGEST)
    gate = tiers.fleet.unload_gate = asyncio.Event()
    for name in names:
        await life_cycle.delete(name)
    await life_cycle.delete_version("poet", OTHER_DIGEST)
    registry.gate = asyncio.Event()
    life_cycle.start_registering(Registration("bard"), NO_FILES)
    with pytest.raises(Exhausted, match="1 operations are running, at most 1"):  # this one works, and has its limit
        life_cycle.start_registering(Registration("bard"), NO_FILES)
    registry.gate.set()
    gate.set()
    await tiers.operations.close(timeout_s=5)
    assert sorted(registry.records) == ["bard", "poet"]


NO_FILES = LocalSource({}, Path("/"), StoreCalls())
ACME = Caller("acme", Principal("key:a", of_roles({Role.ADAPTERS_WRITE}), ("acme",)))
LABS = Caller("labs", Principal("key:l", of_roles({Role.ADAPTERS_WRITE}), ("labs",)))


async def test_a_deletion_near_its_end_is_joined_by_its_owner_and_hidden_from_others() -> None:
    """There is no record of the name any more, and the operation still runs."""
    tiers = Tiers()
    tiers.registry.records["poet"] = replace(tiers.registry.add("poet", DIGEST), ownership=Ownership("acme"))
    tiers.fleet.unload_gate = asyncio.Event()
    with acting_as(ACME):
        operation = await tiers.life_cycle.delete("poet")
    assert tiers.registry.find("poet") is None and not operation.is_done
    with acting_as(LABS):
        with pytest.raises(AdapterNotFound):
            await tiers.life_cycle.delete("poet")
        with pytest.raises(OperationNotFound):
            tiers.operations.get(operation.operation_id)
        assert tiers.operations.find(operation.operation_id) is None
    with acting_as(ACME):
        assert await tiers.life_cycle.delete("poet") is operation
        assert tiers.operations.get(operation.operation_id) is operation
        # Somebody else got the name meanwhile: the former owner's deletion is not the new owner's.
        tiers.registry.records["poet"] = replace(tiers.registry.add("poet", OTHER_DIGEST), ownership=Ownership("labs"))
    with acting_as(LABS), pytest.raises(AdapterNotActive, match="is being deleted; try again"):
        await tiers.life_cycle.delete("poet")
    tiers.fleet.unload_gate.set()
    assert await operation.wait(30)


async def test_a_pin_follows_the_adapter_to_its_new_owner() -> None:
    tiers = Tiers()
    tiers.registry.records["poet"] = replace(tiers.registry.add("poet", DIGEST), ownership=Ownership("acme"))
    await tiers.life_cycle.pin("poet")
    assert tiers.weights.pins == [(DIGEST, "acme")]
    await tiers.life_cycle.update("poet", ownership=OwnershipChange(owner="labs"))
    assert tiers.weights.pins == [(DIGEST, "labs")]

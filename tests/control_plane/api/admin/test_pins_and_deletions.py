"""PinAdapter, UnpinAdapter, DeleteAdapter and DeleteAdapterVersion over a real channel: every tier follows."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import empty_pb2
from motet.v1 import adapters_pb2

from tests.control_plane.api.admin.calls import FILES, adapters, finished, messages, refused, upload
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST
from tests.control_plane.api.fakes import Api


async def test_pin_follows_the_active_version_and_is_shared_by_names(api: Api) -> None:
    api.registry.add("a", DIGEST, OTHER_DIGEST)
    api.registry.add("b", DIGEST)
    for name in ("adapters/a", "adapters/b", "adapters/a"):
        assert (await adapters(api).PinAdapter(adapters_pb2.PinAdapterRequest(name=name))).adapter.pinned
    assert api.weights.pinned == [DIGEST]
    await adapters(api).ActivateAdapterVersion(
        adapters_pb2.ActivateAdapterVersionRequest(name="adapters/a", digest=OTHER_DIGEST)
    )
    assert sorted(api.weights.pinned) == sorted(api.fleet.pinned) == [DIGEST, OTHER_DIGEST]
    for name in ("adapters/b", "adapters/b"):
        assert not (await adapters(api).UnpinAdapter(adapters_pb2.UnpinAdapterRequest(name=name))).adapter.pinned
    assert api.weights.pinned == [*api.fleet.pinned] == [OTHER_DIGEST]


async def test_pin_beyond_the_budget_changes_nothing(api: Api) -> None:
    api.registry.add("a")
    api.weights.max_pinned = 0
    code, reason, _ = await refused(adapters(api).PinAdapter(adapters_pb2.PinAdapterRequest(name="adapters/a")))
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "PIN_BUDGET")
    assert not api.registry.records["a"].is_pinned and not api.fleet.pinned


async def test_pins_are_restored_from_the_registry(api: Api) -> None:
    api.registry.add("a")
    await api.registry.set_pinned("a")
    api.registry.add("b", OTHER_DIGEST)
    await api.life_cycle.restore_pins()
    assert api.weights.pinned == [*api.fleet.pinned] == [DIGEST]


async def left(handler: asyncio.Task[Any], begun: asyncio.Event, gate: asyncio.Event) -> None:
    """Cancels the handler once `begun` is set, as gRPC does when a client leaves; then lets what it waits for go on."""
    await asyncio.wait_for(begun.wait(), 60)
    handler.cancel()
    await asyncio.wait([handler])
    assert handler.cancelled()
    gate.set()


@pytest.mark.parametrize("change", ["activate", "create"])
async def test_pin_follows_a_new_version_though_the_client_leaves(api: Api, change: str) -> None:
    api.registry.add("a", OTHER_DIGEST, DIGEST)
    await api.life_cycle.pin("a")
    context: Any = None
    gate = api.weights.pin_gate = asyncio.Event()
    api.weights.pin_begun.clear()
    if change == "activate":
        request = adapters_pb2.ActivateAdapterVersionRequest(name="adapters/a", digest=DIGEST)
        handler = asyncio.create_task(api.adapters.ActivateAdapterVersion(request, context))
        await left(handler, api.weights.pin_begun, gate)
    else:
        (api.root / "x").mkdir()
        for name, data in FILES.items():
            (api.root / "x" / name).write_bytes(data)
        create = adapters_pb2.CreateAdapterRequest(adapter_id="a", source="team/x")
        operation = await api.adapters.CreateAdapter(create, context)
        running = api.operations.get(operation.name.removeprefix("operations/"))
        await asyncio.wait_for(api.weights.pin_begun.wait(), 60)
        running.cancel()
        assert await running.wait(60)
        gate.set()
    await api.life_cycle.restore_pins()  # comes after the change, which holds the lock of the name
    assert api.weights.pinned == [*api.fleet.pinned] == [DIGEST]


async def test_pin_and_unpin_reach_every_tier_though_the_client_leaves(api: Api) -> None:
    api.registry.add("a")
    context: Any = None
    for is_pinned in (True, False):
        gate = api.registry.response_gate = asyncio.Event()
        api.registry.response_due.clear()
        if is_pinned:
            pin = adapters_pb2.PinAdapterRequest(name="adapters/a")
            handler: asyncio.Task[Any] = asyncio.create_task(api.adapters.PinAdapter(pin, context))
        else:
            unpin = adapters_pb2.UnpinAdapterRequest(name="adapters/a")
            handler = asyncio.create_task(api.adapters.UnpinAdapter(unpin, context))
        await left(handler, api.registry.response_due, gate)
        await api.life_cycle.restore_pins()  # comes after the change, which holds the lock of the name
        assert api.registry.records["a"].is_pinned == is_pinned
        wanted = [DIGEST] if is_pinned else []
        async with asyncio.timeout(5):
            while not api.weights.pinned == [*api.fleet.pinned] == wanted:
                await asyncio.sleep(0)  # the call whose client left goes on


async def test_delete_whose_client_leaves_is_ended_all_the_same(api: Api) -> None:
    api.registry.add("poet")
    api.registry.delete_gate = asyncio.Event()
    context: Any = None
    request = adapters_pb2.DeleteAdapterRequest(name="adapters/poet", request_id="w")
    handler = asyncio.create_task(api.adapters.DeleteAdapter(request, context))
    await asyncio.wait_for(api.registry.delete_begun.wait(), 60)
    handler.cancel()  # what gRPC does when a client leaves
    await asyncio.wait([handler])
    assert handler.cancelled()
    api.registry.delete_gate.set()
    await asyncio.wait_for(api.registry.delete_finished.wait(), 60)
    assert api.calls[-1] == ("finish_delete", "poet")
    again = await api.adapters.DeleteAdapter(request, context)
    assert (await finished(api, again)).response.Unpack(empty_pb2.Empty()), "the client comes back"


async def test_delete_clears_every_tier_in_order(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    await api.life_cycle.pin("poet")
    api.fleet.unload_gate = asyncio.Event()
    operation = await adapters(api).DeleteAdapter(adapters_pb2.DeleteAdapterRequest(name="adapters/poet", etag="u1-1"))
    assert not operation.done
    code, _, _ = await refused(adapters(api).GetAdapter(adapters_pb2.GetAdapterRequest(name="adapters/poet")))
    assert code == grpc.StatusCode.NOT_FOUND  # at once, not when the operation ends
    api.fleet.unload_gate.set()
    assert (await finished(api, operation)).response.Unpack(empty_pb2.Empty())
    assert api.calls == [
        ("begin_delete", "poet", "u1-1"),
        ("unload", DIGEST),
        ("drop", DIGEST),
        ("unload", OTHER_DIGEST),
        ("drop", OTHER_DIGEST),
        ("finish_delete", "poet"),
    ]
    assert not api.weights.pinned and not api.fleet.pinned
    code, _, _ = await refused(adapters(api).DeleteAdapter(adapters_pb2.DeleteAdapterRequest(name="adapters/poet")))
    assert code == grpc.StatusCode.NOT_FOUND


async def test_second_delete_joins_the_first(api: Api) -> None:
    api.registry.add("poet")
    api.registry.delete_gate, api.fleet.unload_gate = asyncio.Event(), asyncio.Event()
    stub, request = adapters(api), adapters_pb2.DeleteAdapterRequest(name="adapters/poet")
    context: Any = None
    first = asyncio.ensure_future(stub.DeleteAdapter(request))
    await asyncio.wait_for(api.registry.delete_begun.wait(), 60)
    second = asyncio.create_task(api.adapters.DeleteAdapter(request, context))
    await asyncio.sleep(0)
    api.registry.delete_gate.set()
    operation = await asyncio.wait_for(first, 60)
    third = await stub.DeleteAdapter(request)
    assert operation.name == (await second).name == third.name
    api.fleet.unload_gate.set()
    assert (await finished(api, operation)).response.Unpack(empty_pb2.Empty())
    assert [call[0] for call in api.calls] == ["begin_delete", "unload", "drop", "finish_delete"]


async def test_a_repeated_deletion_gets_the_first_ones_operation_after_its_end(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    stub = adapters(api)
    version = adapters_pb2.DeleteAdapterVersionRequest(name="adapters/poet", digest=OTHER_DIGEST, request_id="v")
    whole = adapters_pb2.DeleteAdapterRequest(name="adapters/poet", request_id="w")
    calls: list[tuple[Any, Any]] = [(stub.DeleteAdapterVersion, version), (stub.DeleteAdapter, whole)]
    for delete, request in calls:
        operation = await delete(request)
        await finished(api, operation)
        again = await delete(request)
        assert again.name == operation.name and again.done, "the operation as it stands"
    other = adapters_pb2.DeleteAdapterRequest(name="adapters/poet", request_id="other")
    assert (await refused(stub.DeleteAdapter(other)))[0] == grpc.StatusCode.NOT_FOUND
    api.registry.add("poet")
    await stub.DeleteAdapter(whole)
    assert "poet" in api.registry.records, "registered anew, it is another adapter"
    whole.etag = "u1-1"
    assert (await refused(stub.DeleteAdapter(whole)))[1:] == ("FIELD_INVALID", ["request_id"])
    assert [call[0] for call in api.calls if str(call[0]).startswith("begin")] == [
        "begin_delete_version",
        "begin_delete",
    ]


async def test_a_deletion_that_was_refused_may_be_repeated_with_its_request_id(api: Api) -> None:
    stub, request = adapters(api), adapters_pb2.DeleteAdapterRequest(name="adapters/poet", request_id="w")
    assert (await refused(stub.DeleteAdapter(request)))[0] == grpc.StatusCode.NOT_FOUND
    api.registry.add("poet")
    await finished(api, await stub.DeleteAdapter(request))
    assert "poet" not in api.registry.records


async def test_a_version_is_deleted_when_its_streams_have_ended(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    gate = api.fleet.unload_gate = asyncio.Event()
    request = adapters_pb2.DeleteAdapterVersionRequest(name="adapters/poet", digest=OTHER_DIGEST, etag="u1-1")
    stub = adapters(api)
    operation = await stub.DeleteAdapterVersion(request)
    metadata = adapters_pb2.AdapterOperationMetadata()
    assert operation.metadata.Unpack(metadata)
    assert (metadata.adapter, metadata.verb, metadata.digest) == ("adapters/poet", "delete_version", OTHER_DIGEST)
    assert (await stub.DeleteAdapterVersion(request)).name == operation.name  # a second call joins it
    assert [v.digest for v in api.registry.records["poet"].versions] == [DIGEST]  # at once
    gate.set()
    assert (await finished(api, operation)).response.Unpack(empty_pb2.Empty())
    assert api.calls == [
        ("begin_delete_version", "poet", OTHER_DIGEST, "u1-1"),
        ("unload", OTHER_DIGEST),
        ("drop", OTHER_DIGEST),
        ("finish_delete_version", OTHER_DIGEST),
    ]


async def test_weights_of_a_deleted_version_that_a_name_has_stay(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    api.registry.add("bard", OTHER_DIGEST)
    request = adapters_pb2.DeleteAdapterVersionRequest(name="adapters/poet", digest=OTHER_DIGEST)
    await finished(api, await adapters(api).DeleteAdapterVersion(request))
    assert [call[0] for call in api.calls] == ["begin_delete_version", "finish_delete_version"]


async def test_bad_deletions_of_versions_are_refused_and_may_be_tried_again(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    stub = adapters(api)

    def ask(name: str = "adapters/poet", digest: str = DIGEST) -> Any:
        return refused(stub.DeleteAdapterVersion(adapters_pb2.DeleteAdapterVersionRequest(name=name, digest=digest)))

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert await ask(digest="ab") == (invalid, "FIELD_INVALID", ["digest"])
    assert await ask(name="poet") == (invalid, "FIELD_INVALID", ["name"])
    assert (await ask(name="adapters/nobody"))[:2] == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
    for _ in range(2):
        assert (await ask())[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_ACTIVE")
    await api.registry.activate("poet", OTHER_DIGEST)
    request = adapters_pb2.DeleteAdapterVersionRequest(name="adapters/poet", digest=DIGEST)
    await finished(api, await stub.DeleteAdapterVersion(request))


async def test_weights_that_another_name_registers_are_not_dropped(api: Api) -> None:
    api.registry.add("poet")
    api.fleet.unload_gate = asyncio.Event()  # the other name's traffic would hold it back for ever
    operation = await adapters(api).DeleteAdapter(adapters_pb2.DeleteAdapterRequest(name="adapters/poet"))
    await asyncio.wait_for(api.fleet.unload_begun.wait(), 60)
    await upload(api, messages("bard"))
    assert (await finished(api, operation)).response.Unpack(empty_pb2.Empty())
    assert api.calls[-1] == ("finish_delete", "poet") and ("drop", DIGEST) not in api.calls

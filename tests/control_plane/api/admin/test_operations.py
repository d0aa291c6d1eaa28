"""google.longrunning.Operations over a real channel."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import duration_pb2

from control_plane.adapters.operations import Operation
from control_plane.errors import StoreUnavailable
from control_plane.registry.records import Registered
from tests.control_plane.api.fake_adapters import DIGEST, adapter_record, adapter_version
from tests.control_plane.api.fakes import Api, details


def stub(api: Api) -> Any:
    return api.stub(operations_pb2_grpc.OperationsStub)


def name_of(operation: Operation) -> str:
    return f"operations/{operation.operation_id}"


async def done() -> None:
    return None


async def test_wait_returns_the_operation_as_it_stands_after_the_timeout(api: Api) -> None:
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()

    operation = api.operations.start("a", "create", work, owner="", is_cancellable=True)
    request = operations_pb2.WaitOperationRequest(name=name_of(operation), timeout=duration_pb2.Duration(nanos=1000))
    assert not (await stub(api).WaitOperation(request)).done
    waiting = asyncio.ensure_future(
        stub(api).WaitOperation(operations_pb2.WaitOperationRequest(name=name_of(operation)))
    )
    gate.set()
    assert (await waiting).done
    assert (await stub(api).GetOperation(operations_pb2.GetOperationRequest(name=name_of(operation)))).done


@pytest.mark.parametrize("has_begun", [True, False])
async def test_cancel_ends_a_creation(api: Api, has_begun: bool) -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    operation = api.operations.start("a", "create", work, owner="", is_cancellable=True)
    if has_begun:
        await begun.wait()
        await stub(api).CancelOperation(operations_pb2.CancelOperationRequest(name=name_of(operation)))
    else:
        operation.cancel()
    ended = await stub(api).WaitOperation(operations_pb2.WaitOperationRequest(name=name_of(operation)))
    assert ended.error.code == grpc.StatusCode.CANCELLED.value[0]


async def test_cancel_does_not_stop_a_deletion(api: Api) -> None:
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()

    operation = api.operations.start("a", "delete", work, owner="", is_cancellable=False)
    await stub(api).CancelOperation(operations_pb2.CancelOperationRequest(name=name_of(operation)))
    gate.set()
    ended = await stub(api).WaitOperation(operations_pb2.WaitOperationRequest(name=name_of(operation)))
    assert ended.WhichOneof("result") == "response"


async def test_failure_is_reported_in_the_operation(api: Api) -> None:
    async def down() -> None:
        raise StoreUnavailable("the artifact store does not respond; try again")

    async def bug() -> None:
        raise RuntimeError("/root/secret")

    first = api.operations.start("a", "create", down, owner="", is_cancellable=True)
    second = api.operations.start("a", "create", bug, owner="", is_cancellable=True)
    ended = [
        await stub(api).WaitOperation(operations_pb2.WaitOperationRequest(name=name_of(operation)))
        for operation in (first, second)
    ]
    assert ended[0].error.code == grpc.StatusCode.UNAVAILABLE.value[0] and len(ended[0].error.details) == 2
    assert ended[1].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in ended[1].error.message


async def test_list_pages_newest_first_and_delete_forgets(api: Api) -> None:
    names = [name_of(api.operations.start("a", "create", done, owner="", is_cancellable=True)) for _ in range(3)]
    page = await stub(api).ListOperations(operations_pb2.ListOperationsRequest(page_size=2))
    assert [operation.name for operation in page.operations] == [names[2], names[1]]
    rest = await stub(api).ListOperations(
        operations_pb2.ListOperationsRequest(page_size=2, page_token=page.next_page_token)
    )
    assert [operation.name for operation in rest.operations] == [names[0]] and not rest.next_page_token
    await stub(api).DeleteOperation(operations_pb2.DeleteOperationRequest(name=names[0]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(api).GetOperation(operations_pb2.GetOperationRequest(name=names[0]))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert details(caught.value)[0].reason == "OPERATION_NOT_FOUND"


async def test_a_page_ends_where_more_would_be_too_large_for_a_client(api: Api) -> None:
    record = adapter_record("a", [adapter_version(DIGEST)], DIGEST, labels={"l": "v" * 300_000})

    async def register() -> Registered:
        return Registered(record.active_digest, record, None)

    begun = [api.operations.start("a", "create", register, owner="", is_cancellable=True) for _ in range(20)]
    await asyncio.gather(*(operation.wait() for operation in begun))
    names = [name_of(operation) for operation in begun]
    listed: list[str] = []
    token = ""
    while not listed or token:
        request = operations_pb2.ListOperationsRequest(page_size=100, page_token=token)
        page = await stub(api).ListOperations(request)
        assert page.ByteSize() < 3 * 2**20
        listed += [operation.name for operation in page.operations]
        token = page.next_page_token
    assert listed == names[::-1]


@pytest.mark.parametrize("name", ["", "operations/x", "../x", "operations/" + "A" * 32])
async def test_bad_name_is_refused(api: Api, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(api).GetOperation(operations_pb2.GetOperationRequest(name=name))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT

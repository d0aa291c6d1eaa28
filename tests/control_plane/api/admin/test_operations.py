"""google.longrunning.Operations over the operation book."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc  # type: ignore[import-untyped]
from google.protobuf import duration_pb2, empty_pb2
from motet.v1 import adapters_pb2

from control_plane.api.admin.operations import OperationBook
from control_plane.errors import Exhausted, StoreUnavailable
from tests.control_plane.api.fakes import Api, details


def stub(api: Api) -> Any:
    return api.stub(operations_pb2_grpc.OperationsStub)


async def done() -> empty_pb2.Empty:
    return empty_pb2.Empty()


async def test_wait_returns_the_operation_as_it_stands_after_the_timeout(api: Api) -> None:
    gate = asyncio.Event()

    async def work() -> empty_pb2.Empty:
        await gate.wait()
        return empty_pb2.Empty()

    operation = api.book.start("a", "create", work, is_cancellable=True)
    request = operations_pb2.WaitOperationRequest(name=operation.name, timeout=duration_pb2.Duration(nanos=1000))
    assert not (await stub(api).WaitOperation(request)).done
    waiting = asyncio.ensure_future(stub(api).WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name)))
    gate.set()
    assert (await waiting).done
    assert (await stub(api).GetOperation(operations_pb2.GetOperationRequest(name=operation.name))).done


@pytest.mark.parametrize("has_begun", [True, False])
async def test_cancel_ends_a_creation(api: Api, has_begun: bool) -> None:
    begun = asyncio.Event()

    async def work() -> empty_pb2.Empty:
        begun.set()
        await asyncio.Event().wait()
        return empty_pb2.Empty()

    operation = api.book.start("a", "create", work, is_cancellable=True)
    if has_begun:
        await begun.wait()
        await stub(api).CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name))
    else:
        api.book.get(operation.name).task.cancel()  # type: ignore[union-attr]
    ended = await stub(api).WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name))
    assert ended.error.code == grpc.StatusCode.CANCELLED.value[0]


async def test_cancel_does_not_stop_a_deletion(api: Api) -> None:
    gate = asyncio.Event()

    async def work() -> empty_pb2.Empty:
        await gate.wait()
        return empty_pb2.Empty()

    operation = api.book.start("a", "delete", work, is_cancellable=False)
    await stub(api).CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name))
    gate.set()
    ended = await stub(api).WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name))
    assert ended.WhichOneof("result") == "response"


async def test_failure_is_told_in_the_operation(api: Api) -> None:
    async def down() -> empty_pb2.Empty:
        raise StoreUnavailable("the artifact store does not answer; try again")

    async def bug() -> empty_pb2.Empty:
        raise RuntimeError("/root/secret")

    first = api.book.start("a", "create", down, is_cancellable=True)
    second = api.book.start("a", "create", bug, is_cancellable=True)
    ended = [
        await stub(api).WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name))
        for operation in (first, second)
    ]
    assert ended[0].error.code == grpc.StatusCode.UNAVAILABLE.value[0] and len(ended[0].error.details) == 2
    assert ended[1].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in ended[1].error.message


async def test_list_pages_newest_first_and_delete_forgets(api: Api) -> None:
    names = [api.book.start("a", "create", done, is_cancellable=True).name for _ in range(3)]
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
    async def register() -> adapters_pb2.Adapter:
        return adapters_pb2.Adapter(name="adapters/a", labels={"l": "v" * 300_000})

    names = [api.book.start("a", "create", register, is_cancellable=True).name for _ in range(20)]
    await asyncio.gather(*(api.book.get(name).done.wait() for name in names))
    listed, token = [], ""
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


async def test_book_is_bounded() -> None:
    book = OperationBook(wall_clock=lambda: 0.0, max_running=2, max_kept=3)
    gate = asyncio.Event()

    async def work() -> empty_pb2.Empty:
        await gate.wait()
        return empty_pb2.Empty()

    for _ in range(2):
        book.start("a", "create", work, is_cancellable=True)
    with pytest.raises(Exhausted, match="at most 2"):
        book.start("a", "create", work, is_cancellable=True)
    book.start("a", "delete", work, is_cancellable=False, is_waiting=True)  # one that waits always has room
    gate.set()
    await book.close(timeout_s=5)
    for _ in range(5):
        book.start("a", "create", done, is_cancellable=True)
        await book.close(timeout_s=5)
    assert len(book.page(100, "")[0]) == 3

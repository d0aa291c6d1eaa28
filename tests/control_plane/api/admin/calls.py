"""Calls of the adapter service, and what they refuse."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from motet.v1 import adapters_pb2, adapters_pb2_grpc

from tests.control_plane.api.fakes import Api, details

FILES = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": bytes(range(256)) * 300}
Messages = list[adapters_pb2.UploadAdapterRequest]


def messages(
    adapter_id: str = "poet", files: dict[str, bytes] = FILES, chunk_bytes: int = 40_000, **header: Any
) -> Messages:
    listed = [
        adapters_pb2.UploadFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]
    upload = adapters_pb2.UploadHeader(adapter_id=adapter_id, files=listed, **header)
    return [adapters_pb2.UploadAdapterRequest(header=upload)] + [
        adapters_pb2.UploadAdapterRequest(
            chunk=adapters_pb2.UploadChunk(file_index=index, offset=start, data=data[start : start + chunk_bytes])
        )
        for index, data in enumerate(files.values())
        for start in range(0, len(data), chunk_bytes)
    ]


def adapters(api: Api) -> Any:
    return api.stub(adapters_pb2_grpc.AdapterServiceStub)


def operations(api: Api) -> Any:
    return api.stub(operations_pb2_grpc.OperationsStub)


async def upload(api: Api, parts: Iterable[adapters_pb2.UploadAdapterRequest]) -> adapters_pb2.Adapter:
    return (await adapters(api).UploadAdapter(iter(parts), timeout=20)).adapter


async def refused(awaitable: Any) -> tuple[grpc.StatusCode, str, list[str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    info, fields, _ = details(caught.value)
    return caught.value.code(), info.reason, fields


async def finished(api: Api, operation: Any) -> Any:
    done = await operations(api).WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name), timeout=10)
    assert done.done
    return done

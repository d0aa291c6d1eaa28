"""Reflection in both versions, over a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from control_plane.api.rpc import listeners, reflection
from control_plane.errors import DeadlineExceeded

Request = reflection_pb2.ServerReflectionRequest
VERSIONS = ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"]


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = listeners.worker_server()
    reflection.add_to_server(["motet.v1.StatusService"], server)
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened
    await server.stop(None)


async def ask(channel: grpc.aio.Channel, service: str, **question: str) -> Any:
    call: Any = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        Request.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    [response] = [response async for response in call(iter([Request(**question)]), timeout=30)]
    return response


@pytest.mark.parametrize("service", VERSIONS)
async def test_both_versions_list_and_describe_every_service(channel: grpc.aio.Channel, service: str) -> None:
    listed = (await ask(channel, service, list_services="")).list_services_response.service
    assert {one.name for one in listed} == {"motet.v1.StatusService", *VERSIONS}
    for one in listed:
        response = await ask(channel, service, file_containing_symbol=one.name)
        raw = response.file_descriptor_response.file_descriptor_proto[0]
        described = descriptor_pb2.FileDescriptorProto.FromString(raw)
        package, _, name = one.name.rpartition(".")
        assert described.package == package and name in {found.name for found in described.service}


async def test_silent_reflection_stream_ends_by_itself() -> None:
    async def one_question() -> AsyncIterator[Any]:
        yield Request(list_services="")
        await asyncio.Event().wait()

    service = reflection.ReflectionService(["motet.v1.StatusService"], idle_timeout_s=0.01)
    responses = service.ServerReflectionInfo(one_question(), None)
    assert (await anext(responses)).list_services_response.service
    with pytest.raises(DeadlineExceeded, match=r"no request came for 0\.01 s"):
        await anext(responses)

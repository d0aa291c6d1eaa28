"""The gRPC reflection service, in both of its versions, with a bound on silent clients.

grpcio-reflection brings version v1alpha only. v1 has the same messages under another package name, so that one servicer
serves both; its description is made from that of v1alpha.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from control_plane.api.rpc.rpc_server import offer
from control_plane.awake import AwakeClock, AwakeTimeout
from control_plane.errors import DeadlineExceeded

_ALPHA_NAME: str = reflection.SERVICE_NAME
_ALPHA_PACKAGE = _ALPHA_NAME.rpartition(".")[0]
_PACKAGE = "grpc.reflection.v1"
SERVICE_NAMES = (f"{_PACKAGE}.ServerReflection", _ALPHA_NAME)
IDLE_TIMEOUT_S = 30.0


def add_to_server(service_names: Iterable[str], server: Any) -> None:
    """Serve reflection of these services and of itself on `server`."""
    _describe_v1()
    servicer = ReflectionService([*service_names, *SERVICE_NAMES])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in SERVICE_NAMES:
        offer(server, name, {"ServerReflectionInfo": handler})


class ReflectionService(reflection.aio.ReflectionServicer):  # type: ignore[misc, name-defined]  # stubs lack it
    """The library's servicer; ends a stream whose client sends nothing for `idle_timeout_s`."""

    def __init__(self, service_names: Iterable[str], *, idle_timeout_s: float = IDLE_TIMEOUT_S) -> None:
        super().__init__(service_names)
        self._idle_timeout_s = idle_timeout_s
        self._awake = AwakeClock()

    async def ServerReflectionInfo(  # noqa: N802 - the stub's name
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        """One response for each request."""
        responses = super().ServerReflectionInfo(self._timely(requests), context)
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield response

    async def _timely(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        messages = aiter(requests)
        while True:
            try:
                async with AwakeTimeout(self._idle_timeout_s, self._awake):
                    request = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no request came for {self._idle_timeout_s:g} s; open the reflection stream again when needed"
                ) from None
            yield request


def _describe_v1() -> None:
    """Add the description of version v1 to the pool that the servicer reads. Repeating it changes nothing."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = "grpc/reflection/v1/reflection.proto", _PACKAGE
    for field in (field for message in file.message_type for field in message.field if field.type_name):
        field.type_name = _in_v1(field.type_name)
    for method in (method for service in file.service for method in service.method):
        method.input_type, method.output_type = _in_v1(method.input_type), _in_v1(method.output_type)
    descriptor_pool.Default().Add(file)


def _in_v1(name: str) -> str:
    return name.replace(f".{_ALPHA_PACKAGE}.", f".{_PACKAGE}.")

"""Every unary call of the SDK as data: which method, which message, how to read the response.

The sync and the async client only send them, so that nothing is written twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.longrunning import operations_pb2
from google.protobuf.message import Message

from motet.errors import MotetError, error_from_status, invalid_field
from motet.types import Adapter, AdapterVersion, AdapterVisibility, ServerStatus, VersionRollout
from motet.v1 import adapters_pb2, generation_pb2, status_pb2, verify_pb2
from motet.wire import adapter_from, rollout_message, status_from, version_from, visibility_message

T = TypeVar("T")
R = TypeVar("R", covariant=True)

GENERATE = "/motet.v1.GenerationService/Generate"
GENERATE_WITH_TASK = "/motet.v1.GenerationService/GenerateWithTask"
_ADAPTERS = "/motet.v1.AdapterService/"


@dataclass(frozen=True)
class UnaryCall(Generic[T]):
    """One call to be sent."""

    method: str  # full path, "/package.Service/Method"
    request: Message
    response_type: type[Message]
    read: Callable[[Any], T]  # turns the response into what the caller gets
    is_repeatable: bool  # may be made twice: a read, or a write whose repetition changes nothing

    def on(self, channel: Any) -> Any:
        """The method of a channel of grpc or grpc.aio, to be called with `request`."""
        return channel.unary_unary(
            self.method,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=self.response_type.FromString,
        )


class StreamedCall(Protocol[R]):
    """A call whose request is a stream of messages. It may be made twice: a repetition changes nothing.

    Before each attempt the client sends the call that `resumption` returns, and gives the response to `resume`.
    """

    method: str
    request_type: Any
    response_type: Any
    failure: MotetError | None  # what broke on this side while the messages were made

    def messages(self) -> Iterator[Any]:
        """The request, from its beginning or from where `resume` says."""

    def resumption(self) -> UnaryCall[Any] | None:
        """The call that returns how much of a broken attempt the server has. None: the call begins at its beginning."""

    def resume(self, received: Any) -> None:
        """Go on after what the server has, as `resumption` reads it. None: it has nothing."""

    def is_out_of_step(self, error: MotetError) -> bool:
        """Whether a continued attempt failed only because the server has more or less than it reported before.

        Then the call of `resumption` is due once more.
        """

    def read(self, response: Any) -> R:
        """What the caller gets."""


def stream_method(channel: Any, call: StreamedCall[Any]) -> Any:
    """The method of a channel of grpc, to be called with `messages()`."""
    return channel.stream_unary(
        call.method,
        request_serializer=call.request_type.SerializeToString,
        response_deserializer=call.response_type.FromString,
    )


@dataclass(frozen=True)
class Page(Generic[T]):
    """One page of a list."""

    items: list[T]
    next_page_token: str  # empty at the end


def generate_method(channel: Any) -> Any:
    """The method Generate of a channel of grpc or grpc.aio."""
    return channel.unary_stream(
        GENERATE,
        request_serializer=generation_pb2.GenerateRequest.SerializeToString,
        response_deserializer=generation_pb2.GenerateResponse.FromString,
    )


def generate_with_task_method(channel: Any) -> Any:
    """The method GenerateWithTask of a channel of grpc, whose responses are those of Generate."""
    return channel.stream_stream(
        GENERATE_WITH_TASK,
        request_serializer=generation_pb2.GenerateWithTaskRequest.SerializeToString,
        response_deserializer=lambda data: generation_pb2.GenerateWithTaskResponse.FromString(data).response,
    )


def resource_name(name: str) -> str:
    """ "adapters/{id}" for either spelling."""
    if not name.removeprefix("adapters/"):
        raise invalid_field("name", "is empty; give the adapter's name")
    return name if name.startswith("adapters/") else f"adapters/{name}"


def get_adapter(name: str) -> UnaryCall[Adapter]:
    return adapter_call("GetAdapter", adapters_pb2.GetAdapterRequest(name=resource_name(name)), is_repeatable=True)


def pin_adapter(name: str) -> UnaryCall[Adapter]:
    return adapter_call("PinAdapter", adapters_pb2.PinAdapterRequest(name=resource_name(name)), is_repeatable=True)


def unpin_adapter(name: str) -> UnaryCall[Adapter]:
    request = adapters_pb2.UnpinAdapterRequest(name=resource_name(name))
    return adapter_call("UnpinAdapter", request, is_repeatable=True)


def activate_version(name: str, digest: str, etag: str, expected_digest: str) -> UnaryCall[Adapter]:
    request = adapters_pb2.ActivateAdapterVersionRequest(
        name=resource_name(name), digest=digest, etag=etag, expected_digest=expected_digest
    )
    return adapter_call("ActivateAdapterVersion", request, is_repeatable=False)  # another may be active meanwhile


def update_adapter(
    name: str,
    display_name: str | None,
    labels: Mapping[str, str] | None,
    visibility: AdapterVisibility | str | None,
    shared_with: Sequence[str] | None,
    owner: str | None,
    etag: str,
    add_more: Callable[[adapters_pb2.UpdateAdapterRequest], None],
) -> UnaryCall[Adapter]:
    """Changes what is not None, and what `add_more` adds to the request."""
    request = adapters_pb2.UpdateAdapterRequest(adapter=adapters_pb2.Adapter(name=resource_name(name), etag=etag))
    adapter, paths = request.adapter, request.update_mask.paths
    if display_name is not None:
        adapter.display_name = display_name
        paths.append("display_name")
    if labels is not None:
        adapter.labels.update(labels)
        paths.append("labels")
    if visibility is not None:
        adapter.visibility = visibility_message(visibility)
        paths.append("visibility")
    if shared_with is not None:
        adapter.shared_with.extend(shared_with)
        paths.append("shared_with")
    if owner is not None:
        adapter.owner = owner
        paths.append("owner")
    add_more(request)
    if not paths:
        raise invalid_field("update_mask", "nothing to change; give what to change, such as display_name or labels")
    return adapter_call("UpdateAdapter", request, is_repeatable=False)  # another may have changed it meanwhile


def list_adapters(page_size: int, page_token: str) -> UnaryCall[Page[Adapter]]:
    return UnaryCall(
        _ADAPTERS + "ListAdapters",
        adapters_pb2.ListAdaptersRequest(page_size=page_size, page_token=page_token),
        adapters_pb2.ListAdaptersResponse,
        lambda response: Page([adapter_from(item) for item in response.adapters], response.next_page_token),
        is_repeatable=True,
    )


def list_versions(name: str, page_size: int, page_token: str) -> UnaryCall[Page[AdapterVersion]]:
    return UnaryCall(
        _ADAPTERS + "ListAdapterVersions",
        adapters_pb2.ListAdapterVersionsRequest(name=resource_name(name), page_size=page_size, page_token=page_token),
        adapters_pb2.ListAdapterVersionsResponse,
        lambda response: Page([version_from(item) for item in response.versions], response.next_page_token),
        is_repeatable=True,
    )


def create_adapter(
    name: str,
    source: str,
    display_name: str,
    labels: Mapping[str, str] | None,
    visibility: AdapterVisibility | str | None,
    shared_with: Sequence[str],
    owner: str,
    rollout: VersionRollout | None,
    *,
    validate_only: bool,
) -> UnaryCall[operations_pb2.Operation]:
    request = adapters_pb2.CreateAdapterRequest(
        adapter_id=name.removeprefix("adapters/"),
        source=source,
        display_name=display_name,
        labels=dict(labels or {}),
        visibility=visibility_message(visibility),
        shared_with=shared_with,
        owner=owner,
        rollout=rollout_message(rollout),
        validate_only=validate_only,
        request_id=uuid.uuid4().hex,  # sent again after a lost response, it begins nothing twice
    )
    return _operation_call(_ADAPTERS + "CreateAdapter", request, is_repeatable=True)


def delete_adapter(name: str, etag: str) -> UnaryCall[operations_pb2.Operation]:
    # By its id the server knows a repeated call, and does not delete an adapter that was registered anew in between.
    request = adapters_pb2.DeleteAdapterRequest(name=resource_name(name), etag=etag, request_id=uuid.uuid4().hex)
    return _operation_call(_ADAPTERS + "DeleteAdapter", request, is_repeatable=True)


def delete_version(name: str, digest: str, etag: str) -> UnaryCall[operations_pb2.Operation]:
    request = adapters_pb2.DeleteAdapterVersionRequest(
        name=resource_name(name), digest=digest, etag=etag, request_id=uuid.uuid4().hex
    )
    return _operation_call(_ADAPTERS + "DeleteAdapterVersion", request, is_repeatable=True)


def verify_version(
    name: str, digest: str, prompts: Sequence[Sequence[int]], *, activate: bool
) -> UnaryCall[operations_pb2.Operation]:
    request = verify_pb2.VerifyVersionRequest(name=resource_name(name), digest=digest, activate=activate)
    for index, prompt in enumerate(prompts):
        try:
            request.prompts.add(ids=prompt)
        except (TypeError, ValueError) as error:
            raise invalid_field(f"prompts[{index}]", f"is not a list of token ids: {error}") from error
    return _operation_call("/motet.v1.VerificationService/VerifyVersion", request, is_repeatable=False)


def verified_version(operation: operations_pb2.Operation) -> AdapterVersion:
    """The version that an ended verification is about."""
    adapter = adapters_pb2.Adapter()
    operation.response.Unpack(adapter)
    return version_from(adapter.registration.version)


def get_operation(name: str) -> UnaryCall[operations_pb2.Operation]:
    request = operations_pb2.GetOperationRequest(name=name)
    return _operation_call("/google.longrunning.Operations/GetOperation", request, is_repeatable=True)


def get_status() -> UnaryCall[ServerStatus]:
    return UnaryCall(
        "/motet.v1.StatusService/GetStatus",
        status_pb2.GetStatusRequest(),
        status_pb2.GetStatusResponse,
        status_from,
        is_repeatable=True,
    )


def check_operation(operation: operations_pb2.Operation) -> None:
    """Raises the error that an operation ended with, if it did."""
    if operation.WhichOneof("result") == "error":
        raise error_from_status(operation.error)


def adapter_of_operation(operation: operations_pb2.Operation) -> Adapter:
    """The adapter that an ended create operation made."""
    adapter = adapters_pb2.Adapter()
    operation.response.Unpack(adapter)
    return adapter_from(adapter)


def poll_interval_s(num_polls: int) -> float:
    """Time between two looks at an operation: 50 ms at first, up to 1 s."""
    return min(0.05 * 1.5**num_polls, 1.0)


def adapter_call(method: str, request: Message, *, is_repeatable: bool) -> UnaryCall[Adapter]:
    """A call of AdapterService whose response is an adapter."""
    # Every response of these methods has the one field `adapter`.
    response_type: type[Message] = getattr(adapters_pb2, f"{method}Response")
    return UnaryCall(
        _ADAPTERS + method,
        request,
        response_type,
        lambda response: adapter_from(response.adapter),
        is_repeatable=is_repeatable,
    )


def _operation_call(method: str, request: Message, *, is_repeatable: bool) -> UnaryCall[operations_pb2.Operation]:
    return UnaryCall(
        method, request, operations_pb2.Operation, lambda operation: operation, is_repeatable=is_repeatable
    )

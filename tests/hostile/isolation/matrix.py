"""Every RPC and every text field of its request, from the descriptors: where one tenant can put another one's values.

A request of each RPC is written once, in `requests`. Everything else follows from the descriptors: each string and each
bytes field, also those within messages, lists and maps, gets each value of the other tenant.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from motet.v1 import (
    adapters_pb2,
    fleet_pb2,
    generation_pb2,
    model_pb2,
    pooling_pb2,
    push_pb2,
    residency_pb2,
    status_pb2,
    verify_pb2,
)

from tests.control_plane.api.rpc.test_callers import CLIENT_METHODS
from tests.hostile.isolation.things import Things

Path = tuple[FieldDescriptor, ...]
_TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_MAX_DEPTH = 8
PROMPT = list(range(3, 43))  # token ids: several blocks of the prefix cache


def requests(method: str, things: Things, files: dict[str, bytes]) -> list[list[Message]]:
    """Requests of an RPC that are valid for whoever has these things, each as the messages of its stream.

    Without etag and request id, so that none depends on what was sent before.
    """
    return _REQUESTS[method.rpartition("/")[2] if "reflection" not in method else "ServerReflectionInfo"](things, files)


def whole_requests(method: str, things: Things, files: dict[str, bytes]) -> list[list[Message]]:
    """The same with the adapter's etag, where the RPC takes one."""
    streams = requests(method, things, files)
    for path in text_fields(_input_of(method)):
        if path[-1].name == "etag":
            streams = [_with(stream, path, things.etag) for stream in streams]
    return streams


def generate(**fields: Any) -> generation_pb2.GenerateRequest:
    """A short greedy generation whose tokens are always the same."""
    if not {"text", "chat"} & set(fields):
        fields.setdefault("token_ids", {"ids": PROMPT})
    return generation_pb2.GenerateRequest(
        **{"sampling": {"seed": 1}, "stopping": {"max_tokens": 2, "ignore_eos": True}, **fields}
    )


def upload(files: dict[str, bytes], adapter_id: str, **header: Any) -> list[Message]:
    """The messages of an upload."""
    listed = [
        adapters_pb2.UploadFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]
    messages: list[Message] = [
        adapters_pb2.UploadAdapterRequest(
            header=adapters_pb2.UploadHeader(adapter_id=adapter_id, files=listed, **header)
        )
    ]
    for index, data in enumerate(files.values()):
        for offset in range(0, len(data), 65536):
            piece = {"file_index": index, "offset": offset, "data": data[offset : offset + 65536]}
            messages.append(adapters_pb2.UploadAdapterRequest(chunk=piece))
    return messages


def _upload(things: Things, files: dict[str, bytes]) -> list[list[Message]]:
    return [upload(files, things.adapter_id, validate_only=True)]


def push(files: dict[str, bytes], adapter_id: str, **header: Any) -> list[Message]:
    """The messages of a push."""
    config, weights = files["adapter_config.json"], files["adapter_model.safetensors"]
    head = push_pb2.PushHeader(adapter_id=adapter_id, config=config, weights_bytes=len(weights), **header)
    chunks = [weights[offset : offset + 65536] for offset in range(0, len(weights), 65536)]
    return [
        push_pb2.PushVersionRequest(header=head),
        *(push_pb2.PushVersionRequest(chunk=push_pb2.PushChunk(data=data)) for data in chunks),
    ]


def _push(things: Things, files: dict[str, bytes]) -> list[list[Message]]:
    return [push(files, things.adapter_id, validate_only=True)]


def _generate(things: Things, _files: dict[str, bytes]) -> list[list[Message]]:
    name = f"adapters/{things.adapter_id}"
    return [
        [generate(adapter=name, adapter_digest=things.former_digest, request_id="mine")],
        [generate(adapter=name, text=things.text)],
        [generate(adapter=things.adapter_id, chat={"messages": [{"role": "user", "content": things.text}]})],
        [generate(cache_salt=things.cache_salt)],
    ]


def _embed(things: Things, _files: dict[str, bytes]) -> list[list[Message]]:
    name, inputs = f"adapters/{things.adapter_id}", [{"token_ids": {"ids": PROMPT}}]
    return [
        [pooling_pb2.EmbedRequest(adapter=name, adapter_digest=things.former_digest, request_id="mine", inputs=inputs)],
        [pooling_pb2.EmbedRequest(adapter=name, inputs=[{"text": things.text}])],
        [pooling_pb2.EmbedRequest(cache_salt=things.cache_salt, inputs=inputs)],
    ]


def _classify(things: Things, _files: dict[str, bytes]) -> list[list[Message]]:
    name, inputs = f"adapters/{things.adapter_id}", [{"text": things.text}]
    digest, salt = things.former_digest, things.cache_salt
    return [
        [pooling_pb2.ClassifyRequest(adapter=name, adapter_digest=digest, cache_salt=salt, inputs=inputs)],
    ]


def task(files: dict[str, bytes], **fields: Any) -> list[Message]:
    """The messages of a request that brings the weights of LoRA task 7."""
    listed = [
        adapters_pb2.UploadFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]
    header = generation_pb2.GenerateWithTaskHeader(request=generate(lora_task_id=7, **fields), files=listed)
    messages: list[Message] = [generation_pb2.GenerateWithTaskRequest(header=header)]
    for index, data in enumerate(files.values()):
        for offset in range(0, len(data), 65536):
            piece = {"file_index": index, "offset": offset, "data": data[offset : offset + 65536]}
            messages.append(generation_pb2.GenerateWithTaskRequest(chunk=piece))
    return messages


def _model(things: Things, _files: dict[str, bytes]) -> list[list[Message]]:
    return [
        [model_pb2.GetModelRequest(adapter=f"adapters/{things.adapter_id}", adapter_digest=things.former_digest)],
        [model_pb2.GetModelRequest(adapter=things.adapter_id)],
    ]


def _tokenize(things: Things, _files: dict[str, bytes]) -> list[list[Message]]:
    chat = {"messages": [{"role": "user", "content": things.text}]}
    return [
        [model_pb2.TokenizeRequest(adapter=things.adapter_id, adapter_digest=things.digest, text=things.text)],
        [model_pb2.TokenizeRequest(adapter=f"adapters/{things.adapter_id}", chat=chat)],
    ]


def _detokenize(things: Things, _files: dict[str, bytes]) -> list[list[Message]]:
    digest, ids = things.digest, {"ids": PROMPT}
    return [[model_pb2.DetokenizeRequest(adapter=things.adapter_id, adapter_digest=digest, token_ids=ids)]]


def _update(things: Things, _files: dict[str, bytes]) -> list[list[Message]]:
    adapter = {"name": f"adapters/{things.adapter_id}", "labels": {"a": "b"}, "display_name": "d"}
    everything = ["labels", "display_name", "visibility", "shared_with", "owner"]
    shared = {"visibility": "ADAPTER_VISIBILITY_SHARED", "shared_with": ["somebody"]}
    return [
        [adapters_pb2.UpdateAdapterRequest(adapter=adapter, update_mask={"paths": ["labels"]})],
        [adapters_pb2.UpdateAdapterRequest(adapter={**adapter, **shared}, update_mask={"paths": everything[:4]})],
        [
            adapters_pb2.UpdateAdapterRequest(
                adapter={**adapter, **shared, "owner": things.tenant}, update_mask={"paths": everything}
            )
        ],
    ]


def _named(kind: Any, **others: str) -> Callable[[Things, dict[str, bytes]], list[list[Message]]]:
    """Requests with the adapter's name, and other fields that are taken from things."""

    def make(things: Things, _files: dict[str, bytes]) -> list[list[Message]]:
        values = {field: getattr(things, source) for field, source in others.items()}
        return [[kind(name=f"adapters/{things.adapter_id}", **values)]]

    return make


def _operation(kind: Any, **others: Any) -> Callable[[Things, dict[str, bytes]], list[list[Message]]]:
    return lambda things, _files: [[kind(name=f"operations/{things.operation_id}", **others)]]


def _plain(*messages: Message) -> Callable[[Things, dict[str, bytes]], list[list[Message]]]:
    return lambda _things, _files: [[copy.deepcopy(message)] for message in messages]


_REQUESTS: dict[str, Callable[[Things, dict[str, bytes]], list[list[Message]]]] = {
    "Generate": _generate,
    "GetModel": _model,
    "Tokenize": _tokenize,
    "Detokenize": _detokenize,
    "Embed": _embed,
    "Classify": _classify,
    "GenerateWithTask": lambda _things, files: [task(files, request_id="mine")],
    "UploadAdapter": _upload,
    "GetUpload": lambda things, _files: [[adapters_pb2.GetUploadRequest(upload_id=things.upload_id)]],
    "PushVersion": _push,
    # Of a version that nobody has, so that no process starts.
    "VerifyVersion": lambda things, _files: [
        [verify_pb2.VerifyVersionRequest(name=f"adapters/{things.adapter_id}", digest="0" * 64)]
    ],
    "CreateAdapter": lambda things, _files: [
        [adapters_pb2.CreateAdapterRequest(adapter_id=things.adapter_id, source="root/dir")]
    ],
    "GetAdapter": _named(adapters_pb2.GetAdapterRequest),
    "ListAdapters": lambda things, _files: [
        [adapters_pb2.ListAdaptersRequest(page_size=1, page_token=token)] for token in ("", things.adapter_id)
    ],
    "UpdateAdapter": _update,
    "ListAdapterVersions": _named(adapters_pb2.ListAdapterVersionsRequest, page_token="digest"),
    "ActivateAdapterVersion": _named(adapters_pb2.ActivateAdapterVersionRequest, digest="digest"),
    "RollbackAdapter": _named(adapters_pb2.RollbackAdapterRequest, expected_digest="digest"),
    "PinAdapter": _named(adapters_pb2.PinAdapterRequest),
    "UnpinAdapter": _named(adapters_pb2.UnpinAdapterRequest),
    # With an etag that is not the adapter's, so that it stays.
    "DeleteAdapter": _named(adapters_pb2.DeleteAdapterRequest, etag="digest"),
    # Of the active version, which stays.
    "DeleteAdapterVersion": _named(adapters_pb2.DeleteAdapterVersionRequest, digest="digest"),
    "WatchAdapters": lambda things, _files: [
        [residency_pb2.WatchAdaptersRequest(name=f"adapters/{things.adapter_id}")],
        [residency_pb2.WatchAdaptersRequest()],
    ],
    "LoadAdapter": _named(residency_pb2.LoadAdapterRequest, digest="digest"),
    "UnloadAdapter": _named(residency_pb2.UnloadAdapterRequest, digest="digest"),
    "DrainWorker": lambda things, _files: [[fleet_pb2.DrainWorkerRequest(worker_id=things.adapter_id)]],
    "UndrainWorker": lambda things, _files: [[fleet_pb2.UndrainWorkerRequest(worker_id=things.adapter_id)]],
    "GetStatus": _plain(status_pb2.GetStatusRequest()),
    "GetOperation": _operation(operations_pb2.GetOperationRequest),
    "ListOperations": lambda things, _files: [
        [operations_pb2.ListOperationsRequest(page_size=1, page_token=token)] for token in ("", things.operation_id)
    ],
    "WaitOperation": _operation(operations_pb2.WaitOperationRequest, timeout={}),
    "CancelOperation": _operation(operations_pb2.CancelOperationRequest),
    "DeleteOperation": _operation(operations_pb2.DeleteOperationRequest),
    "Check": _plain(health_pb2.HealthCheckRequest()),
    "Watch": _plain(health_pb2.HealthCheckRequest()),
    "List": _plain(health_pb2.HealthListRequest()),
    "ServerReflectionInfo": _plain(
        reflection_pb2.ServerReflectionRequest(list_services="*"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="motet.v1.AdapterService"),
    ),
}


def methods_without_requests() -> set[str]:
    """RPCs that the server has and this module does not know."""
    known = {method for method in CLIENT_METHODS if method.rpartition("/")[2] in _REQUESTS}
    return set(CLIENT_METHODS) - known


def text_fields(descriptor: Descriptor, depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """The path of every string and bytes field in a message and in those within it; of a map: key and value."""
    assert depth > 0, f"{descriptor.full_name} lies too deep; raise _MAX_DEPTH"
    for field in descriptor.fields:
        if field.type in _TEXT:
            yield (field,)
        elif field.message_type is not None:
            yield from ((field, *path) for path in text_fields(field.message_type, depth - 1))


def path_text(path: Path) -> str:
    """Such as "header.labels.key"."""
    return ".".join(field.name for field in path)


def put(message: Any, path: Path, value: str) -> None:
    """Set the field at `path`. Of a list of messages: in the first one, which is added if there is none."""
    field, *rest = path
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, entry_value = (value, "x") if rest[0].name == "key" else ("key", value)
        getattr(message, field.name)[key] = entry_value
    elif field.message_type is None:
        content: Any = value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
        if field.is_repeated:
            del getattr(message, field.name)[:]
            getattr(message, field.name).append(content)
        else:
            setattr(message, field.name, content)
    elif field.is_repeated:
        inner = getattr(message, field.name)
        put(inner[0] if inner else inner.add(), tuple(rest), value)
    else:
        getattr(message, field.name).SetInParent()
        put(getattr(message, field.name), tuple(rest), value)


@dataclass(frozen=True)
class Attack:
    """One request with a value of another tenant in it, and the same one with a value that is nobody's."""

    name: str
    method: str
    sent: tuple[bytes, ...]
    control: tuple[bytes, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    control_metadata: tuple[tuple[str, str], ...] = ()


def attacks(method: str, mine: Things, other: Things, nobodys: Things, files: dict[str, bytes]) -> Iterator[Attack]:
    """All of one RPC: each field with each value, all fields together, and the tenant of the metadata."""
    descriptor, short = _input_of(method), method.rpartition("/")[2]
    pairs = [(kind, value, nobodys.values()[kind]) for kind, value in other.values().items()]
    for number, stream in enumerate(requests(method, mine, files)):
        for path in text_fields(descriptor):
            for kind, value, control in pairs:
                yield Attack(
                    f"{short} {number}: {path_text(path)} = {kind}",
                    method,
                    _encoded(_with(stream, path, value)),
                    _encoded(_with(stream, path, control)),
                )
        encoded = _encoded(stream)
        yield Attack(
            f"{short} {number}: motet-tenant",
            method,
            encoded,
            encoded,
            (("motet-tenant", other.tenant),),
            (("motet-tenant", nobodys.tenant),),
        )
    for number, (theirs, nobody) in enumerate(
        zip(whole_requests(method, other, files), whole_requests(method, nobodys, files), strict=True)
    ):
        yield Attack(f"{short} {number}: everything", method, _encoded(theirs), _encoded(nobody))


def _input_of(method: str) -> Any:
    """The descriptor of the RPC's requests."""
    return CLIENT_METHODS[method].input_type


def _with(stream: Sequence[Message], path: Path, value: str) -> list[Message]:
    """The stream with one field set, in the first message that has the field's part, else in the first one."""
    changed = [copy.deepcopy(message) for message in stream]
    field = path[0]
    has = (
        message
        for message in changed
        if field.message_type is not None and not field.is_repeated and message.HasField(field.name)
    )
    put(next(has, changed[0]), path, value)
    return changed


def _encoded(stream: Sequence[Message]) -> tuple[bytes, ...]:
    return tuple(message.SerializeToString(deterministic=True) for message in stream)


def response_type(method: str) -> Any:
    """The class of the RPC's responses."""
    descriptor: Any = CLIENT_METHODS[method].output_type
    return GetMessageClass(descriptor)

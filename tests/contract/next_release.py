"""The plan stream as a later release may have it: each message with one more field, each direction with one event."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from contract.v1 import plan_pb2

M = TypeVar("M", bound=Message)
ADDED_FIELD = 900  # number of the uint32 that each message of the plan stream gained
ADDED_EVENT = 901  # number of the event that AttachRequest and AttachResponse gained


def as_sent_by_next_release(message: M, *path: str | int, event: bool = False) -> M:
    """`message` as this release receives it from the next one.

    The message at `path` in it (names of fields, and places in repeated ones) has the added field. With `event` the
    whole is the added event instead.
    """
    sent: Any = _class_of(message.DESCRIPTOR.full_name).FromString(message.SerializeToString())
    inner = sent
    for step in path:
        inner = inner[step] if isinstance(step, int) else getattr(inner, step)
    inner.SetInParent()
    if event:
        inner.added_event.SetInParent()
    else:
        inner.added = 7
    return type(message).FromString(sent.SerializeToString())


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for imported in file.dependencies:
            add(imported)
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        if file.name == plan_pb2.DESCRIPTOR.name:
            _extend(proto)
        pool.Add(proto)

    add(plan_pb2.DESCRIPTOR)
    return pool


def _extend(file: descriptor_pb2.FileDescriptorProto) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    for message in file.message_type:
        message.field.add(name="added", number=ADDED_FIELD, type=kinds.TYPE_UINT32, label=kinds.LABEL_OPTIONAL)
        if message.name in ("AttachRequest", "AttachResponse"):
            message.field.add(
                name="added_event",
                number=ADDED_EVENT,
                oneof_index=0,
                type=kinds.TYPE_MESSAGE,
                type_name=".motet.worker.v1.Ping",
                label=kinds.LABEL_OPTIONAL,
            )


@cache
def _class_of(name: str) -> type[Message]:
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))

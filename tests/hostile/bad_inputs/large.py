"""Every field that has no size of its own, filled up to the largest message: the response is a defined one, and soon.

Made from the descriptors, so that a new field is there by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from motet.v1 import adapters_pb2, generation_pb2

from tests.hostile.bad_inputs import generation, names
from tests.hostile.bad_inputs.case import Case
from tests.hostile.bad_inputs.facts import MAX_MESSAGE_BYTES
from tests.hostile.bad_inputs.other_calls import UNARY
from tests.hostile.bad_inputs.uploads import UPLOAD

MAX_RESPONSES = 20
SIZE_BYTES = MAX_MESSAGE_BYTES - 4096  # of the field; the rest of the message is small
SHORT, LONG = "a", "ab cd " * 40
_MAX_DEPTH = 4


def cases() -> Iterator[Case]:
    """One call for each such field of each request, and for each way to fill it."""
    for method, kind in UNARY.items():
        base = generation.with_fields({}) if kind is generation_pb2.GenerateRequest else kind()
        for field in base.DESCRIPTOR.fields:
            if field.name in ("name", "adapter_id") and field.type == FieldDescriptor.TYPE_STRING:
                setattr(base, field.name, names.UNKNOWN_OPERATION if "Operations" in method else "adapters/a")
        if isinstance(base, adapters_pb2.UpdateAdapterRequest):
            base.adapter.name = "adapters/a"
            base.update_mask.paths.append("labels")
        for path, message in _filled(base):
            yield Case(
                name=f"{method}: {path}",
                method=method,
                messages=(message.SerializeToString(),),
                num_responses=MAX_RESPONSES,
            )
    for path, message in _filled(adapters_pb2.UploadAdapterRequest(header={"adapter_id": "a"})):
        yield Case(name=f"{UPLOAD}: {path}", method=UPLOAD, messages=(message.SerializeToString(),))


def _filled(base: Message) -> Iterator[tuple[str, Message]]:
    """Copies of a message, each with one field filled."""
    for path in _paths(base):
        for how in range(2):
            message = type(base)()
            message.CopyFrom(base)
            parent: Any = message
            for name in path[:-1]:
                parent = getattr(parent, name)
                if not isinstance(parent, Message):  # a repeated message: its first element
                    parent = parent[0] if len(parent) else parent.add()
            _fill(parent, parent.DESCRIPTOR.fields_by_name[path[-1]], how)
            yield f"{'.'.join(path)}, {('many', 'long')[how]}", message


def _paths(base: Message) -> Iterator[tuple[str, ...]]:
    """Names of the fields that can be large, with those of the messages that they are in."""

    def walk(descriptor: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for field in descriptor.fields:
            here = (*path, field.name)
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                yield here
            if field.message_type is not None and not is_map and len(here) < _MAX_DEPTH:
                yield from walk(field.message_type, here)

    yield from walk(base.DESCRIPTOR, ())


def _fill(message: Any, field: FieldDescriptor, how: int) -> None:
    """0: as many elements as there can be, 1: fewer and longer ones."""
    value = (SHORT, LONG)[how]
    if not field.is_repeated:
        text = (value * SIZE_BYTES)[:SIZE_BYTES]
        setattr(message, field.name, text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text)
        return
    target = getattr(message, field.name)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        is_text = kind.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
        for index in range(SIZE_BYTES // (16 + len(value))):
            if kind.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING:
                target[f"k{index}" if is_text else index] = value
            else:
                target[f"k{index}" if is_text else index] = 1.0
    elif kind is not None:
        for _ in range(SIZE_BYTES // (2, 256)[how]):
            element = target.add()
            texts = [inner for inner in kind.fields if inner.type == FieldDescriptor.TYPE_STRING]
            if how and texts:
                setattr(element, texts[-1].name, value)
    elif field.type == FieldDescriptor.TYPE_STRING:
        target.extend(f"{value}{index}" for index in range(SIZE_BYTES // (10 + len(value))))
    else:
        target.extend([(1, 2**21 - 1)[how]] * (SIZE_BYTES // (1, 3)[how]))

"""Protobuf by hand: what no library would write."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """Any number of bits, also more than 64."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def number(field: int, value: int) -> bytes:
    """A varint field."""
    return varint(field << 3 | VARINT) + varint(value)


def chunk(field: int, value: bytes) -> bytes:
    """A string, bytes or message field."""
    return varint(field << 3 | LENGTH) + varint(len(value)) + value


def nested(path: tuple[int, ...], value: bytes) -> bytes:
    """Messages within messages around `value`, the outermost field number first."""
    for field in reversed(path):
        value = chunk(field, value)
    return value


def string_fields(descriptor: Descriptor, depth: int = 4) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Dotted name and field numbers of every string in a message and those below it."""
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield field.name, (field.number,)
        elif field.message_type is not None and depth > 0:
            for name, numbers in string_fields(field.message_type, depth - 1):
                yield f"{field.name}.{name}", (field.number, *numbers)

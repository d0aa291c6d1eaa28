"""Fields of a received message that this release does not know: a peer of another release sent them.

Either end of the plan stream refuses messages whose meaning such a field could change; docs/protocol.md has the rule.
"""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def unknown_field(message: Message) -> str | None:
    """The message and the number of one field that is not known, at any depth; None: all are known.

    Unknown fields are removed from `message`.
    """
    data = message.SerializeToString()
    message.DiscardUnknownFields()
    if message.ByteSize() == len(data):
        return None
    received = type(message)()
    received.ParseFromString(data)
    return _first(received)


def _first(message: Message) -> str | None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"field {unknown[0].field_number} of {message.DESCRIPTOR.name}"
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in value if field.is_repeated else (value,):
            if (found := _first(inner)) is not None:
                return found
    return None

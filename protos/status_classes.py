"""Writes dataclasses of the status messages from status.proto: the control plane fills them, the SDK hands them out.

Called by generate.py with the description of status.proto, comments included.
"""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

MESSAGES = (
    "ModelStatus",
    "WorkerStatus",
    "QueueStatus",
    "ActiveAdapterStatus",
    "AdapterStatus",
    "TenantStatus",
    "AuditStatus",
    "LimitStatus",
)
_HEAD = '''"""What a status says of the model, workers, queues, adapters, tenants, limits and the audit log.

Written by protos/generate.py from protos/motet/v1/status.proto: change that file instead.
"""

from __future__ import annotations

from dataclasses import dataclass
'''
_TYPES = {
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_DOUBLE: "float",
    FieldDescriptorProto.TYPE_STRING: "str",
    FieldDescriptorProto.TYPE_UINT32: "int",
    FieldDescriptorProto.TYPE_UINT64: "int",
}
_MESSAGE, _FIELD = 4, 2  # field numbers in descriptor.proto, of which paths of comments are made


def source(file: FileDescriptorProto) -> str:
    """The generated module."""
    comments = {
        tuple(location.path): " ".join(location.leading_comments.split()) for location in file.source_code_info.location
    }
    classes = [
        _class(message, comments, index) for index, message in enumerate(file.message_type) if message.name in MESSAGES
    ]
    return "\n\n".join([_HEAD, *classes])


def _class(message: DescriptorProto, comments: dict[tuple[int, ...], str], index: int) -> str:
    lines = [
        "@dataclass(frozen=True, slots=True, kw_only=True)",
        f"class {message.name}:",
        f'    """{comments[_MESSAGE, index]}"""',
        "",
    ]
    for number, field in enumerate(message.field):
        kind = _TYPES[field.type] + (" | None" if field.proto3_optional else "")
        lines.append(f"    {field.name}: {kind}  # {comments[_MESSAGE, index, _FIELD, number].rstrip('.')}")
    return "\n".join(lines) + "\n"

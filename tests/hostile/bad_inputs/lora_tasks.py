"""GenerationService.GenerateWithTask: headers, and every way to break the order of its stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from motet.v1 import adapters_pb2, generation_pb2 as pb

from tests.hostile.bad_inputs.case import INVALID, OK, Case
from tests.hostile.bad_inputs.facts import MAX_CHUNK_BYTES, WEIGHTS_FILE, Facts

METHOD = "/motet.v1.GenerationService/GenerateWithTask"
TASK_ID = 2**64 - 1
Request = pb.GenerateWithTaskRequest


def messages(files: dict[str, bytes], **request: Any) -> list[pb.GenerateWithTaskRequest]:
    """The messages of an orderly call that generates one token."""
    fields: dict[str, Any] = {"lora_task_id": TASK_ID, "token_ids": {"ids": [5, 6]}, "stopping": {"max_tokens": 1}}
    listed = [
        adapters_pb2.UploadFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]
    header = pb.GenerateWithTaskHeader(request=pb.GenerateRequest(**(fields | request)), files=listed)
    stream = [Request(header=header)]
    for index, data in enumerate(files.values()):
        for offset in range(0, len(data), 65536):
            piece = adapters_pb2.UploadChunk(file_index=index, offset=offset, data=data[offset : offset + 65536])
            stream.append(Request(chunk=piece))
    return stream


def case(name: str, stream: list[pb.GenerateWithTaskRequest] | list[bytes], **due: Any) -> Case:
    encoded = tuple(item if isinstance(item, bytes) else item.SerializeToString() for item in stream)
    return Case(name=f"lora task: {name}", method=METHOD, messages=encoded, **due)


def cases(facts: Facts) -> Iterator[Case]:
    """All of them."""
    files = facts.files
    good = messages(files)
    header, first = good[0], good[1]
    weights = files[WEIGHTS_FILE]

    def chunk(data: bytes) -> pb.GenerateWithTaskRequest:
        return Request(chunk=adapters_pb2.UploadChunk(data=data))

    rows: list[tuple[str, list[pb.GenerateWithTaskRequest], str]] = [
        ("no message", [], "header"),
        ("a chunk first", [first], "header"),
        ("an empty header", [Request(header=pb.GenerateWithTaskHeader())], "header.request.lora_task_id"),
        ("no task id", messages(files, lora_task_id=None), "header.request.lora_task_id"),
        ("no files", messages({}), "header.files"),
        ("one file", messages({WEIGHTS_FILE: weights}), "header.files"),
        ("an unknown file", messages({**files, "run.sh": b"x"}), "header.files[2].name"),
        ("the header twice", [header, *good], "header"),
        ("only the header", [header], "header.files[0].size_bytes"),
        ("the last chunk missing", good[:-1], "header.files[1].size_bytes"),
        ("an empty chunk", [header, chunk(b"")], "chunk.data"),
        ("with an adapter", messages(files, adapter="good"), "lora_task_id"),
        ("with adapters", messages(files, adapters=[{"name": "good"}]), "lora_task_id"),
        ("with a combination", messages(files, combination=1), "lora_task_id"),
        ("without a prompt", messages(files, token_ids=None), "input"),
    ]
    for name, stream, field in rows:
        yield case(name, stream, fields=(field,))
    long_chunk = [header, chunk(b"x" * (MAX_CHUNK_BYTES + 1))]  # too long for a chunk, and for the file
    yield case("a chunk of a MiB and a byte", long_chunk, fields=("chunk.data", "chunk.data"))
    yield case("malformed protobuf", [header.SerializeToString(), b"\x12\x05\x08"], code=INVALID, fields=("request",))
    garbage = {**files, WEIGHTS_FILE: b"\xff" * len(weights)}
    yield case("bytes that are not safetensors", messages(garbage), fields=(WEIGHTS_FILE,), reason="ADAPTER_INVALID")
    yield case("orderly", good, code=OK)

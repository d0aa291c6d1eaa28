"""AdapterService.UploadAdapter: headers, and every way to break the order of an upload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from motet.v1 import adapters_pb2 as pb

from tests.hostile.bad_inputs import names
from tests.hostile.bad_inputs.case import INVALID, OK, Case, set_path, short
from tests.hostile.bad_inputs.facts import (
    CONFIG_FILE,
    MAX_ADAPTER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    WEIGHTS_FILE,
    Facts,
    sha256,
)
from tests.hostile.bad_inputs.wire import chunk as wire_chunk

UPLOAD = "/motet.v1.AdapterService/UploadAdapter"
U32, U64 = 2**32 - 1, 2**64 - 1
Request = pb.UploadAdapterRequest


def upload(files: dict[str, bytes], adapter_id: str = "bad", **header: Any) -> list[pb.UploadAdapterRequest]:
    """The messages of an orderly upload."""
    listed = [pb.UploadFile(name=name, size_bytes=len(data), sha256=sha256(data)) for name, data in files.items()]
    messages = [Request(header=pb.UploadHeader(adapter_id=adapter_id, files=listed, **header))]
    for index, data in enumerate(files.values()):
        for offset in range(0, len(data), 65536):
            piece = pb.UploadChunk(file_index=index, offset=offset, data=data[offset : offset + 65536])
            messages.append(Request(chunk=piece))
    return messages


def case(name: str, messages: list[pb.UploadAdapterRequest] | list[bytes], **due: Any) -> Case:
    encoded = tuple(item if isinstance(item, bytes) else item.SerializeToString() for item in messages)
    return Case(name=f"upload: {name}", method=UPLOAD, messages=encoded, **due)


def cases(facts: Facts) -> Iterator[Case]:
    """All of them."""
    yield from _headers(facts.files)
    yield from _orders(facts.files)


def _header(fields: dict[str, Any], files: dict[str, bytes]) -> list[pb.UploadAdapterRequest]:
    """An upload whose header has some fields replaced."""
    messages = upload(files, "valid", validate_only=True)
    for path, value in fields.items():
        name, _, rest = path.partition("[")
        if rest:
            index, _, field = rest.partition("].")
            set_path(getattr(messages[0].header, name)[int(index)], field, value)
        else:
            set_path(messages[0].header, path, value)
    return messages


def _headers(files: dict[str, bytes]) -> Iterator[Case]:
    other = {**files, "run.sh": b"print(1)"}
    config, weights = files[CONFIG_FILE], files[WEIGHTS_FILE]
    good_hash = sha256(config)
    bad: list[tuple[str, list[Any]]] = [
        ("adapter_id", [*names.BAD_IDS, "adapters/a"]),
        ("display_name", ["d" * 257, "é" * 129]),
        ("labels", [{key: "x"} for key in names.BAD_LABEL_KEYS] + [{f"k{index}": "" for index in range(65)}]),
        ("request_id", names.BAD_REQUEST_IDS),
        ("upload_id", names.BAD_REQUEST_IDS),
        ("owner", names.BAD_OWNERS),
        ("visibility", [4, -1]),
        (
            "files[0].name",
            ["", "run.sh", "../x", f"/{CONFIG_FILE}", CONFIG_FILE.upper(), f"{CONFIG_FILE}\0", "é", "x" * 9999],
        ),
        ("files[1].name", ["adapter_model.bin", "adapter_model.safetensors.index.json", f"./{WEIGHTS_FILE}"]),
        (
            "files[0].sha256",
            ["", "zz", good_hash.upper(), good_hash[:-1], good_hash + "0", good_hash + "\n", "\uff10" * 64],
        ),
        ("files[0].size_bytes", [0]),
    ]
    for path, values in bad:
        for value in values:
            yield case(f"{path} = {short(value)}", _header({path: value}, files), fields=(f"header.{path}",))
    rollout = _header({"rollout": pb.VersionRollout(canary_per_mille=1001)}, files)
    yield case("rollout.canary_per_mille = 1001", rollout, fields=("header.rollout.canary_per_mille",))
    held = _header({"rollout": pb.VersionRollout(hold=True, version_labels=["best"])}, files)
    yield case("a held version with a label", held, fields=("header.rollout.hold",))
    first = _header({"rollout": pb.VersionRollout(canary_per_mille=1)}, files)
    yield case("a canary of a new name", first, fields=("rollout.canary_per_mille",))
    for tenants, index in names.BAD_TENANT_LISTS:
        messages = _header({"shared_with": tenants}, files)
        yield case(f"shared_with = {short(tenants)}", messages, fields=(f"header.shared_with{index}",))
    for fields in ({"visibility": 2}, {"shared_with": ["labs"]}):
        yield case(f"{fields}", _header(fields, files), fields=("shared_with",))
    yield case("a label of 257 bytes", _header({"labels": {"k": "v" * 257}}, files), fields=("header.labels['k']",))
    for size in (MAX_ADAPTER_BYTES, MAX_ADAPTER_BYTES + 1, 2**63, U64):
        messages = _header({"files[1].size_bytes": size}, files)
        yield case(f"files[1].size_bytes = {size}", messages, fields=("header.files",), says=str(MAX_ADAPTER_BYTES))
    at_limit = MAX_ADAPTER_BYTES - len(config)
    yield case(
        "as many bytes as are allowed, and none of them sent",
        _header({"files[1].size_bytes": at_limit}, files)[:1],
        fields=("header.files[0].size_bytes",),
        says=f"0 of {len(config)}",
    )
    empty = upload({**files, WEIGHTS_FILE: b""}, "bad")
    yield case("an empty file", empty, fields=("header.files[1].size_bytes",))
    for name, listed in {
        "no file": {},
        "only the config": {CONFIG_FILE: config},
        "only the weights": {WEIGHTS_FILE: weights},
    }.items():
        yield case(name, upload(listed, "bad"), fields=("header.files",))
    yield case("a third file", upload(other, "bad"), fields=("header.files[2].name",))
    path_like = upload({**files, "../x": b"1"}, "bad")
    yield case("a path as a third file", path_like, fields=("header.files[2].name",))
    twice = upload(files, "bad")
    twice[0].header.files[1].CopyFrom(twice[0].header.files[0])
    yield case("one file twice", twice, fields=("header.files",))
    many = upload(files, "bad")
    many[0].header.files.extend([many[0].header.files[0]] * 10_000)
    yield case("10 000 files", many, fields=("header.files",))
    yield case("the weights first", upload(dict(reversed(files.items())), "valid", validate_only=True), code=OK)
    good: dict[str, Any] = {"display_name": "d" * 256, "labels": dict.fromkeys(names.GOOD_LABEL_KEYS, "v" * 256)}
    yield case("labels and name at their limits", _header(good, files), code=OK)
    for request_id in names.GOOD_REQUEST_IDS:
        yield case(f"request_id = {short(request_id)}", _header({"request_id": request_id}, files), code=OK)
    reused = {"request_id": names.GOOD_REQUEST_IDS[0], "display_name": "another"}
    yield case("a request_id of another upload", _header(reused, files), fields=("header.request_id",))


def _orders(files: dict[str, bytes]) -> Iterator[Case]:
    good = upload(files)
    header, first, last = good[0], good[1], good[-1]

    def changed(message: pb.UploadAdapterRequest, **fields: Any) -> pb.UploadAdapterRequest:
        copy = Request()
        copy.CopyFrom(message)
        for name, value in fields.items():
            setattr(copy.chunk, name, value)
        return copy

    rows: list[tuple[str, list[pb.UploadAdapterRequest], str]] = [
        ("no message", [], "header"),
        ("an empty message first", [Request(), *good], "header"),
        ("a chunk first", [first], "header"),
        ("a chunk before the header", [first, *good], "header"),
        ("the header twice", [header, *good], "header"),
        ("a header among the chunks", [header, first, header, *good[2:]], "header"),
        ("a header at the end", [*good, header], "chunk"),
        ("an empty message among the chunks", [header, Request(), *good[1:]], "header"),
        ("only the header", [header], "header.files[0].size_bytes"),
        ("the weights missing", [header, first], "header.files[1].size_bytes"),
        ("the last chunk missing", good[:-1], "header.files[1].size_bytes"),
        ("a chunk too many", [*good, last], "chunk"),
        ("an empty chunk at the end", [*good, changed(last, data=b"")], "chunk"),
        ("chunks in another order", [header, *reversed(good[1:])], "chunk.file_index"),
        ("the first chunk twice", [header, first, first, *good[2:]], "chunk.file_index"),
        ("a file_index behind the last", [header, changed(first, file_index=2)], "chunk.file_index"),
        ("file_index 2^32 - 1", [header, changed(first, file_index=U32)], "chunk.file_index"),
        ("offset 1", [header, changed(first, offset=1)], "chunk.offset"),
        ("offset 2^64 - 1", [header, changed(first, offset=U64)], "chunk.offset"),
        ("an offset behind what was sent", [*good[:-1], changed(last, offset=last.chunk.offset + 1)], "chunk.offset"),
        ("an empty chunk", [header, changed(first, data=b"")], "chunk.data"),
        ("one byte too many", [header, changed(first, data=first.chunk.data + b"x")], "chunk.data"),
        ("a chunk of a MiB and a byte", [header, changed(first, data=b"x" * (MAX_CHUNK_BYTES + 1))], "chunk.data"),
    ]
    for name, messages, field in rows:
        yield case(name, messages, fields=_at_fault(name, field))
    flipped = bytes([*last.chunk.data[:-1], last.chunk.data[-1] ^ 1])
    broken = grpc.StatusCode.DATA_LOSS
    yield case("a flipped bit", [*good[:-1], changed(last, data=flipped)], code=broken, reason="DIGEST_MISMATCH")
    too_large = [header, changed(first, data=b"x" * MAX_MESSAGE_BYTES)]
    yield case("a message above the limit", too_large, code=grpc.StatusCode.RESOURCE_EXHAUSTED, has_details=False)
    for name, data in {
        "malformed protobuf first": [b"\x0a\xff\xff\xff\xff\x0f"],
        "malformed protobuf among the chunks": [header.SerializeToString(), b"\x12\x05\x08"],
        "invalid UTF-8 in the header": [wire_chunk(1, wire_chunk(1, b"\xff\xfe"))],
    }.items():
        yield case(name, data, code=INVALID, fields=("request",))
    yield case("orderly, and checked only", upload(files, "valid", validate_only=True), code=OK)
    byte_by_byte = upload(files, "valid", validate_only=True)[:1]
    config = files[CONFIG_FILE]
    byte_by_byte += [Request(chunk=pb.UploadChunk(offset=at, data=config[at : at + 1])) for at in range(len(config))]
    byte_by_byte += [message for message in good[1:] if message.chunk.file_index == 1]
    yield case("byte by byte", byte_by_byte, code=OK)


def _at_fault(name: str, field: str) -> tuple[str, ...]:
    """Chunks that break two rules name both."""
    if name in ("a chunk of a MiB and a byte", "chunks in another order"):
        return (field, "chunk.data")
    return (field,)

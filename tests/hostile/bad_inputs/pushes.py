"""PushService.PushVersion: headers, and every way to break the order of a push. VerificationService.VerifyVersion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from motet.v1 import push_pb2 as pb, verify_pb2

from tests.hostile.bad_inputs import names
from tests.hostile.bad_inputs.case import INVALID, OK, Case, short
from tests.hostile.bad_inputs.facts import CONFIG_FILE, MAX_ADAPTER_BYTES, MAX_CHUNK_BYTES, WEIGHTS_FILE, Facts

PUSH = "/motet.v1.PushService/PushVersion"
VERIFY = "/motet.v1.VerificationService/VerifyVersion"
U64 = 2**64 - 1
Request = pb.PushVersionRequest


def push(files: dict[str, bytes], **header: Any) -> list[pb.PushVersionRequest]:
    """The messages of an orderly push that is checked only."""
    weights = files[WEIGHTS_FILE]
    fields: dict[str, Any] = {
        "adapter_id": "valid",
        "config": files[CONFIG_FILE],
        "weights_bytes": len(weights),
        "validate_only": True,
    }
    chunks = [weights[offset : offset + 65536] for offset in range(0, len(weights), 65536)]
    return [
        Request(header=pb.PushHeader(**(fields | header))),
        *(Request(chunk=pb.PushChunk(data=data)) for data in chunks),
    ]


def case(name: str, messages: list[pb.PushVersionRequest] | list[bytes], **due: Any) -> Case:
    encoded = tuple(item if isinstance(item, bytes) else item.SerializeToString() for item in messages)
    return Case(name=f"push: {name}", method=PUSH, messages=encoded, **due)


def cases(facts: Facts) -> Iterator[Case]:
    """All of them."""
    files = facts.files
    bad: list[tuple[str, list[Any]]] = [
        ("adapter_id", [*names.BAD_IDS, "adapters/a"]),
        ("config", [b"", b"x" * (2**20 + 1)]),
        ("weights_bytes", [0, MAX_ADAPTER_BYTES + 1, 2**63, U64]),
        ("owner", names.BAD_OWNERS),
        ("visibility", [4, -1]),
        ("signature", [b"x" * (256 * 1024 + 1)]),
        ("files_from", ["0", "-1", "1.5", "Latest", "a b", "../good", "x" * 65, "0" * 63, "\u0000"]),
    ]
    for field, values in bad:
        for value in values:
            yield case(f"{field} = {short(value)}", push(files, **{field: value}), fields=(f"header.{field}",))
    messages = push(files, config=b"x" * 2**20, signature=b"x")
    yield case("config and signature of more than a MiB", messages, fields=("header.signature",))
    for named in ("1", "stable", "0" * 64):
        both = push(files, files_from=named, without_files=True)
        yield case(f"files_from = {named[:9]} and without_files", both, fields=("header.without_files",))
        yield case(
            f"files_from = {named[:9]} of a new name", push(files, files_from=named), code=grpc.StatusCode.NOT_FOUND
        )
    for tenants, index in names.BAD_TENANT_LISTS:
        messages = push(files, shared_with=tenants)
        yield case(f"shared_with = {short(tenants)}", messages, fields=(f"header.shared_with{index}",))
    for config, field in ((b"{", CONFIG_FILE), (b"[]", CONFIG_FILE), (b'{"peft_type": "IA3"}', "peft_type")):
        yield case(f"config {short(config)}", push(files, config=config), fields=(field,), reason="ADAPTER_INVALID")
    yield from _orders(files)
    yield from _verifications()


def _verifications() -> Iterator[Case]:
    """VerificationService.VerifyVersion. A process starts for none of them."""

    def verify(what: str, field: str, **fields: Any) -> Case:
        message = verify_pb2.VerifyVersionRequest(**({"name": "adapters/good"} | fields))
        encoded = (message.SerializeToString(),)
        return Case(name=f"VerifyVersion: {what}", method=VERIFY, messages=encoded, fields=(field,))

    for name in names.BAD_RESOURCES:
        yield verify(f"name = {short(name)}", "name", name=name)
    for digest in names.BAD_DIGESTS:
        yield verify(f"digest = {short(digest)}", "digest", digest=digest)
    for ids in ([], [1], [1] * 1025, [1, 2**32 - 1]):
        yield verify(f"a prompt of {len(ids)} tokens", "prompts[0].ids", prompts=[{"ids": ids}])
    yield verify("65 prompts", "prompts", prompts=[{"ids": [1, 2]}] * 65)


def _orders(files: dict[str, bytes]) -> Iterator[Case]:
    good = push(files)
    header, first, last = good[0], good[1], good[-1]

    def chunk(data: bytes) -> pb.PushVersionRequest:
        return Request(chunk=pb.PushChunk(data=data))

    rows: list[tuple[str, list[pb.PushVersionRequest], str]] = [
        ("no message", [], "header"),
        ("a chunk first", [first], "header"),
        ("the header twice", [header, *good], "header"),
        ("an empty message among the chunks", [header, Request(), *good[1:]], "header"),
        ("only the header", [header], "header.weights_bytes"),
        ("the last chunk missing", good[:-1], "header.weights_bytes"),
        ("a chunk too many", [*good, last], "chunk.data"),
        ("an empty chunk", [header, chunk(b"")], "chunk.data"),
        ("a chunk of a MiB and a byte", [header, chunk(b"x" * (MAX_CHUNK_BYTES + 1))], "chunk.data"),
    ]
    for name, messages, field in rows:
        yield case(name, messages, fields=(field,))
    malformed = [header.SerializeToString(), b"\x12\x05\x08"]
    yield case("malformed protobuf among the chunks", malformed, code=INVALID, fields=("request",))
    garbage = [header, *(chunk(b"\xff" * len(message.chunk.data)) for message in good[1:])]
    yield case("bytes that are not safetensors", garbage, fields=(WEIGHTS_FILE,), reason="ADAPTER_INVALID")
    yield case("orderly, and checked only", good, code=OK)
    by_pieces = [header, *(chunk(bytes([byte])) for byte in first.chunk.data[:50])]
    yield case("byte by byte", [*by_pieces, chunk(first.chunk.data[50:]), *good[2:]], code=OK)

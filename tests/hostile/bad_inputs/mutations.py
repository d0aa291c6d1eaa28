"""Good messages with some bytes changed, by a seed: whatever they mean then, the response is a defined one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
from google.longrunning import operations_pb2
from google.protobuf import field_mask_pb2
from motet.v1 import adapters_pb2 as pb, status_pb2, types_pb2

from tests.hostile.bad_inputs import generation, names
from tests.hostile.bad_inputs.adapter_calls import SERVICE as ADAPTERS
from tests.hostile.bad_inputs.case import Case, Outcome, wording_problems
from tests.hostile.bad_inputs.facts import ROOT_NAME, Facts
from tests.hostile.bad_inputs.other_calls import OPERATIONS, STATUS
from tests.hostile.bad_inputs.uploads import UPLOAD, upload

# What a call may end with that nobody can say the meaning of. Never UNKNOWN, INTERNAL or UNAVAILABLE.
DEFINED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.ABORTED,
}
MAX_RESPONSES = 20


def cases(facts: Facts, seed: int, count: int) -> Iterator[Case]:
    """`count` calls whose messages were good."""
    draw = random.Random(seed)
    sources = _sources(facts)
    for index in range(count):
        method, messages = draw.choice(sources)
        changed = list(messages)
        place = draw.randrange(len(changed))
        other = draw.choice(draw.choice(sources)[1])
        for _ in range(draw.choice((1, 1, 2, 5, 20))):
            changed[place] = _mutated(changed[place], other, draw)
        name = f"seed {seed}, mutation {index}: {method}"
        yield Case(name=name, method=method, messages=tuple(changed), num_responses=MAX_RESPONSES)


def problems(outcome: Outcome, secrets: tuple[str, ...]) -> list[str]:
    """What is wrong with the response to a mutated call."""
    if outcome.code not in DEFINED:
        return [f"{outcome.code.name}: {outcome.message}"]
    return wording_problems(outcome, secrets)


def _mutated(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """One change: a bit, a byte, a piece left out, doubled, moved or taken from another message."""
    at, size = draw.randrange(len(data) + 1), draw.randrange(1, 9)
    head, tail = data[:at], data[at:]
    change = draw.randrange(8)
    if change == 0 and tail:
        return head + bytes([tail[0] ^ 1 << draw.randrange(8)]) + tail[1:]
    if change == 1:
        return head + bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))]) + tail[1:]
    if change == 2:
        return head + draw.randbytes(size) + tail
    if change == 3:
        return head + tail[size:]
    if change == 4:
        return head + tail[:size] * draw.randrange(2, 5) + tail[size:]
    if change == 5:
        return head
    if change == 6:
        return tail + head
    begin = draw.randrange(len(other) + 1)
    return head + other[begin : begin + 4 * size] + tail


def _sources(facts: Facts) -> list[tuple[str, tuple[bytes, ...]]]:
    """One good call of every method, rich in fields. None names an adapter that others use."""
    beam = {"decoding.beam_search.width": 3, "decoding.n": 2}
    rich = {
        "sampling.temperature": 0.7,
        "sampling.top_k": 20,
        "sampling.top_p": 0.9,
        "sampling.seed": 7,
        "sampling.logit_bias": {5: 1.5},
        "sampling.logprobs": 2,
        "stopping.stop": ["xyz"],
        "stopping.stop_token_ids": [0, 5],
        "stopping.min_tokens": 1,
        "decoding.n": 2,
        "request_id": "mutant",
        "cache_salt": "salt",
        "priority": 3,
    }
    chat = types_pb2.ChatMessages(messages=[types_pb2.ChatMessage(role="user", content="Hello")])
    name, digest = "adapters/mutant", names.UNKNOWN_DIGEST
    version = {"adapter": "mutant", "adapter_digest": digest}
    generations: list[dict[str, Any]] = [{}, rich, beam, {"text": "Hello, world"}, {"chat": chat}, version]
    labels = {"a": "b"}
    adapter = pb.Adapter(name=name, display_name="Mutant", labels=labels, etag="e")
    mask = field_mask_pb2.FieldMask(paths=["labels"])
    described: dict[str, Any] = {"display_name": "M", "labels": labels, "validate_only": True, "request_id": "r"}
    calls = {
        "CreateAdapter": pb.CreateAdapterRequest(adapter_id="mutant", source=f"{ROOT_NAME}/good", **described),
        "GetUpload": pb.GetUploadRequest(upload_id="mutant"),
        "GetAdapter": pb.GetAdapterRequest(name=name),
        "ListAdapters": pb.ListAdaptersRequest(page_size=10, page_token="a"),
        "UpdateAdapter": pb.UpdateAdapterRequest(adapter=adapter, update_mask=mask),
        "ListAdapterVersions": pb.ListAdapterVersionsRequest(name=name, page_size=3, page_token=digest),
        "ActivateAdapterVersion": pb.ActivateAdapterVersionRequest(name=name, digest=digest, etag="e"),
        "PinAdapter": pb.PinAdapterRequest(name=name),
        "UnpinAdapter": pb.UnpinAdapterRequest(name=name),
        "DeleteAdapter": pb.DeleteAdapterRequest(name=name, etag="e", request_id="r"),
        "DeleteAdapterVersion": pb.DeleteAdapterVersionRequest(name=name, digest=digest, etag="e", request_id="r"),
    }
    operation = names.UNKNOWN_OPERATION
    operations = {
        "GetOperation": operations_pb2.GetOperationRequest(name=operation),
        "ListOperations": operations_pb2.ListOperationsRequest(page_size=5, page_token="a"),
        "CancelOperation": operations_pb2.CancelOperationRequest(name=operation),
        "DeleteOperation": operations_pb2.DeleteOperationRequest(name=operation),
    }
    uploaded = upload(facts.files, "mutant", **described)
    return [
        *((generation.GENERATE, (generation.with_fields(fields).SerializeToString(),)) for fields in generations),
        *((ADAPTERS + rpc, (message.SerializeToString(),)) for rpc, message in calls.items()),
        *((OPERATIONS + rpc, (message.SerializeToString(),)) for rpc, message in operations.items()),
        (STATUS, (status_pb2.GetStatusRequest().SerializeToString(),)),
        (UPLOAD, tuple(message.SerializeToString() for message in uploaded)),
    ]

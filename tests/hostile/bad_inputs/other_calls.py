"""Operations, status, health, methods that are not there, and what gRPC itself has to refuse."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2
from motet.v1 import adapters_pb2, generation_pb2, pooling_pb2, status_pb2

from tests.hostile.bad_inputs import generation, names, pooling
from tests.hostile.bad_inputs.adapter_calls import SERVICE as ADAPTERS
from tests.hostile.bad_inputs.case import OK, Case, short
from tests.hostile.bad_inputs.facts import MAX_MESSAGE_BYTES, Facts
from tests.hostile.bad_inputs.wire import chunk, nested, number, string_fields

OPERATIONS = "/google.longrunning.Operations/"
HEALTH = "/grpc.health.v1.Health/"
STATUS = "/motet.v1.StatusService/GetStatus"
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
TOO_LARGE = grpc.StatusCode.RESOURCE_EXHAUSTED

# Every unary request message by its method: the strings in them are sent with bytes that are not UTF-8.
UNARY = {
    generation.GENERATE: generation_pb2.GenerateRequest,
    pooling.EMBED: pooling_pb2.EmbedRequest,
    pooling.CLASSIFY: pooling_pb2.ClassifyRequest,
    **{
        f"{ADAPTERS}{name}": getattr(adapters_pb2, f"{name}Request")
        for name in (
            *("CreateAdapter", "GetUpload", "GetAdapter", "ListAdapters", "UpdateAdapter", "ListAdapterVersions"),
            *("ActivateAdapterVersion", "PinAdapter", "UnpinAdapter", "DeleteAdapter", "DeleteAdapterVersion"),
        )
    },
    f"{OPERATIONS}GetOperation": operations_pb2.GetOperationRequest,
    f"{OPERATIONS}ListOperations": operations_pb2.ListOperationsRequest,
    f"{OPERATIONS}CancelOperation": operations_pb2.CancelOperationRequest,
    f"{OPERATIONS}DeleteOperation": operations_pb2.DeleteOperationRequest,
    f"{OPERATIONS}WaitOperation": operations_pb2.WaitOperationRequest,
    f"{HEALTH}Check": health_pb2.HealthCheckRequest,
}


def cases(_facts: Facts) -> Iterator[Case]:
    """All of them."""
    yield from _operations()
    yield from _health()
    yield from _methods()
    yield from _invalid_utf8()


def _operations() -> Iterator[Case]:
    requests = {
        "GetOperation": operations_pb2.GetOperationRequest,
        "CancelOperation": operations_pb2.CancelOperationRequest,
        "DeleteOperation": operations_pb2.DeleteOperationRequest,
        "WaitOperation": operations_pb2.WaitOperationRequest,
    }
    for rpc, message in requests.items():
        for name in names.BAD_OPERATIONS:
            data = message(name=name).SerializeToString()
            yield Case(name=f"{rpc}: name = {short(name)}", method=OPERATIONS + rpc, messages=(data,), fields=("name",))
        yield Case(
            name=f"{rpc}: an unknown operation",
            method=OPERATIONS + rpc,
            messages=(message(name=names.UNKNOWN_OPERATION).SerializeToString(),),
            code=NOT_FOUND,
            reason="OPERATION_NOT_FOUND",
        )
    listing = operations_pb2.ListOperationsRequest
    rows = [
        *((listing(page_size=size), "page_size", f"page_size = {size}") for size in (-1, -(2**31), 1001, 2**31 - 1)),
        *((listing(page_token=token), "page_token", f"token {short(token)}") for token in names.BAD_PAGE_TOKENS),
        *((listing(filter=text), "filter", f"filter = {text!r}") for text in ("done=true", " ", "\0")),
    ]
    for request, field, what in rows:
        yield Case(
            name=f"ListOperations: {what}",
            method=f"{OPERATIONS}ListOperations",
            messages=(request.SerializeToString(),),
            fields=(field,),
        )
    for request in (listing(), listing(page_size=0), listing(page_size=1), listing(page_size=1000), listing(name="x")):
        data = request.SerializeToString()
        yield Case(name=f"ListOperations: {request}", method=f"{OPERATIONS}ListOperations", messages=(data,), code=OK)
    for seconds, nanos in ((-1, 0), (0, -1), (2**63 - 1, 0), (0, 2**31 - 1), (-(2**63), 0)):
        wait = operations_pb2.WaitOperationRequest(
            name=names.UNKNOWN_OPERATION, timeout=duration_pb2.Duration(seconds=seconds, nanos=nanos)
        )
        yield Case(
            name=f"WaitOperation: {seconds} s and {nanos} ns for an unknown operation",
            method=f"{OPERATIONS}WaitOperation",
            messages=(wait.SerializeToString(),),
            code=NOT_FOUND,
        )


def _health() -> Iterator[Case]:
    def check(service: str, code: grpc.StatusCode) -> Case:
        data = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        name = f"Check: service = {short(service)}"
        return Case(name=name, method=f"{HEALTH}Check", messages=(data,), code=code, has_details=False)

    for service in ("x", "\0", "é" * 1000, "x" * 100_000, "motet.v1.GenerationService/Generate", " "):
        yield check(service, NOT_FOUND)
    for service in ("", "motet.v1.GenerationService", "motet.v1.AdapterService"):
        yield check(service, OK)
    for service in ("x", "x" * 100_000):
        data = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        yield Case(
            name=f"Watch: service = {short(service)}",
            method=f"{HEALTH}Watch",
            messages=(data,),
            code=OK,
            num_responses=1,
        )


def _methods() -> Iterator[Case]:
    good = generation.request().SerializeToString()
    for method in (
        *("/motet.v1.GenerationService/Nothing", "/motet.v1.Nothing/Generate", "/x", "/", "//", "/motet.v2.X/Y"),
        *("/motet.v1.GenerationService/generate", "/motet.v1.GenerationService/Generate/", "/" + "x" * 4000),
        *("/motet.worker.v1.WorkerService/Attach", "/motet.worker.v1.WorkerService/FetchAdapter"),  # of the other port
    ):
        yield Case(
            name=f"method {short(method)}", method=method, messages=(good,), code=UNIMPLEMENTED, has_details=False
        )
    large = chunk(4, b"x" * MAX_MESSAGE_BYTES)
    yield Case(
        name="a message above the limit",
        method=generation.GENERATE,
        messages=(large,),
        code=TOO_LARGE,
        has_details=False,
    )
    for name, data in {
        "no bytes": b"",
        "an unknown field": chunk(99, b"x"),
        "1 MB of it": chunk(99, b"x" * 10**6),
    }.items():
        yield Case(name=f"GetStatus: {name}", method=STATUS, messages=(data,), code=OK)
    parsed = status_pb2.GetStatusRequest.DESCRIPTOR.full_name
    for name, data in {"bytes that are not a message": b"\xff\xff", "half a field": number(1, 2**40)[:-1]}.items():
        yield Case(name=f"{parsed}: {name}", method=STATUS, messages=(data,), fields=("request",))


def _invalid_utf8() -> Iterator[Case]:
    """Every string of every request as bytes that are not UTF-8, an overlong form and half of a surrogate pair."""
    for method, message in UNARY.items():
        for path, numbers in string_fields(message.DESCRIPTOR):
            for bad in (b"\xff\xfe", b"\xc0\x80", b"a\xed\xa0\x80"):
                yield Case(
                    name=f"{method.rpartition('/')[2]}: {path} = {bad!r}",
                    method=method,
                    messages=(nested(numbers, bad),),
                    fields=("request",),
                    has_details=not method.startswith(HEALTH),
                )

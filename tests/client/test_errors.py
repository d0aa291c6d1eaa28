"""The error table and what is read from a status' details."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from motet import FieldViolation, InvalidArgument, MotetError, ServerError
from motet.errors import ERROR_BY_CODE

from tests.client.conftest import Driver
from tests.client.scripted_server import ScriptedServer, abort

FAILURES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@pytest.mark.parametrize("code", FAILURES, ids=lambda code: code.name)
def test_every_code_arrives_as_its_class_with_reason_and_metadata(
    server: ScriptedServer, driver: Driver, code: grpc.StatusCode
) -> None:
    info = error_details_pb2.ErrorInfo(reason="A_REASON", domain="motet", metadata={"limit": "8"})
    server.unary_error = lambda context: abort(context, code, "it went wrong", info)
    with pytest.raises(MotetError) as caught:
        driver.run(lambda client: client.status())
    error = caught.value
    assert type(error) is ERROR_BY_CODE[code] and error.code is code
    assert (str(error), error.reason, dict(error.metadata)) == ("it went wrong", "A_REASON", {"limit": "8"})


def test_the_table_knows_every_code_and_every_class_stands_in_it() -> None:
    assert set(ERROR_BY_CODE) == set(FAILURES)
    assert set(MotetError.__subclasses__()) == set(ERROR_BY_CODE.values())
    for code, error_class in ERROR_BY_CODE.items():
        assert error_class("x").code is code or error_class is ServerError


def test_field_violations_retry_and_resource_are_read(server: ScriptedServer, driver: Driver) -> None:
    violations = [
        error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="is 2; give (0, 1]"),
        error_details_pb2.BadRequest.FieldViolation(field="stop", description="is too long"),
    ]
    details = (
        error_details_pb2.BadRequest(field_violations=violations),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
        error_details_pb2.ResourceInfo(resource_type="adapter", resource_name="adapters/pirate"),
    )
    server.unary_error = lambda context: abort(context, grpc.StatusCode.INVALID_ARGUMENT, "refused", *details)
    with pytest.raises(InvalidArgument) as caught:
        driver.run(lambda client: client.status())
    error = caught.value
    assert error.field_violations == (
        FieldViolation("sampling.top_p", "is 2; give (0, 1]"),
        FieldViolation("stop", "is too long"),
    )
    assert (error.retry_after_s, error.resource) == (1.5, "adapters/pirate")


@pytest.mark.parametrize("trailer", [(), (("grpc-status-details-bin", b"\xff\xff\xff"),)])
def test_status_without_readable_details_keeps_code_and_text(
    server: ScriptedServer, driver: Driver, trailer: tuple[tuple[str, bytes], ...]
) -> None:
    def refuse(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(trailer)
        context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")

    server.unary_error = refuse  # type: ignore[assignment]  # abort() never returns, which its stub does not say
    with pytest.raises(MotetError) as caught:
        driver.run(lambda client: client.status())
    assert (caught.value.code, str(caught.value), caught.value.reason) == (
        grpc.StatusCode.NOT_FOUND,
        "nothing here",
        "",
    )

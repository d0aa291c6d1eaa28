"""Every refusal with RESOURCE_EXHAUSTED or UNAVAILABLE says when to try again.

Such a status is made in one place, from the class of an error. So it is enough that each class carries the time, and
that nobody makes such a status in another way.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

import control_plane
from control_plane import errors
from control_plane.api.rpc.error_status import status_proto
from tests.control_plane.test_errors import every_class

SOURCE = Path(control_plane.__file__).parent
CODES = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
REFUSALS = [cls for cls in every_class() if errors.status_of(cls.__new__(cls)).name in CODES]
# Files that may name these codes: the table of errors, and the codes of sessions of workers that end after they ran,
# which refuse nothing.
NAMES_CODES = {"errors.py", "fleet/workers/endings.py"}
# Files that end an RPC themselves, each with codes other than these: without a first message, of an unknown service. A
# front end hands on how the control plane ended a call, details included.
ENDS_RPCS = {
    "api/health.py",
    "api/rpc/interceptor.py",
    "fleet/service.py",
    "frontends/process.py",
    "scaler/v1/externalscaler_pb2_grpc.py",
}


def refusal(cls: type[errors.MotetError], retry_after_s: float) -> errors.MotetError:
    needed = inspect.signature(cls).parameters.values()
    others: dict[str, Any] = {
        one.name: "x" for one in needed if one.default is one.empty and one.name not in ("message", "retry_after_s")
    }
    return cls("no room", **others, retry_after_s=retry_after_s)  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", REFUSALS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    ("retry_after_s", "delay_ms"), [(12.0, 12_000), (0.0001, 1), (0.0, 1), (1.0004, 1001), (86_400.5, 86_400_500)]
)
def test_every_refusal_carries_a_time_that_is_not_too_early(
    cls: type[errors.MotetError], retry_after_s: float, delay_ms: int
) -> None:
    status = status_proto(refusal(cls, retry_after_s))
    assert status.code in (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], grpc.StatusCode.UNAVAILABLE.value[0])
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info) and status.details[-1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == delay_ms
    assert float(info.metadata["retry_after_s"]) * 1000 == pytest.approx(delay_ms)


def test_the_classes_are_those_that_are_known() -> None:
    assert len(REFUSALS) >= 13
    assert all(issubclass(cls, (errors.Exhausted, errors.Unavailable)) for cls in REFUSALS)
    named = {cls for cls, code in errors.STATUS_BY_ERROR.items() if code.name in CODES}
    assert named == {errors.Exhausted, errors.Unavailable}


def test_nobody_makes_such_a_status_in_another_way() -> None:
    """Walks the whole control plane."""
    names_codes, ends_rpcs, files = set(), set(), sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        path = str(file.relative_to(SOURCE))
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in CODES:
                names_codes.add(path)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_end = node.func.attr in ("abort", "abort_with_status", "set_code", "set_trailing_metadata")
                if is_end and "context" in ast.unparse(node.func.value):
                    ends_rpcs.add(path)
    assert names_codes == NAMES_CODES
    assert ends_rpcs <= ENDS_RPCS


def test_no_refusal_is_raised_with_a_time_of_zero_or_less() -> None:
    """Where a time is written as a number."""
    num_raised = 0
    names = {cls.__name__ for cls in REFUSALS}
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names):
                continue
            num_raised += 1
            for given in node.keywords:
                if given.arg == "retry_after_s" and isinstance(given.value, ast.Constant):
                    value = given.value.value
                    assert isinstance(value, (int, float)) and value > 0, f"{file.name}:{node.lineno}"
    assert num_raised > 25

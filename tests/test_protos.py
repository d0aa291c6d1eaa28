"""The protos keep to one style. `make lint` runs buf as well; these rules need no tool and are stricter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import descriptor
from motet.v1 import (
    adapters_pb2,
    constraints_pb2,
    fleet_pb2,
    generation_pb2,
    model_pb2,
    pooling_pb2,
    push_pb2,
    residency_pb2,
    status_pb2,
    types_pb2,
    verify_pb2,
)

from contract.v1 import plan_pb2

PROTOS = Path(__file__).resolve().parents[1] / "protos"
MODULES = (
    *(adapters_pb2, generation_pb2, model_pb2, plan_pb2, pooling_pb2, push_pb2),
    *(constraints_pb2, fleet_pb2, residency_pb2, status_pb2, types_pb2, verify_pb2),
)
FILES = [module.DESCRIPTOR for module in MODULES]
by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)

# Slow admin work responds with an operation; its name is Google's.
OPERATION = "google.longrunning.Operation"
OPERATION_METHODS = {"VerifyVersion", "CreateAdapter", "DeleteAdapter", "DeleteAdapterVersion"}

_DECLARATION = re.compile(
    r"\s*(service|rpc|message|enum|oneof|repeated|optional|map<|[\w.]+ \w+ = \d+|[A-Z_0-9]+ = \d+)"
)


def enums_of(file: descriptor.FileDescriptor) -> list[descriptor.EnumDescriptor]:
    nested = [enum for message in file.message_types_by_name.values() for enum in message.enum_types]
    return [*file.enum_types_by_name.values(), *nested]


def test_every_proto_file_is_checked_here() -> None:
    ours = PROTOS / "motet"
    assert {file.name for file in FILES} == {str(path.relative_to(PROTOS)) for path in ours.rglob("*.proto")}


def test_protos_are_complete() -> None:
    """`protoc -I protos` alone finds every import; google/protobuf comes with protoc itself."""
    missing = [
        f"{path.relative_to(PROTOS)}: {imported}"
        for path in PROTOS.rglob("*.proto")
        for imported in re.findall(r'^import "([^"]+)";', path.read_text(encoding="utf-8"), re.MULTILINE)
        if not imported.startswith("google/protobuf/") and not (PROTOS / imported).is_file()
    ]
    assert not missing


def test_protos_of_google_carry_their_license_and_a_client_can_decode_error_details() -> None:
    files = sorted((PROTOS / "google").rglob("*.proto"))
    assert PROTOS / "google/rpc/error_details.proto" in files
    assert [path for path in files if "Apache License, Version 2.0" not in path.read_text("utf-8")[:1000]] == []


@by_file
def test_package_is_the_directory(file: descriptor.FileDescriptor) -> None:
    assert file.package == str(Path(file.name).parent).replace("/", ".")


@by_file
def test_enum_values_carry_the_enum_name_and_zero_is_unspecified(file: descriptor.FileDescriptor) -> None:
    for enum in enums_of(file):
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.values[0].number == 0
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values), enum.full_name


@by_file
def test_fields_are_lower_snake_case_and_booleans_are_not_negated(file: descriptor.FileDescriptor) -> None:
    for message in file.message_types_by_name.values():
        for field in message.fields:
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name), field.full_name
            assert not field.name.startswith(("no_", "not_", "disable_")), field.full_name


def test_every_rpc_has_its_own_request_and_response() -> None:
    methods = [m for file in FILES for service in file.services_by_name.values() for m in service.methods]
    assert methods
    for method in methods:
        package = method.containing_service.file.package
        assert method.input_type.full_name == f"{package}.{method.name}Request"
        if method.name in OPERATION_METHODS:
            assert method.output_type.full_name == OPERATION
        else:
            assert method.output_type.full_name == f"{package}.{method.name}Response"


def test_services_are_named_services() -> None:
    assert all(name.endswith("Service") for file in FILES for name in file.services_by_name)


@by_file
def test_everything_declared_is_commented(file: descriptor.FileDescriptor) -> None:
    """The line above a declaration belongs to a comment."""
    lines = (PROTOS / file.name).read_text(encoding="utf-8").splitlines()
    bare = [
        f"{file.name}:{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if _DECLARATION.match(line) and not lines[number - 1].strip().startswith("//")
    ]
    assert not bare


@by_file
def test_numbers_say_their_unit(file: descriptor.FileDescriptor) -> None:
    """A number's comment names its unit, or says that it is an identity and not a quantity."""
    known = (
        r"count|bytes|seconds?|milliseconds|microseconds|tokens?|no unit|from 0|from 1|protocol|version|index|epoch|"
    )
    known += r"generation|plan'?s?|per session|0: none|position|row|fencing|rank"
    lines = (PROTOS / file.name).read_text(encoding="utf-8").splitlines()
    without = []
    for number, line in enumerate(lines):
        if not re.match(r"\s*(optional |repeated )?(u?int32|u?int64|float|double) \w+ = \d+;", line):
            continue
        start = number
        while lines[start - 1].strip().startswith("//"):
            start -= 1
        if not re.search(known, " ".join(lines[start:number]), flags=re.IGNORECASE):
            without.append(f"{file.name}:{number + 1}: {line.strip()}")
    assert not without

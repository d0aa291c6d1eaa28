"""`motet status --json` has every field of docs/status.schema.json, and no field that the schema does not describe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # the package has no types
from motet.cli.main import main

from tests.client.scripted_server import ScriptedServer
from tests.control_plane.server_processes import ROOT

SCHEMA: dict[str, Any] = json.loads((ROOT / "docs/status.schema.json").read_text(encoding="utf-8"))


def printed_status(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints for a server with a worker, a tenant and an audit log."""
    server.status.workers.add(worker_id="w0", step_time_ms=1.5)
    server.status.tenants.add(tenant="acme", weight=2.0)
    server.status.active_adapters.add(num_running=1)
    server.status.audit.is_on = True
    assert main(["--server", server.target, "status", "--json"]) == 0
    status: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status


def undescribed(value: object, schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of the fields of `value` that `schema` does not have."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    for choice in schema.get("anyOf", ()):
        if "$ref" in choice:
            yield from undescribed(value, choice, path)
            return
    if isinstance(value, dict):
        for name, item in value.items():
            if name in schema["properties"]:
                yield from undescribed(item, schema["properties"][name], f"{path}/{name}")
            else:
                yield f"{path}/{name}"
    elif isinstance(value, list):
        for item in value:
            yield from undescribed(item, schema["items"], path)


def test_the_status_follows_the_schema(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    status = printed_status(server, capsys)
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(status)
    assert list(undescribed(status, SCHEMA)) == []


@pytest.mark.parametrize(
    "part", ["", "model", "workers", "queues", "adapters", "limits", "tenants", "active_adapters", "audit"]
)
def test_a_field_that_vanishes_is_noticed(
    part: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    status = printed_status(server, capsys)
    found = status[part] if part else status
    fields = found[0] if isinstance(found, list) else found
    validator = Draft202012Validator(SCHEMA)
    assert fields
    for name in list(fields):
        value = fields.pop(name)
        assert not validator.is_valid(status), f"{part}/{name} is not required"
        fields[name] = value
    fields["unknown"] = 1
    assert list(undescribed(status, SCHEMA)) == [f"/{part}/unknown" if part else "/unknown"]

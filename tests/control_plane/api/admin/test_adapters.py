"""AdapterService over a real channel: operator roots, pages, masks, shutdown, audit."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2
from google.protobuf import field_mask_pb2
from motet.v1 import adapters_pb2

from control_plane.api import wire
from tests.control_plane.api.admin.calls import FILES, adapters, finished, messages, operations, refused, upload
from tests.control_plane.api.fake_adapters import DIGEST
from tests.control_plane.api.fakes import Api, details


async def test_create_reads_below_an_operators_root(api: Api) -> None:
    directory = api.root / "voices" / "poet"
    directory.mkdir(parents=True)
    for name, data in FILES.items():
        (directory / name).write_bytes(data)
    request = adapters_pb2.CreateAdapterRequest(adapter_id="poet", source="team/voices/poet", request_id="c1")
    operation = await adapters(api).CreateAdapter(request)
    metadata = adapters_pb2.AdapterOperationMetadata()
    assert operation.metadata.Unpack(metadata)
    assert (metadata.adapter, metadata.verb, metadata.create_time.seconds) == ("adapters/poet", "create", 7)
    adapter = adapters_pb2.Adapter()
    assert (await finished(api, operation)).response.Unpack(adapter)
    assert adapter.name == "adapters/poet" and api.registry.files["poet"] == FILES
    again = await adapters(api).CreateAdapter(request)
    assert again.name == operation.name and again.done, "the operation as it stands"
    await operations(api).DeleteOperation(operations_pb2.DeleteOperationRequest(name=operation.name))
    assert await adapters(api).CreateAdapter(request) == operation, "as it was when it began"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("team/../outside", "PATH_NOT_ALLOWED"),
        ("team//etc", "PATH_NOT_ALLOWED"),
        ("team", "PATH_NOT_ALLOWED"),
        ("team/", "PATH_NOT_ALLOWED"),
        ("team/.", "PATH_NOT_ALLOWED"),
        ("team/a\0b", "PATH_NOT_ALLOWED"),
        ("/etc/passwd", "PATH_NOT_ALLOWED"),
        ("nobody/x", "PATH_NOT_ALLOWED"),
        ("team/link", "PATH_NOT_ALLOWED"),
        ("team/linked-files", "PATH_NOT_ALLOWED"),
        ("team/missing", "FIELD_INVALID"),
        ("team/folders", "FIELD_INVALID"),
        ("", "PATH_NOT_ALLOWED"),
    ],
)
async def test_create_never_leaves_its_root(api: Api, source: str, reason: str) -> None:
    outside = api.directory / "outside"
    outside.mkdir()
    (api.root / "linked-files").mkdir()
    for name, data in FILES.items():
        (outside / name).write_bytes(data)
        (api.root / "linked-files" / name).symlink_to(outside / name)
        (api.root / "folders" / name).mkdir(parents=True)
    (api.root / "link").symlink_to(outside)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await adapters(api).CreateAdapter(adapters_pb2.CreateAdapterRequest(adapter_id="x", source=source))
    assert details(caught.value)[0].reason == reason
    assert str(api.directory) not in (caught.value.details() or "")
    assert not api.calls


async def test_get_shows_placements_and_list_pages(api: Api) -> None:
    for name in ("a", "b", "c"):
        api.registry.add(name)
    got = (await adapters(api).GetAdapter(adapters_pb2.GetAdapterRequest(name="adapters/a"))).adapter
    assert [(p.tier, p.worker_id) for p in got.placements] == [
        (adapters_pb2.ADAPTER_TIER_STORE, ""),
        (adapters_pb2.ADAPTER_TIER_HOST_CACHE, ""),
        (adapters_pb2.ADAPTER_TIER_ARENA, "w0"),
    ]
    page = await adapters(api).ListAdapters(adapters_pb2.ListAdaptersRequest(page_size=2))
    assert [adapter.name for adapter in page.adapters] == ["adapters/a", "adapters/b"]
    assert not page.adapters[0].active_version.target_modules and not page.adapters[0].placements
    rest = await adapters(api).ListAdapters(
        adapters_pb2.ListAdaptersRequest(page_size=2, page_token=page.next_page_token)
    )
    assert [adapter.name for adapter in rest.adapters] == ["adapters/c"] and not rest.next_page_token
    versions = await adapters(api).ListAdapterVersions(adapters_pb2.ListAdapterVersionsRequest(name="adapters/a"))
    assert [version.digest for version in versions.versions] == [DIGEST]
    code, _, fields = await refused(adapters(api).ListAdapters(adapters_pb2.ListAdaptersRequest(page_size=1001)))
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["page_size"])


async def test_adapters_with_many_labels_come_in_pages_that_every_client_takes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 adapters with all the labels that they may have are 18 MB, and take 0.4 s to put into messages."""
    names = [f"a{number:03d}" for number in range(1000)]
    labels = {f"label-{number:02d}": "v" * 256 for number in range(64)}
    for name in names:
        api.registry.records[name] = replace(api.registry.add(name), labels=labels)
    num_made = num_turns = longest_run = 0
    make = wire.adapter_message

    def counted(record: Any) -> adapters_pb2.Adapter:
        nonlocal num_made, longest_run
        num_made += 1
        longest_run = max(longest_run, num_made)
        return make(record)

    def turn() -> None:
        nonlocal num_made, num_turns
        num_made, num_turns = 0, num_turns + 1
        handles[0] = asyncio.get_running_loop().call_soon(turn)

    monkeypatch.setattr(wire, "adapter_message", counted)
    handles = [asyncio.get_running_loop().call_soon(turn)]
    listed: list[str] = []
    token = ""
    while not listed or token:
        request = adapters_pb2.ListAdaptersRequest(page_size=1000, page_token=token)
        page = await adapters(api).ListAdapters(request)
        assert page.ByteSize() < 3 * 2**20
        listed += [adapter.name for adapter in page.adapters]
        token = page.next_page_token
    handles[0].cancel()
    assert listed == [f"adapters/{name}" for name in names]
    assert longest_run <= 32, "others have their turn of the event loop after so many"


async def test_update_mask_of_a_million_paths_is_refused_by_their_number(api: Api) -> None:
    api.registry.add("a")
    message = adapters_pb2.UpdateAdapterRequest(adapter={"name": "adapters/a"})
    message.update_mask.paths.extend(str(number) for number in range(20_000))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await adapters(api).UpdateAdapter(message)
    assert caught.value.details() == "update_mask: 20000 paths; at most 16"


@pytest.mark.parametrize("name", ["", "poet", "adapters/", "adapters/../x", "workers/x"])
async def test_bad_resource_name_is_refused(api: Api, name: str) -> None:
    code, _, fields = await refused(adapters(api).GetAdapter(adapters_pb2.GetAdapterRequest(name=name)))
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["name"])


async def test_update_changes_only_what_the_mask_names(api: Api) -> None:
    api.registry.add("poet")
    adapter = adapters_pb2.Adapter(name="adapters/poet", display_name="New", labels={"a": "b"}, etag="u1-1")
    mask = field_mask_pb2.FieldMask(paths=["display_name"])
    request = adapters_pb2.UpdateAdapterRequest(adapter=adapter, update_mask=mask)
    changed = (await adapters(api).UpdateAdapter(request)).adapter
    assert (changed.display_name, dict(changed.labels)) == ("New", {})
    assert api.calls == [("update", "poet", "New", None, "u1-1")]
    for paths in ([], ["pinned"]):
        request.update_mask.CopyFrom(field_mask_pb2.FieldMask(paths=paths))
        code, _, fields = await refused(adapters(api).UpdateAdapter(request))
        assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["update_mask"])


async def test_mutations_are_refused_during_a_shutdown(api: Api) -> None:
    api.registry.add("a")
    api.gate.close()
    stub, named = adapters(api), {"name": "adapters/a"}
    calls = [
        upload(api, messages()),
        stub.CreateAdapter(adapters_pb2.CreateAdapterRequest(adapter_id="x", source="team/x")),
        stub.UpdateAdapter(adapters_pb2.UpdateAdapterRequest(adapter=named)),
        stub.ActivateAdapterVersion(adapters_pb2.ActivateAdapterVersionRequest(digest=DIGEST, **named)),
        stub.PinAdapter(adapters_pb2.PinAdapterRequest(**named)),
        stub.UnpinAdapter(adapters_pb2.UnpinAdapterRequest(**named)),
        stub.DeleteAdapter(adapters_pb2.DeleteAdapterRequest(**named)),
        stub.DeleteAdapterVersion(adapters_pb2.DeleteAdapterVersionRequest(digest=DIGEST, **named)),
    ]
    for call in calls:
        assert (await refused(call))[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert (await stub.GetAdapter(adapters_pb2.GetAdapterRequest(**named))).adapter.name == "adapters/a"


async def test_every_mutation_leaves_one_audit_line(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="motet.audit"):
        await upload(api, messages())
        await refused(upload(api, messages("Bad")))
        await adapters(api).PinAdapter(adapters_pb2.PinAdapterRequest(name="adapters/poet"))
        await finished(api, await adapters(api).DeleteAdapter(adapters_pb2.DeleteAdapterRequest(name="adapters/poet")))
    lines = [record.getMessage() for record in caplog.records if record.name == "motet.audit"]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("action=adapter.upload", "reason="),
        ("action=adapter.upload", "reason=FIELD_INVALID"),
        ("action=adapter.pin", "reason="),
        ("action=adapter.delete", "reason="),
    ]
    assert f"resource=adapters/poet digest={DIGEST} tenant=default principal= peer=ipv4:127.0.0.1:" in lines[0]

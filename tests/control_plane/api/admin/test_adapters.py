"""AdapterService over a real channel: uploads, operator roots, idempotency, pins, deletion, audit."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2, field_mask_pb2
from motet.v1 import adapters_pb2, adapters_pb2_grpc

from control_plane.api import wire
from control_plane.api.admin.upload import check_header
from control_plane.errors import InvalidAdapter, InvalidRequest
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST
from tests.control_plane.api.fakes import Api, details
from tests.fakes.tcp_proxy import TcpProxy

FILES = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": bytes(range(256)) * 300}
Messages = list[adapters_pb2.UploadAdapterRequest]


def messages(
    adapter_id: str = "poet", files: dict[str, bytes] = FILES, chunk_bytes: int = 40_000, **header: Any
) -> Messages:
    listed = [
        adapters_pb2.UploadFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]
    upload = adapters_pb2.UploadHeader(adapter_id=adapter_id, files=listed, **header)
    return [adapters_pb2.UploadAdapterRequest(header=upload)] + [
        adapters_pb2.UploadAdapterRequest(
            chunk=adapters_pb2.UploadChunk(file_index=index, offset=start, data=data[start : start + chunk_bytes])
        )
        for index, data in enumerate(files.values())
        for start in range(0, len(data), chunk_bytes)
    ]


def adapters(api: Api) -> Any:
    return api.stub(adapters_pb2_grpc.AdapterServiceStub)


def operations(api: Api) -> Any:
    return api.stub(operations_pb2_grpc.OperationsStub)


async def upload(api: Api, parts: Iterable[adapters_pb2.UploadAdapterRequest]) -> adapters_pb2.Adapter:
    return (await adapters(api).UploadAdapter(iter(parts), timeout=20)).adapter


async def refused(awaitable: Any) -> tuple[grpc.StatusCode, str, list[str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    info, fields, _ = details(caught.value)
    return caught.value.code(), info.reason, fields


def no_upload_left(api: Api) -> bool:
    return not api.uploads_dir.exists() or not list(api.uploads_dir.iterdir())


async def test_upload_registers_the_bytes_and_leaves_nothing_behind(api: Api) -> None:
    adapter = await upload(api, messages(display_name="Poet", labels={"voice": "low"}))
    assert api.registry.files["poet"] == FILES
    assert (adapter.name, adapter.display_name, dict(adapter.labels)) == ("adapters/poet", "Poet", {"voice": "low"})
    assert adapter.active_version.digest == DIGEST
    assert list(adapter.active_version.target_modules) == ["model.layers.0.self_attn.q_proj"]
    assert adapter.state == adapters_pb2.ADAPTER_STATE_ACTIVE
    assert no_upload_left(api)


async def test_upload_and_create_report_what_they_changed(api: Api) -> None:
    first = await upload(api, messages())
    assert first.registration == adapters_pb2.Registration(change=adapters_pb2.REGISTRATION_CHANGE_CREATED)
    api.registry.add("poet", OTHER_DIGEST)
    second = await upload(api, messages())
    assert second.registration.change == adapters_pb2.REGISTRATION_CHANGE_VERSION_ADDED
    assert second.registration.previous_version.digest == OTHER_DIGEST
    assert second.active_version.number == second.registration.previous_version.number == 1
    (api.root / "v2").mkdir()
    for name, data in FILES.items():
        (api.root / "v2" / name).write_bytes(data)
    api.registry.add("poet", OTHER_DIGEST)
    begun = await adapters(api).CreateAdapter(adapters_pb2.CreateAdapterRequest(adapter_id="poet", source="team/v2"))
    ended = await operations(api).WaitOperation(operations_pb2.WaitOperationRequest(name=begun.name), timeout=20)
    adapter = adapters_pb2.Adapter()
    ended.response.Unpack(adapter)
    assert adapter.registration == second.registration
    got = await adapters(api).GetAdapter(adapters_pb2.GetAdapterRequest(name="adapters/poet"))
    assert not got.adapter.HasField("registration")


async def test_validate_only_stores_nothing(api: Api) -> None:
    await upload(api, messages(validate_only=True))
    assert api.calls == [("register", "poet", True)]
    assert not api.registry.records


def edit(change: Callable[[Messages], None]) -> Messages:
    parts = messages()
    change(parts)
    return parts


def set_header(**fields: Any) -> Messages:
    def change(parts: Messages) -> None:
        for name, value in fields.items():
            setattr(parts[0].header, name, value)

    return edit(change)


def set_file(index: int, name: str, value: Any) -> Messages:
    return edit(lambda parts: setattr(parts[0].header.files[index], name, value))


def set_chunk(position: int, name: str, value: Any) -> Messages:
    return edit(lambda parts: setattr(parts[position].chunk, name, value))


HEADER = "header.files"
BAD_UPLOADS: dict[str, tuple[Messages, str]] = {
    "nothing": ([], "header"),
    "no header": (messages()[1:], "header"),
    "header twice": ([messages()[0], *messages()], "header"),
    "path as id": (set_header(adapter_id="../up"), "header.adapter_id"),
    "empty id": (set_header(adapter_id=""), "header.adapter_id"),
    "long id": (set_header(adapter_id="x" * 64), "header.adapter_id"),
    "long display name": (set_header(display_name="é" * 129), "header.display_name"),
    "label key": (messages(labels={"UPPER": "x"}), "header.labels"),
    "label value": (messages(labels={"a": "x" * 257}), "header.labels['a']"),
    "many labels": (messages(labels={f"k{i}": "" for i in range(65)}), "header.labels"),
    "long request id": (set_header(request_id="r" * 129), "header.request_id"),
    "one file": (messages(files={"adapter_config.json": b"{}"}), HEADER),
    "a third file": (messages(files={**FILES, "run.py": b"x"}), f"{HEADER}[2].name"),
    "path as file": (messages(files={**FILES, "../x": b"x"}), f"{HEADER}[2].name"),
    "one file twice": (edit(lambda p: p[0].header.files.append(p[0].header.files[0])), HEADER),
    "empty file": (set_file(1, "size_bytes", 0), f"{HEADER}[1].size_bytes"),
    "upper-case hash": (set_file(1, "sha256", "A" * 64), f"{HEADER}[1].sha256"),
    "too large": (set_file(1, "size_bytes", 5 << 20), HEADER),
    "absurdly large": (set_file(1, "size_bytes", 2**63), HEADER),
    "wrong offset": (set_chunk(2, "offset", 1), "chunk.offset"),
    "wrong order": (set_chunk(1, "file_index", 1), "chunk.file_index"),
    "file that is not announced": (set_chunk(2, "file_index", 7), "chunk.file_index"),
    "empty chunk": (set_chunk(2, "data", b""), "chunk.data"),
    "chunk beyond the file": (set_chunk(1, "data", b"x" * 9), "chunk.data"),
    "chunk over 1 MiB": (
        messages(files={**FILES, "adapter_config.json": b"x" * (2**20 + 1)}, chunk_bytes=2**20 + 1),
        "chunk.data",
    ),
    "cut in a file": (messages()[:-1], f"{HEADER}[1].size_bytes"),
    "cut between files": (messages()[:2], f"{HEADER}[1].size_bytes"),
    "over-long": ([*messages(), messages()[-1]], "chunk"),
}


def test_an_upload_that_is_too_large_is_refused_with_advice() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_header(messages()[0].header, max_adapter_bytes=1)
    (violation,) = caught.value.violations
    assert "at most 1 (the server's --max-adapter-bytes): raise it" in violation.description
    assert "save with save_embedding_layers=False" in violation.description


@pytest.mark.parametrize("what", BAD_UPLOADS)
async def test_bad_upload_names_its_field_and_registers_nothing(api: Api, what: str) -> None:
    parts, field = BAD_UPLOADS[what]
    code, reason, fields = await refused(upload(api, parts))
    assert (code, reason, fields) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID", [field])
    assert not api.calls
    assert no_upload_left(api)
    await upload(api, messages())


async def test_wrong_hash_is_data_loss(api: Api) -> None:
    code, reason, _ = await refused(upload(api, set_file(1, "sha256", "0" * 64)))
    assert (code, reason) == (grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH")
    assert not api.calls and no_upload_left(api)


async def test_bad_adapter_is_refused_and_cleaned_up(api: Api) -> None:
    from control_plane.errors import FieldViolation

    api.registry.error = InvalidAdapter(FieldViolation("adapter_config.json:r", "0; at least 1"))
    code, reason, fields = await refused(upload(api, messages()))
    assert (code, reason, fields) == (grpc.StatusCode.INVALID_ARGUMENT, "ADAPTER_INVALID", ["adapter_config.json:r"])
    assert no_upload_left(api)


async def test_only_a_few_uploads_may_be_open(api: Api) -> None:
    api.registry.gate = asyncio.Event()
    running = [asyncio.ensure_future(upload(api, messages(f"a{i}"))) for i in range(2)]
    await api.registry.entered_twice.wait()
    code, reason, _ = await refused(upload(api, messages("late")))
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED")
    api.registry.gate.set()
    await asyncio.gather(*running)
    await upload(api, messages("late"))


async def test_cancelled_upload_is_removed(api: Api) -> None:
    api.registry.gate = asyncio.Event()
    call = adapters(api).UploadAdapter(iter(messages()))
    await api.registry.entered.wait()
    assert not no_upload_left(api)
    call.cancel()
    await api.registry.left.wait()
    for _ in range(20):  # turns of the loop in which the handler unwinds
        await asyncio.sleep(0)
    assert no_upload_left(api)


@pytest.mark.parametrize("way", ["cancelled", "cut off"])
async def test_upload_that_does_not_end_in_order_registers_nothing(api: Api, way: str) -> None:
    """Every byte has arrived; what is missing is the end of the client's side."""
    total = sum(map(len, FILES.values()))
    for _ in range(20):
        async with TcpProxy(api.port) as proxy, grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
            call = stub.UploadAdapter()
            for message in messages():
                await call.write(message)
            async with asyncio.timeout(30):
                while sum(path.stat().st_size for path in api.uploads_dir.rglob("adapter_*")) < total:
                    await asyncio.sleep(0)
            if way == "cancelled":
                call.cancel()
            else:
                proxy.cut()
            async with asyncio.timeout(30):
                while not no_upload_left(api):
                    await asyncio.sleep(0)
    assert api.calls == []
    await upload(api, messages())  # one that ends in order
    assert api.calls == [("register", "poet", False)]


async def test_repeated_request_id_gets_the_same_response_for_a_day(api: Api) -> None:
    first = await upload(api, messages(request_id="once"))
    assert await upload(api, messages(request_id="once")) == first
    assert len(api.calls) == 1
    code, _, fields = await refused(upload(api, messages("other", request_id="once")))
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["header.request_id"])
    api.now_s += 24 * 3600 + 1
    await upload(api, messages(request_id="once"))
    assert len(api.calls) == 2


async def finished(api: Api, operation: Any) -> Any:
    done = await operations(api).WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name), timeout=10)
    assert done.done
    return done


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


async def test_pin_follows_the_active_version_and_is_shared_by_names(api: Api) -> None:
    api.registry.add("a", DIGEST, OTHER_DIGEST)
    api.registry.add("b", DIGEST)
    for name in ("adapters/a", "adapters/b", "adapters/a"):
        assert (await adapters(api).PinAdapter(adapters_pb2.PinAdapterRequest(name=name))).adapter.pinned
    assert api.weights.pinned == [DIGEST]
    await adapters(api).ActivateAdapterVersion(
        adapters_pb2.ActivateAdapterVersionRequest(name="adapters/a", digest=OTHER_DIGEST)
    )
    assert sorted(api.weights.pinned) == sorted(api.fleet.pinned) == [DIGEST, OTHER_DIGEST]
    for name in ("adapters/b", "adapters/b"):
        assert not (await adapters(api).UnpinAdapter(adapters_pb2.UnpinAdapterRequest(name=name))).adapter.pinned
    assert api.weights.pinned == [*api.fleet.pinned] == [OTHER_DIGEST]


async def test_pin_beyond_the_budget_changes_nothing(api: Api) -> None:
    api.registry.add("a")
    api.weights.max_pinned = 0
    code, reason, _ = await refused(adapters(api).PinAdapter(adapters_pb2.PinAdapterRequest(name="adapters/a")))
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "PIN_BUDGET")
    assert not api.registry.records["a"].is_pinned and not api.fleet.pinned


async def test_pins_are_restored_from_the_registry(api: Api) -> None:
    api.registry.add("a")
    await api.registry.set_pinned("a")
    api.registry.add("b", OTHER_DIGEST)
    await api.life_cycle.restore_pins()
    assert api.weights.pinned == [*api.fleet.pinned] == [DIGEST]


async def left(handler: asyncio.Task[Any], begun: asyncio.Event, gate: asyncio.Event) -> None:
    """Cancels the handler once `begun` is set, as gRPC does when a client leaves; then lets what it waits for go on."""
    await asyncio.wait_for(begun.wait(), 5)
    handler.cancel()
    await asyncio.wait([handler])
    assert handler.cancelled()
    gate.set()


@pytest.mark.parametrize("change", ["activate", "create"])
async def test_pin_follows_a_new_version_though_the_client_leaves(api: Api, change: str) -> None:
    api.registry.add("a", OTHER_DIGEST, DIGEST)
    await api.life_cycle.pin("a")
    context: Any = None
    gate = api.weights.pin_gate = asyncio.Event()
    api.weights.pin_begun.clear()
    if change == "activate":
        request = adapters_pb2.ActivateAdapterVersionRequest(name="adapters/a", digest=DIGEST)
        handler = asyncio.create_task(api.adapters.ActivateAdapterVersion(request, context))
        await left(handler, api.weights.pin_begun, gate)
    else:
        (api.root / "x").mkdir()
        for name, data in FILES.items():
            (api.root / "x" / name).write_bytes(data)
        create = adapters_pb2.CreateAdapterRequest(adapter_id="a", source="team/x")
        operation = await api.adapters.CreateAdapter(create, context)
        running = api.operations.get(operation.name.removeprefix("operations/"))
        await asyncio.wait_for(api.weights.pin_begun.wait(), 5)
        running.cancel()
        assert await running.wait(5)
        gate.set()
    await api.life_cycle.restore_pins()  # comes after the change, which holds the lock of the name
    assert api.weights.pinned == [*api.fleet.pinned] == [DIGEST]


async def test_pin_and_unpin_reach_every_tier_though_the_client_leaves(api: Api) -> None:
    api.registry.add("a")
    context: Any = None
    for is_pinned in (True, False):
        gate = api.registry.response_gate = asyncio.Event()
        api.registry.response_due.clear()
        if is_pinned:
            pin = adapters_pb2.PinAdapterRequest(name="adapters/a")
            handler: asyncio.Task[Any] = asyncio.create_task(api.adapters.PinAdapter(pin, context))
        else:
            unpin = adapters_pb2.UnpinAdapterRequest(name="adapters/a")
            handler = asyncio.create_task(api.adapters.UnpinAdapter(unpin, context))
        await left(handler, api.registry.response_due, gate)
        await api.life_cycle.restore_pins()  # comes after the change, which holds the lock of the name
        assert api.registry.records["a"].is_pinned == is_pinned
        assert api.weights.pinned == [*api.fleet.pinned] == ([DIGEST] if is_pinned else [])


async def test_delete_whose_client_leaves_is_ended_all_the_same(api: Api) -> None:
    api.registry.add("poet")
    api.registry.delete_gate = asyncio.Event()
    context: Any = None
    request = adapters_pb2.DeleteAdapterRequest(name="adapters/poet")
    handler = asyncio.create_task(api.adapters.DeleteAdapter(request, context))
    await asyncio.wait_for(api.registry.delete_begun.wait(), 5)
    handler.cancel()  # what gRPC does when a client leaves
    await asyncio.wait([handler])
    assert handler.cancelled()
    api.registry.delete_gate.set()
    await asyncio.wait_for(api.registry.delete_finished.wait(), 5)
    assert api.calls[-1] == ("finish_delete", "poet")


async def test_delete_clears_every_tier_in_order(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    await api.life_cycle.pin("poet")
    api.fleet.unload_gate = asyncio.Event()
    operation = await adapters(api).DeleteAdapter(adapters_pb2.DeleteAdapterRequest(name="adapters/poet", etag="u1-1"))
    assert not operation.done
    code, _, _ = await refused(adapters(api).GetAdapter(adapters_pb2.GetAdapterRequest(name="adapters/poet")))
    assert code == grpc.StatusCode.NOT_FOUND  # at once, not when the operation ends
    api.fleet.unload_gate.set()
    assert (await finished(api, operation)).response.Unpack(empty_pb2.Empty())
    assert api.calls == [
        ("begin_delete", "poet", "u1-1"),
        ("unload", DIGEST),
        ("drop", DIGEST),
        ("unload", OTHER_DIGEST),
        ("drop", OTHER_DIGEST),
        ("finish_delete", "poet"),
    ]
    assert not api.weights.pinned and not api.fleet.pinned
    code, _, _ = await refused(adapters(api).DeleteAdapter(adapters_pb2.DeleteAdapterRequest(name="adapters/poet")))
    assert code == grpc.StatusCode.NOT_FOUND


async def test_second_delete_joins_the_first(api: Api) -> None:
    api.registry.add("poet")
    api.registry.delete_gate, api.fleet.unload_gate = asyncio.Event(), asyncio.Event()
    stub, request = adapters(api), adapters_pb2.DeleteAdapterRequest(name="adapters/poet")
    context: Any = None
    first = asyncio.ensure_future(stub.DeleteAdapter(request))
    await asyncio.wait_for(api.registry.delete_begun.wait(), 5)
    second = asyncio.create_task(api.adapters.DeleteAdapter(request, context))
    await asyncio.sleep(0)
    api.registry.delete_gate.set()
    operation = await asyncio.wait_for(first, 5)
    third = await stub.DeleteAdapter(request)
    assert operation.name == (await second).name == third.name
    api.fleet.unload_gate.set()
    assert (await finished(api, operation)).response.Unpack(empty_pb2.Empty())
    assert [call[0] for call in api.calls] == ["begin_delete", "unload", "drop", "finish_delete"]


async def test_a_version_is_deleted_when_its_streams_have_ended(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    gate = api.fleet.unload_gate = asyncio.Event()
    request = adapters_pb2.DeleteAdapterVersionRequest(name="adapters/poet", digest=OTHER_DIGEST, etag="u1-1")
    stub = adapters(api)
    operation = await stub.DeleteAdapterVersion(request)
    metadata = adapters_pb2.AdapterOperationMetadata()
    assert operation.metadata.Unpack(metadata)
    assert (metadata.adapter, metadata.verb, metadata.digest) == ("adapters/poet", "delete_version", OTHER_DIGEST)
    assert (await stub.DeleteAdapterVersion(request)).name == operation.name  # a second call joins it
    assert [v.digest for v in api.registry.records["poet"].versions] == [DIGEST]  # at once
    gate.set()
    assert (await finished(api, operation)).response.Unpack(empty_pb2.Empty())
    assert api.calls == [
        ("begin_delete_version", "poet", OTHER_DIGEST, "u1-1"),
        ("unload", OTHER_DIGEST),
        ("drop", OTHER_DIGEST),
        ("finish_delete_version", OTHER_DIGEST),
    ]


async def test_weights_of_a_deleted_version_that_a_name_has_stay(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    api.registry.add("bard", OTHER_DIGEST)
    request = adapters_pb2.DeleteAdapterVersionRequest(name="adapters/poet", digest=OTHER_DIGEST)
    await finished(api, await adapters(api).DeleteAdapterVersion(request))
    assert [call[0] for call in api.calls] == ["begin_delete_version", "finish_delete_version"]


async def test_bad_deletions_of_versions_are_refused_and_may_be_tried_again(api: Api) -> None:
    api.registry.add("poet", DIGEST, OTHER_DIGEST)
    stub = adapters(api)

    def ask(name: str = "adapters/poet", digest: str = DIGEST) -> Any:
        return refused(stub.DeleteAdapterVersion(adapters_pb2.DeleteAdapterVersionRequest(name=name, digest=digest)))

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert await ask(digest="ab") == (invalid, "FIELD_INVALID", ["digest"])
    assert await ask(name="poet") == (invalid, "FIELD_INVALID", ["name"])
    assert (await ask(name="adapters/nobody"))[:2] == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
    for _ in range(2):
        assert (await ask())[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_ACTIVE")
    await api.registry.activate("poet", OTHER_DIGEST)
    request = adapters_pb2.DeleteAdapterVersionRequest(name="adapters/poet", digest=DIGEST)
    await finished(api, await stub.DeleteAdapterVersion(request))


async def test_weights_that_another_name_registers_are_not_dropped(api: Api) -> None:
    api.registry.add("poet")
    api.fleet.unload_gate = asyncio.Event()  # the other name's traffic would hold it back for ever
    operation = await adapters(api).DeleteAdapter(adapters_pb2.DeleteAdapterRequest(name="adapters/poet"))
    await asyncio.wait_for(api.fleet.unload_begun.wait(), 5)
    await upload(api, messages("bard"))
    assert (await finished(api, operation)).response.Unpack(empty_pb2.Empty())
    assert api.calls[-1] == ("finish_delete", "poet") and ("drop", DIGEST) not in api.calls


async def test_mutations_are_refused_while_draining(api: Api) -> None:
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
        ("verb=upload", "result=ok"),
        ("verb=upload", "result=FIELD_INVALID"),
        ("verb=pin", "result=ok"),
        ("verb=delete", "result=ok"),
    ]
    assert f"adapter_id=poet digest={DIGEST} tenant=default principal= peer=ipv4:127.0.0.1:" in lines[0]

"""UploadAdapter over a real channel: what is taken, refused and cleaned up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2
from motet.v1 import adapters_pb2, adapters_pb2_grpc

from control_plane.api.admin.upload import check_header
from control_plane.errors import InvalidAdapter, InvalidRequest
from tests.control_plane.api.admin.calls import FILES, Messages, adapters, messages, operations, refused, upload
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST
from tests.control_plane.api.fakes import Api
from tests.fakes.tcp_proxy import TcpProxy


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
    assert first.registration.change == adapters_pb2.REGISTRATION_CHANGE_CREATED
    assert first.registration.version.digest == DIGEST and not first.registration.HasField("previous_version")
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
    "a long signature": (messages(files={**FILES, "model.sig": bytes(300_000)}), f"{HEADER}[2].size_bytes"),
    "a signature without an adapter": (messages(files={"model.sig": b"{}"}), HEADER),
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


def test_an_empty_file_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_header(set_file(1, "size_bytes", 0)[0].header, max_adapter_bytes=1 << 20)
    (violation,) = caught.value.violations
    assert violation.description == "is 0 for adapter_model.safetensors; send a file that is not empty"


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

"""Adapters of several tenants over a real channel: what each RPC says to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.rpc import status_pb2
from motet.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2

from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.principal import ANY_TENANT, Principal, Role, of_roles
from control_plane.api.rpc.callers import Callers
from control_plane.api.rpc.error_status import DETAILS_KEY
from control_plane.api.text.codec import TextCodec
from control_plane.registry.registry import Registry
from control_plane.scheduler.types import FinishReason
from tests.control_plane.api.admin.calls import messages
from tests.control_plane.api.fakes import Api, job_event
from tests.control_plane.registry.rig import CONFIG, open_registry, safetensors_bytes, tensors, write_adapter

PRIVATE = adapters_pb2.ADAPTER_VISIBILITY_PRIVATE
SHARED = adapters_pb2.ADAPTER_VISIBILITY_SHARED
PUBLIC = adapters_pb2.ADAPTER_VISIBILITY_PUBLIC
WRITER = of_roles({Role.ADAPTERS_WRITE, Role.INFER})


class Tokens:
    """Tokens that are names of principals."""

    def principal(self, presented: Presented) -> Principal | None:
        name = presented.token
        if name == "admin":
            return Principal("key:admin", of_roles({Role.ADMIN}), ("ops", ANY_TENANT))
        tenant, _, adapters = name.partition(" ")
        return Principal(f"key:{name}", WRITER, (tenant.partition("/")[0],), tuple(adapters.split()) or None)


@dataclass
class Team:
    """One caller: its stubs send its token."""

    api: Api
    token: str

    async def __call__(self, stub: Any, method: str, request: Any, **call: Any) -> Any:
        return await getattr(stub(self.api.channel), method)(request, metadata=self._metadata, timeout=30, **call)

    async def adapters(self, method: str, **fields: Any) -> Any:
        request = getattr(adapters_pb2, f"{method}Request")(**fields)
        return await self(adapters_pb2_grpc.AdapterServiceStub, method, request)

    async def operations(self, method: str, **fields: Any) -> Any:
        request = getattr(operations_pb2, f"{method}Request")(**fields)
        return await self(operations_pb2_grpc.OperationsStub, method, request)

    async def upload(self, name: str, seed: int = 0, **header: Any) -> adapters_pb2.Adapter:
        parts = iter(messages(name, adapter_files(self.api.directory, seed), **header))
        response = await self(adapters_pb2_grpc.AdapterServiceStub, "UploadAdapter", parts)
        adapter: adapters_pb2.Adapter = response.adapter
        return adapter

    async def generate(self, **fields: Any) -> list[generation_pb2.GenerateResponse]:
        self.api.fleet.on_submit = lambda job, _request: job.script(job_event([5], FinishReason.LENGTH))
        request = generation_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[5, 6, 7]), **fields)
        stub = generation_pb2_grpc.GenerationServiceStub(self.api.channel)
        return [response async for response in stub.Generate(request, metadata=self._metadata, timeout=30)]

    async def listed(self, **fields: Any) -> tuple[list[str], str]:
        page = await self.adapters("ListAdapters", **fields)
        return [adapter.name.removeprefix("adapters/") for adapter in page.adapters], page.next_page_token

    @property
    def _metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.token}")]


def adapter_files(directory: Path, seed: int) -> dict[str, bytes]:
    paths = write_adapter(directory / f"adapter-{seed}", CONFIG, safetensors_bytes(tensors(seed)))
    return {name: path.read_bytes() for name, path in paths.items()}


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    opened = await open_registry(str(tmp_path / "store"))
    yield opened
    await opened.close()


@pytest.fixture
async def api(tmp_path: Path, registry: Registry) -> AsyncIterator[Api]:
    codec = TextCodec(None, None, reason="not needed")
    identify = Callers(Authenticator([Tokens()]))
    async with Api(tmp_path, codec, registry=registry).running(identify) as running:
        yield running


async def refusal(awaitable: Any) -> status_pb2.Status:
    """The whole status, with its details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    trailers: Any = caught.value.trailing_metadata()
    status: status_pb2.Status = status_pb2.Status.FromString(trailers[DETAILS_KEY])
    assert status.message == caught.value.details()
    return status


def renamed(status: status_pb2.Status, name: str, other: str) -> bytes:
    """The status as it would be for another name of the same length."""
    return status.SerializeToString().replace(name.encode(), other.encode())


NAMED: dict[str, dict[str, Any]] = {
    "GetAdapter": {},
    "ListAdapterVersions": {},
    "ActivateAdapterVersion": {"digest": "0" * 64},
    "PinAdapter": {},
    "UnpinAdapter": {},
    "DeleteAdapter": {"etag": "x"},
    "DeleteAdapterVersion": {"digest": "0" * 64},
}


def named(method: str, name: str) -> dict[str, Any]:
    if method == "UpdateAdapter":
        return {"adapter": {"name": f"adapters/{name}"}, "update_mask": {"paths": ["labels"]}}
    return {"name": f"adapters/{name}"} | NAMED[method]


@pytest.mark.parametrize("method", [*NAMED, "UpdateAdapter"])
async def test_hidden_and_unknown_names_give_the_same_status(api: Api, method: str) -> None:
    """To the byte, but for the name itself."""
    acme, labs = Team(api, "acme"), Team(api, "labs")
    await acme.upload("poet-1")
    await labs.upload("poet-3", 1)
    hidden = await refusal(labs.adapters(method, **named(method, "poet-1")))
    unknown = await refusal(labs.adapters(method, **named(method, "poet-2")))
    assert hidden.code == grpc.StatusCode.NOT_FOUND.value[0] and "did you mean 'poet-3'" in hidden.message
    assert renamed(hidden, "poet-1", "poet-2") == unknown.SerializeToString()


async def test_generating_with_a_hidden_adapter_is_like_with_none(api: Api, registry: Registry) -> None:
    acme, labs = Team(api, "acme"), Team(api, "labs")
    digest = (await acme.upload("poet-1")).active_version.digest
    for fields in ({}, {"adapter_digest": digest}):
        hidden = await refusal(labs.generate(adapter="poet-1", **fields))
        unknown = await refusal(labs.generate(adapter="poet-2", **fields))
        assert hidden.code == grpc.StatusCode.NOT_FOUND.value[0]
        assert renamed(hidden, "poet-1", "poet-2") == unknown.SerializeToString()
    assert not api.fleet.requests
    await acme.adapters("UpdateAdapter", **sharing("poet-1", SHARED, "labs"))
    assert (await labs.generate(adapter="poet-1"))[0].started.adapter_digest == digest
    assert api.fleet.requests[0].tenant == "labs"
    assert (await refusal(Team(api, "ops").generate(adapter="poet-1"))).message == hidden.message
    # By the digest of weights under a name of its own, and not of another one's version.
    other = (await acme.upload("poet-1", 1)).active_version.digest
    await labs.upload("prose")
    assert (await labs.generate(adapter="prose", adapter_digest=digest))[0].started.adapter_digest == digest
    assert "has no version" in (await refusal(labs.generate(adapter="prose", adapter_digest=other))).message


def sharing(name: str, visibility: adapters_pb2.AdapterVisibility, *tenants: str) -> dict[str, Any]:
    adapter = {"name": f"adapters/{name}", "visibility": visibility, "shared_with": tenants}
    return {"adapter": adapter, "update_mask": {"paths": ["visibility", "shared_with"]}}


async def test_the_adapters_of_a_credential_restrict_generating_and_the_base_model(api: Api) -> None:
    acme = Team(api, "acme")
    for seed, name in enumerate(("poet", "prose")):
        await acme.upload(name, seed)
    narrow = Team(api, "acme po*")
    assert (await narrow.generate(adapter="poet"))[0].started.adapter == "adapters/poet"
    assert "'prose' does not exist" in (await refusal(narrow.generate(adapter="prose"))).message
    base = await refusal(narrow.generate())
    assert base.code == grpc.StatusCode.PERMISSION_DENIED.value[0] and "base model" in base.message
    assert (await Team(api, "acme po* @base").generate())[0].started.adapter == ""
    assert await narrow.listed() == (["poet"], "")


async def test_pages_are_full_and_their_tokens_are_names_that_the_caller_sees(api: Api) -> None:
    acme, labs = Team(api, "acme"), Team(api, "labs")
    for number in range(0, 90, 10):
        await (labs if number % 20 else acme).upload(f"a{number:02d}", visibility=PUBLIC if number == 40 else 0)
    assert await labs.listed() == (["a10", "a30", "a40", "a50", "a70"], "")
    assert await labs.listed(page_size=2) == (["a10", "a30"], "a30")
    assert await labs.listed(page_size=2, page_token="a30") == (["a40", "a50"], "a50")
    assert await labs.listed(page_size=2, page_token="a50") == (["a70"], "")
    assert await labs.listed(page_size=5) == (["a10", "a30", "a40", "a50", "a70"], "")
    # A token may be any name: a hidden one and an unknown one are the same.
    assert await labs.listed(page_token="a60") == await labs.listed(page_token="a61") == (["a70"], "")
    assert await Team(api, "other").listed(page_size=1) == (["a40"], "")
    narrow = Team(api, "labs a1* a7* a4*")
    assert await narrow.listed(page_size=2) == (["a10", "a40"], "a40")
    assert await narrow.listed(page_size=2, page_token="a40") == (["a70"], "")
    assert await narrow.listed(page_size=3) == (["a10", "a40", "a70"], ""), "no page follows, though names do"
    assert len((await Team(api, "admin").listed())[0]) == 9


async def test_taken_names_are_refused_before_the_files_come(api: Api, registry: Registry) -> None:
    acme, labs = Team(api, "acme"), Team(api, "labs")
    await acme.upload("hidden")
    await acme.upload("seen", 1, visibility=SHARED, shared_with=["labs"])
    for validate_only in (True, False):
        taken = await refusal(labs.upload("hidden", 2, validate_only=validate_only))
        assert (taken.code, taken.message) == (
            grpc.StatusCode.ALREADY_EXISTS.value[0],
            "adapter_id: the name 'hidden' is taken; use another name",
        )
        denied = await refusal(labs.upload("seen", 2, validate_only=validate_only))
        assert denied.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
    header = messages("hidden", adapter_files(api.directory, 2))[:1]  # and no chunk: the refusal does not wait for any
    stub = adapters_pb2_grpc.AdapterServiceStub(api.channel)
    call: Any = stub.UploadAdapter(metadata=[("authorization", "Bearer labs")], timeout=30)
    await call.write(header[0])
    assert (await refusal(call)).message == taken.message
    assert registry.stats().num_stored == 2


async def test_sharing_is_shown_to_those_who_may_change_it(api: Api) -> None:
    acme, labs, admin = Team(api, "acme"), Team(api, "labs"), Team(api, "admin")
    made = await acme.upload("poet", visibility=SHARED, shared_with=["labs", "other"])
    assert (made.owner, made.visibility, list(made.shared_with)) == ("acme", SHARED, ["labs", "other"])
    for team, tenants in ((acme, ["labs", "other"]), (admin, ["labs", "other"]), (labs, [])):
        got = (await team.adapters("GetAdapter", name="adapters/poet")).adapter
        (listed,) = (await team.adapters("ListAdapters")).adapters
        for adapter in (got, listed):
            assert (adapter.owner, adapter.visibility, list(adapter.shared_with)) == ("acme", SHARED, tenants)
    update = sharing("poet", PRIVATE)
    denied = await refusal(labs.adapters("UpdateAdapter", **update))
    assert denied.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
    private = (await acme.adapters("UpdateAdapter", **update)).adapter
    assert (private.visibility, list(private.shared_with)) == (PRIVATE, [])
    give = {"adapter": {"name": "adapters/poet", "owner": "labs"}, "update_mask": {"paths": ["owner"]}}
    denied = await refusal(acme.adapters("UpdateAdapter", **give))
    assert denied.message.startswith("adapter.owner: only an admin may name another tenant")
    assert (await admin.adapters("UpdateAdapter", **give)).adapter.owner == "labs"
    assert await acme.listed() == ([], "") and await labs.listed() == (["poet"], "")


async def test_placements_show_no_use_by_others(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are in the host cache and on a worker: by whose requests, a tenant does not learn."""
    acme, admin = Team(api, "acme"), Team(api, "admin")
    await acme.upload("poet")
    monkeypatch.setattr(api.weights, "is_cached", lambda _digest: True)
    tiers = {}
    for team in (acme, admin):
        adapter = (await team.adapters("GetAdapter", name="adapters/poet")).adapter
        tiers[team.token] = [place.tier for place in adapter.placements]
    assert tiers["acme"] == [adapters_pb2.ADAPTER_TIER_STORE]
    assert tiers["admin"][:2] == [adapters_pb2.ADAPTER_TIER_STORE, adapters_pb2.ADAPTER_TIER_HOST_CACHE]
    pinned = (await acme.adapters("PinAdapter", name="adapters/poet")).adapter
    assert [place.tier for place in pinned.placements] == tiers["admin"][:2]


async def test_operations_exist_for_the_adapters_owner_alone(api: Api) -> None:
    acme, labs, admin = Team(api, "acme"), Team(api, "labs"), Team(api, "admin")
    for seed, name in enumerate(("one", "two", "three")):
        await acme.upload(name, seed)
    await labs.upload("prose", 3)
    api.fleet.unload_gate = asyncio.Event()
    begun = [await acme.adapters("DeleteAdapter", name=f"adapters/{name}") for name in ("one", "two", "three")]
    own = await labs.adapters("DeleteAdapter", name="adapters/prose")
    unknown = "operations/" + "0" * 32
    for method in ("GetOperation", "WaitOperation", "CancelOperation", "DeleteOperation"):
        hidden = await refusal(labs.operations(method, name=begun[0].name))
        missing = await refusal(labs.operations(method, name=unknown))
        assert hidden.code == grpc.StatusCode.NOT_FOUND.value[0]
        assert renamed(hidden, begun[0].name, unknown) == missing.SerializeToString()
    assert [one.name for one in (await labs.operations("ListOperations")).operations] == [own.name]
    page = await acme.operations("ListOperations", page_size=2)
    assert [one.name for one in page.operations] == [begun[2].name, begun[1].name]
    token = page.next_page_token
    rest = await acme.operations("ListOperations", page_size=2, page_token=token)
    assert ([one.name for one in rest.operations], rest.next_page_token) == ([begun[0].name], "")
    foreign = await refusal(labs.operations("ListOperations", page_token=token))
    assert (
        foreign.SerializeToString()
        == (await refusal(labs.operations("ListOperations", page_token="0" * 32))).SerializeToString()
    )
    assert len((await admin.operations("ListOperations")).operations) == 4
    # A deletion that runs is joined by those who may delete.
    assert (await acme.adapters("DeleteAdapter", name="adapters/one")).name == begun[0].name
    denied = await refusal(labs.adapters("DeleteAdapter", name="adapters/one"))
    assert denied.message.startswith("adapter 'one' does not exist")
    api.fleet.unload_gate.set()
    assert (await acme.operations("WaitOperation", name=begun[0].name)).done


async def test_request_ids_of_others_are_other_request_ids(api: Api) -> None:
    """Of another tenant, and of another credential of the same tenant."""
    first = await Team(api, "acme").upload("poet", request_id="r")
    again = await Team(api, "acme").upload("poet", request_id="r")
    assert again == first
    taken = await refusal(Team(api, "labs").upload("poet", request_id="r"))
    assert taken.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    other = await Team(api, "labs").upload("prose", 1, request_id="r")
    assert (other.name, other.owner) == ("adapters/prose", "labs")
    same = await Team(api, "acme/second-key").upload("poet", request_id="r")
    assert same.registration.change == adapters_pb2.REGISTRATION_CHANGE_NONE, "registered, not remembered"


async def test_the_same_bytes_of_two_tenants_say_nothing_of_each_other(api: Api) -> None:
    acme, labs = Team(api, "acme"), Team(api, "labs")
    await acme.upload("poet")
    checked = await labs.upload("prose", validate_only=True)
    made = await labs.upload("prose")
    for adapter in (checked, made):
        assert adapter.registration.change == adapters_pb2.REGISTRATION_CHANGE_CREATED
        assert not adapter.registration.HasField("previous_version") and adapter.active_version.number == 1
    same = await labs.upload("prose", visibility=PUBLIC)
    assert same.registration.change == adapters_pb2.REGISTRATION_CHANGE_NONE and same.visibility == PUBLIC
    operation = await labs.adapters("DeleteAdapter", name="adapters/prose")
    assert (await labs.operations("WaitOperation", name=operation.name)).done
    assert (await acme.generate(adapter="poet"))[0].started.adapter == "adapters/poet"


async def test_admins_register_for_a_tenant_which_then_sees_the_operation(api: Api) -> None:
    for name, data in adapter_files(api.directory, 0).items():
        (api.root / "poet").mkdir(exist_ok=True)
        (api.root / "poet" / name).write_bytes(data)
    admin, acme = Team(api, "admin"), Team(api, "acme")
    fields: dict[str, Any] = {"adapter_id": "poet", "source": "team/poet"}
    stub = adapters_pb2_grpc.AdapterServiceStub
    begun = await admin(stub, "CreateAdapter", adapters_pb2.CreateAdapterRequest(owner="acme", **fields))
    done = await acme.operations("WaitOperation", name=begun.name)
    made = adapters_pb2.Adapter()
    assert done.response.Unpack(made) and (made.owner, made.visibility) == ("acme", PRIVATE)
    assert await acme.listed() == (["poet"], "")
    assert (await refusal(Team(api, "labs").operations("GetOperation", name=begun.name))).code == 5

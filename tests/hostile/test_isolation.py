"""Tenant A against tenant B on every RPC and every field.

What A sends with a value of B in it gives exactly what the same request gives with a value that is nobody's, and
nothing that A reads has anything of B. With ownership or one of its checks left out, these tests fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2
from motet.v1 import adapters_pb2, generation_pb2, push_pb2, status_pb2

from tests.control_plane.api.rpc.test_callers import CLIENT_METHODS
from tests.hostile.isolation import matrix
from tests.hostile.isolation.things import WORD, nowhere_text
from tests.hostile.isolation.world import (
    ADAPTERS,
    GENERATE,
    OPERATIONS,
    Seen,
    World,
    comparable,
    secrets_in,
    with_nobodys,
)

UPLOAD, STATUS = f"{ADAPTERS}UploadAdapter", "/motet.v1.StatusService/GetStatus"
PUSH = "/motet.v1.PushService/PushVersion"
# Of streams that have no end. A watch of adapters has at least a first event and the end of the snapshot.
NUM_RESPONSES = {"/grpc.health.v1.Health/Watch": 1, "/motet.v1.AdapterResidencyService/WatchAdapters": 2}
# The one thing that A may learn: that a name is taken. Names are one space for all tenants, and a name cannot be given
# twice; a tenant with a reserved prefix is safe from this (docs/security.md).
TAKEN = {"UploadAdapter 0: header.adapter_id = adapter_id", "UploadAdapter 0: header.adapter_id = shared_id"}
TAKEN |= {"UploadAdapter 0: everything"}
TAKEN |= {name.replace("UploadAdapter", "PushVersion") for name in TAKEN}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("isolation")) as running:
        yield running


def test_every_rpc_of_the_server_has_a_request_here() -> None:
    assert matrix.methods_without_requests() == set()


def test_every_text_field_is_found() -> None:
    """Also in messages within messages, in lists and in maps."""

    def of(message: Any) -> set[str]:
        return {matrix.path_text(path) for path in matrix.text_fields(message.DESCRIPTOR)}

    assert {
        "header.adapter_id",
        "header.labels.key",
        "header.labels.value",
        "header.files.sha256",
        "header.request_id",
        "chunk.data",
    } <= of(adapters_pb2.UploadAdapterRequest)
    assert {"adapter", "adapter_digest", "chat.messages.content", "stopping.stop", "preconditions.prompt_sha256"} <= of(
        generation_pb2.GenerateRequest
    )


def sent_both(world: World, attack: matrix.Attack) -> tuple[Seen, Seen]:
    num_responses = NUM_RESPONSES.get(attack.method)
    seen = world.call("acme", attack.method, attack.sent, attack.metadata, num_responses=num_responses)
    control = world.call("acme", attack.method, attack.control, attack.control_metadata, num_responses=num_responses)
    return seen, control


@pytest.mark.parametrize("method", CLIENT_METHODS)
def test_a_value_of_another_tenant_gives_what_an_unknown_value_gives(world: World, method: str) -> None:
    num_attacks, wrong = 0, []
    for attack in matrix.attacks(method, world.mine, world.other, world.nobodys, world.files):
        num_attacks += 1
        seen, control = sent_both(world, attack)
        if attack.name in TAKEN:
            assert seen.code is grpc.StatusCode.ALREADY_EXISTS, attack.name
            assert control.code is grpc.StatusCode.OK, control.message
        else:
            expected = comparable(control, method)
            if with_nobodys(comparable(seen, method), world.other, world.nobodys) != expected:
                wrong.append(f"{attack.name}:\n  {seen}\n  {control}")
        sent = b"".join(attack.sent) + repr(attack.metadata).encode()
        if found := secrets_in(seen, world.other, sent) + secrets_in(control, world.other, b""):
            wrong.append(f"{attack.name}: the response has {found}")
    descriptor = CLIENT_METHODS[method].input_type
    assert descriptor is not None
    assert num_attacks >= len(list(matrix.text_fields(descriptor))) * len(world.other.values())
    assert not wrong, "\n".join([f"{len(wrong)} of {num_attacks}", *wrong[:8]])


def test_the_matrix_sees_the_difference_where_a_tenant_uses_its_own_values(world: World) -> None:
    """Else equal responses would prove nothing."""
    differs = set()
    for method in CLIENT_METHODS:
        for mine, control in zip(
            matrix.whole_requests(method, world.other, world.files),
            matrix.whole_requests(method, world.nobodys, world.files),
            strict=True,
        ):
            if method.endswith(
                ("/DeleteAdapter", "/DeleteOperation", "/UpdateAdapter", "/RollbackAdapter", "/Watch", "/WatchAdapters")
            ):
                continue  # would end or change what the other tests look for; does not end
            seen, of_control = world.call(WORD, method, mine), world.call(WORD, method, control)
            if with_nobodys(comparable(seen, method), world.other, world.nobodys) != comparable(of_control, method):
                differs.add(method.rpartition("/")[2])
    assert differs >= {
        "Generate",
        "Embed",
        "Classify",
        "GetUpload",
        "GetAdapter",
        "ListAdapterVersions",
        "ActivateAdapterVersion",
        "PinAdapter",
        "UnpinAdapter",
        "DeleteAdapterVersion",
        "GetOperation",
        "ListOperations",
        "WaitOperation",
        "CancelOperation",
    }


def test_nobody_continues_an_upload_of_another_tenant(world: World) -> None:
    """With the id, the files and the offset of the other tenant's broken upload, a call begins at its own beginning."""
    upload_id = f"{WORD}-continued"
    get = adapters_pb2.GetUploadRequest(upload_id=upload_id)

    def stream(adapter_id: str) -> list[Any]:
        return matrix.upload(world.adapter_files(98), adapter_id, upload_id=upload_id, validate_only=True)

    def received(key: str) -> list[int]:
        response = world.taken(key, f"{ADAPTERS}GetUpload", get)
        return list(response.received_bytes)

    header, config, *weights = stream(world.other.adapter_id)
    assert world.call(WORD, UPLOAD, [header, config]).code is grpc.StatusCode.INVALID_ARGUMENT
    before = received(WORD)
    assert before == [len(config.chunk.data), 0]

    stolen = world.call("acme", UPLOAD, [stream("acme-thief")[0], *weights])
    assert stolen.code is grpc.StatusCode.INVALID_ARGUMENT and "file 0 is not complete" in stolen.message
    assert world.call("acme", f"{ADAPTERS}GetUpload", [get]).code is grpc.StatusCode.NOT_FOUND
    assert received(WORD) == before
    assert world.call(WORD, UPLOAD, [header, *weights]).code is grpc.StatusCode.OK, "its owner continues it"


READS = [
    (f"{ADAPTERS}ListAdapters", adapters_pb2.ListAdaptersRequest()),
    (f"{ADAPTERS}ListAdapters", adapters_pb2.ListAdaptersRequest(page_size=1)),
    (f"{ADAPTERS}GetAdapter", adapters_pb2.GetAdapterRequest(name="adapters/acme-one")),
    (f"{ADAPTERS}ListAdapterVersions", adapters_pb2.ListAdapterVersionsRequest(name="adapters/acme-one")),
    (f"{OPERATIONS}ListOperations", operations_pb2.ListOperationsRequest()),
    (STATUS, status_pb2.GetStatusRequest()),
    # Nearly a name of the other tenant: the server suggests names that look like it.
    (f"{ADAPTERS}GetAdapter", adapters_pb2.GetAdapterRequest(name=f"adapters/{WORD}-onn")),
    (GENERATE, matrix.generate(adapter=f"{WORD}-onn")),
]


@pytest.mark.parametrize(("method", "request_message"), READS, ids=lambda value: str(value)[-40:])
def test_nothing_that_a_tenant_reads_has_anything_of_another_one(
    world: World, method: str, request_message: adapters_pb2.ListAdaptersRequest
) -> None:
    seen = world.call("acme", method, [request_message])
    assert secrets_in(seen, world.other, b"") == []
    if seen.responses:
        assert b"acme" in seen.raw() or world.mine.digest.encode() in seen.raw()


def test_an_operator_reads_all_of_it(world: World) -> None:
    """Else the test above would find nothing whatever is read."""
    seen = b"".join(
        world.call("admin", method, [message]).raw() for method, message in READS if not method.endswith("Versions")
    )
    found = {text for text in world.other.secrets if text.encode() in seen}
    things = world.other
    assert {things.adapter_id, things.digest, things.uid, things.operation_id, things.tenant} <= found
    assert {things.display_name, things.label_key, things.label_value, things.shared_id, things.reserved_id} <= found


def test_a_tenants_status_counts_its_own_and_names_no_worker(world: World) -> None:
    status = status_pb2.GetStatusResponse.FromString(
        world.call("acme", STATUS, [status_pb2.GetStatusRequest()]).responses[0]
    )
    assert [tenant.tenant for tenant in status.tenants] == ["acme"] and status.own_tenant_only
    assert status.adapters == status_pb2.AdapterStatus(num_registered=3)
    assert not status.workers and not status.HasField("queues") and not status.num_other_tenants
    assert status.model.fingerprint and status.model.vocab_size and status.limits.max_chunk_bytes


def test_a_taken_name_is_refused_in_one_way_that_shows_nothing_else(world: World) -> None:
    """Whatever the adapter is: private, shared with others, whatever its versions."""
    refusals = set()
    for name in (world.other.adapter_id, world.other.shared_id):
        seen = world.call("acme", UPLOAD, matrix.upload(world.files, name))
        assert (seen.code, seen.responses) == (grpc.StatusCode.ALREADY_EXISTS, ())
        refusals.add(seen.message.replace(name, "NAME"))
        assert secrets_in(seen, world.other, name.encode()) == []
    assert len(refusals) == 1


def test_a_repeated_upload_of_another_tenant_is_not_the_first_one(world: World) -> None:
    """All of it is B's: name, bytes, description, request id. A gets no response that was made for B."""
    name, files = world.other.adapter_id, world.adapter_files(13)
    first = world.call(WORD, UPLOAD, matrix.upload(files, name, request_id="once"))
    seen, control = (
        world.call("acme", UPLOAD, matrix.upload(files, name, request_id=request_id))
        for request_id in ("once", "never")
    )
    assert seen.code is grpc.StatusCode.ALREADY_EXISTS and seen.raw() == control.raw()
    again = world.call(WORD, UPLOAD, matrix.upload(files, name, request_id="once"))
    assert first.code is grpc.StatusCode.OK and again == first


def test_a_reserved_prefix_hides_whether_a_name_is_taken(world: World) -> None:
    name = world.other.reserved_id
    control = nowhere_text(name).replace("yebra", WORD).replace("reserved", "deserver")
    seen, of_control = (
        world.call("acme", UPLOAD, matrix.upload(world.files, adapter_id)) for adapter_id in (name, control)
    )
    assert seen.code is of_control.code is grpc.StatusCode.PERMISSION_DENIED
    assert seen.raw().replace(name.encode(), control.encode()) == of_control.raw()


def cached_tokens(world: World, key: str, salt: str) -> int:
    prompt = [len(WORD), *matrix.PROMPT]
    seen = world.call(key, GENERATE, [matrix.generate(cache_salt=salt, token_ids={"ids": prompt})])
    return generation_pb2.GenerateResponse.FromString(seen.responses[0]).started.cached_tokens


@pytest.mark.parametrize("is_salted", [False, True])
def test_the_prefix_cache_does_not_tell_what_another_tenant_sent(world: World, is_salted: bool) -> None:
    salt = world.other.cache_salt if is_salted else ""
    cached_tokens(world, WORD, salt)
    assert cached_tokens(world, WORD, salt) > 0
    assert cached_tokens(world, "admin", salt) == 0, "a tenant that sends it for the first time"


def test_bytes_that_another_tenant_registered_are_new_bytes(world: World) -> None:
    """Nor do placements tell that the other tenant uses them."""
    theirs, fresh = world.adapter_files(13), world.adapter_files(50)
    seen = []
    for files, name in ((theirs, "acme-copied"), (fresh, "acme-copiee")):
        adapter = world.taken("acme", UPLOAD, *matrix.upload(files, name)).adapter
        got = world.taken("acme", f"{ADAPTERS}GetAdapter", adapters_pb2.GetAdapterRequest(name=f"adapters/{name}"))
        seen.append((adapter.registration.change, [place.tier for place in got.adapter.placements]))
        world.taken("acme", f"{ADAPTERS}DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name=f"adapters/{name}"))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("key", "shown"), [("acme", 0), ("admin", 1)])
def test_a_push_does_not_tell_how_many_workers_have_the_version_before(world: World, key: str, shown: int) -> None:
    """A push goes to the workers that have the former weights, which B's requests brought there. An admin sees it."""
    assert world.call(WORD, GENERATE, [matrix.generate(adapter=world.other.adapter_id)]).code is grpc.StatusCode.OK
    name = f"{key}-copied"
    world.taken(key, UPLOAD, *matrix.upload(world.adapter_files(13), name))
    pushed: push_pb2.PushVersionResponse = world.taken(key, PUSH, *matrix.push(world.adapter_files(60), name))
    assert pushed.num_workers == shown
    world.taken(key, f"{ADAPTERS}DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name=f"adapters/{name}"))

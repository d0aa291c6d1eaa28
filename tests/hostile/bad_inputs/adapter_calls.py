"""The unary RPCs of AdapterService: names, digests, etags, pages, labels, masks, sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import duration_pb2, field_mask_pb2, timestamp_pb2
from google.protobuf.message import Message
from motet.v1 import adapters_pb2 as pb

from tests.hostile.bad_inputs import names
from tests.hostile.bad_inputs.case import INVALID, OK, Case, set_path, short
from tests.hostile.bad_inputs.facts import ROOT_NAME, Facts

SERVICE = "/motet.v1.AdapterService/"
NOT_FOUND = grpc.StatusCode.NOT_FOUND
DENIED = grpc.StatusCode.PERMISSION_DENIED
GOOD = "adapters/good"  # is registered

# RPCs that take a resource name, with a request that is otherwise good; the name's field.
NAMED: dict[str, tuple[Message, str]] = {
    "GetAdapter": (pb.GetAdapterRequest(), "name"),
    "ListAdapterVersions": (pb.ListAdapterVersionsRequest(), "name"),
    "ActivateAdapterVersion": (pb.ActivateAdapterVersionRequest(digest=names.UNKNOWN_DIGEST), "name"),
    "RollbackAdapter": (pb.RollbackAdapterRequest(), "name"),
    "PinAdapter": (pb.PinAdapterRequest(), "name"),
    "UnpinAdapter": (pb.UnpinAdapterRequest(), "name"),
    "DeleteAdapter": (pb.DeleteAdapterRequest(), "name"),
    "DeleteAdapterVersion": (pb.DeleteAdapterVersionRequest(digest=names.UNKNOWN_DIGEST), "name"),
    "UpdateAdapter": (
        pb.UpdateAdapterRequest(update_mask=field_mask_pb2.FieldMask(paths=["labels"])),
        "adapter.name",
    ),
}


def cases(facts: Facts) -> Iterator[Case]:
    """All of them."""
    yield from _names()
    yield from _pages()
    yield from _changes(facts.good_digest)
    yield from _rollouts(facts.good_digest)
    yield from _sources()
    yield from _uploads()


def call(
    rpc: str, message: Message, changes: dict[str, Any], name: str = "", *, code: grpc.StatusCode = INVALID, **due: Any
) -> Case:
    """A request with some fields replaced; without `fields` in `due`, the one that was replaced last is at fault."""
    changed = type(message)()
    changed.CopyFrom(message)
    for path, value in changes.items():
        set_path(changed, path, value)
    if code is INVALID:
        due.setdefault("fields", (list(changes)[-1],))
    what = name or ", ".join(f"{path} = {short(value)}" for path, value in changes.items())
    return Case(name=f"{rpc}: {what}", method=SERVICE + rpc, messages=(changed.SerializeToString(),), code=code, **due)


def _names() -> Iterator[Case]:
    for rpc, (message, field) in NAMED.items():
        for name in names.BAD_RESOURCES:
            yield call(rpc, message, {field: name})
        for adapter_id in names.BAD_IDS:
            yield call(rpc, message, {field: f"adapters/{adapter_id}"})
        for adapter_id in names.GOOD_IDS[:4]:
            yield call(rpc, message, {field: f"adapters/{adapter_id}"}, code=NOT_FOUND, reason="ADAPTER_NOT_FOUND")
    create = pb.CreateAdapterRequest(source=f"{ROOT_NAME}/good", validate_only=True)
    for adapter_id in [*names.BAD_IDS, "adapters/a"]:
        yield call("CreateAdapter", create, {"adapter_id": adapter_id})
    for digest in ["", *names.BAD_DIGESTS]:
        yield call("ActivateAdapterVersion", pb.ActivateAdapterVersionRequest(name=GOOD), {"digest": digest})
        yield call("DeleteAdapterVersion", pb.DeleteAdapterVersionRequest(name=GOOD), {"digest": digest})
    unknown = pb.ActivateAdapterVersionRequest(name=GOOD, digest=names.UNKNOWN_DIGEST)
    yield call("ActivateAdapterVersion", unknown, {}, "an unknown version", code=NOT_FOUND)
    unknown_too = pb.DeleteAdapterVersionRequest(name=GOOD, digest=names.UNKNOWN_DIGEST)
    yield call("DeleteAdapterVersion", unknown_too, {}, "an unknown version", code=NOT_FOUND)


def _pages() -> Iterator[Case]:
    for rpc, message in {
        "ListAdapters": pb.ListAdaptersRequest(),
        "ListAdapterVersions": pb.ListAdapterVersionsRequest(name=GOOD),
    }.items():
        for size in names.BAD_PAGE_SIZES:
            yield call(rpc, message, {"page_size": size}, says="1000")
        for size in names.GOOD_PAGE_SIZES:
            yield call(rpc, message, {"page_size": size}, code=OK)
        for token in names.BAD_PAGE_TOKENS:
            yield call(rpc, message, {"page_token": token})
    yield call("ListAdapters", pb.ListAdaptersRequest(), {"page_token": "zzz"}, "a token behind the last", code=OK)
    versions = pb.ListAdapterVersionsRequest(name=GOOD)
    yield call("ListAdapterVersions", versions, {"page_token": names.UNKNOWN_DIGEST})


def _changes(good_digest: str) -> Iterator[Case]:
    update = pb.UpdateAdapterRequest(adapter=pb.Adapter(name=GOOD))
    for paths in ([], ["name"], ["labels", "name"], ["labels.a"], ["*"], [""], ["Labels"], ["etag"], ["x" * 100_000]):
        yield call("UpdateAdapter", update, {"update_mask.paths": paths}, fields=("update_mask",))
    for paths in (["labels"], ["display_name"], ["labels", "display_name"], ["labels", "labels"]):
        yield call("UpdateAdapter", update, {"update_mask.paths": paths}, code=OK)
    mask = pb.UpdateAdapterRequest(
        adapter=pb.Adapter(name=GOOD), update_mask=field_mask_pb2.FieldMask(paths=["labels", "display_name"])
    )
    for field, value, at in (
        ("visibility", 0, "adapter.visibility"),
        ("visibility", 2, "shared_with"),
        ("shared_with", ["labs"], "shared_with"),
    ):
        one = pb.UpdateAdapterRequest(adapter=pb.Adapter(name=GOOD), update_mask={"paths": [field]})
        yield call("UpdateAdapter", one, {f"adapter.{field}": value}, fields=(at,))
    create = pb.CreateAdapterRequest(adapter_id="valid", source=f"{ROOT_NAME}/good", validate_only=True)
    for field, value in (("visibility", 2), ("shared_with", ["labs"])):
        yield call("CreateAdapter", create, {field: value}, fields=("shared_with",))
    for rpc, message, prefix in (("UpdateAdapter", mask, "adapter."), ("CreateAdapter", create, "")):
        yield from described(rpc, message, prefix)
        yield from _owned(rpc, message, prefix)
    for etag in ("x", "\0", "e" * 100_000, "é"):
        due: dict[str, Any] = {"code": grpc.StatusCode.ABORTED, "reason": "ETAG_MISMATCH"}
        yield call("UpdateAdapter", mask, {"adapter.etag": etag}, **due)
        activate = pb.ActivateAdapterVersionRequest(name=GOOD, digest=good_digest)
        yield call("ActivateAdapterVersion", activate, {"etag": etag}, **due)
        yield call("DeleteAdapter", pb.DeleteAdapterRequest(name=GOOD), {"etag": etag}, **due)
        delete = pb.DeleteAdapterVersionRequest(name=GOOD, digest=good_digest)
        yield call("DeleteAdapterVersion", delete, {"etag": etag}, **due)
    active: dict[str, Any] = {"code": grpc.StatusCode.FAILED_PRECONDITION, "reason": "VERSION_ACTIVE"}
    delete = pb.DeleteAdapterVersionRequest(name=GOOD, digest=good_digest)
    yield call("DeleteAdapterVersion", delete, {}, "the active version", **active)
    for request_id in names.BAD_REQUEST_IDS:
        yield call("CreateAdapter", create, {"request_id": request_id})
    for request_id in names.GOOD_REQUEST_IDS:
        yield call("CreateAdapter", create, {"request_id": request_id}, code=OK)
    deletions = {
        "DeleteAdapter": pb.DeleteAdapterRequest(name=GOOD, etag="x"),
        "DeleteAdapterVersion": pb.DeleteAdapterVersionRequest(name=GOOD, digest=good_digest, etag="x"),
    }
    for rpc, deletion in deletions.items():
        for request_id in names.BAD_REQUEST_IDS:
            yield call(rpc, deletion, {"request_id": request_id})
        for request_id in names.GOOD_REQUEST_IDS:
            yield call(rpc, deletion, {"request_id": request_id}, **due)
    again = {"request_id": names.GOOD_REQUEST_IDS[0], "display_name": "another"}
    yield call("CreateAdapter", create, again, "a request_id of another request", fields=("request_id",))


def _rollouts(good_digest: str) -> Iterator[Case]:
    """Labels of versions, canaries, retention and times to live."""
    many = [f"l{number}" for number in range(65)]
    create = pb.CreateAdapterRequest(adapter_id="valid", source=f"{ROOT_NAME}/good", validate_only=True)
    durations = [{"seconds": 0}, {"seconds": -1}, {"seconds": 2**62}, {"seconds": 1, "nanos": 2**31 - 1}]
    for path, values in (
        ("canary_per_mille", [1001, 2**32 - 1]),
        ("version_labels", [["1"], ["UP"], [""], ["x" * 64], ["a", "a"], many, ["x"] * 100_000]),
        ("keep_versions", [501, 2**32 - 1]),
        ("ttl", [duration_pb2.Duration(**fields) for fields in durations]),
    ):
        for number, value in enumerate(values):
            yield call("CreateAdapter", create, {f"rollout.{path}": value}, f"rollout.{path} {number}")
    everything = ["version_labels", "canary", "keep_versions", "expire_time"]
    update = pb.UpdateAdapterRequest(adapter=pb.Adapter(name=GOOD), update_mask={"paths": everything})
    for number, labels in enumerate(
        ({"1": good_digest}, {"": good_digest}, {"a": "x"}, dict.fromkeys(many, good_digest))
    ):
        yield call("UpdateAdapter", update, {"adapter.version_labels": labels}, f"labels of versions {number}")
    for labels in ({"a": names.UNKNOWN_DIGEST},):
        yield call("UpdateAdapter", update, {"adapter.version_labels": labels}, code=NOT_FOUND)
    for number, digest in enumerate(names.BAD_DIGESTS):
        canary = pb.AdapterCanary(digest=digest, per_mille=1)
        at: dict[str, Any] = {"fields": ("adapter.canary.digest",)}
        yield call("UpdateAdapter", update, {"adapter.canary": canary}, f"bad digest {number} of a canary", **at)
    for canary, field in (
        (pb.AdapterCanary(per_mille=1), "digest"),
        (pb.AdapterCanary(digest=good_digest), "per_mille"),
        (pb.AdapterCanary(digest=good_digest, per_mille=1001), "per_mille"),
        (pb.AdapterCanary(digest=good_digest, per_mille=1), "digest"),  # the active version
    ):
        what = f"a canary of {canary.digest[:4]!r} with {canary.per_mille}"
        yield call("UpdateAdapter", update, {"adapter.canary": canary}, what, fields=(f"adapter.canary.{field}",))
    unknown = pb.AdapterCanary(digest=names.UNKNOWN_DIGEST, per_mille=1)
    yield call("UpdateAdapter", update, {"adapter.canary": unknown}, code=NOT_FOUND)
    for count in (501, 2**32 - 1):
        yield call("UpdateAdapter", update, {"adapter.keep_versions": count})
    for seconds, nanos in ((0, 0), (1, 0), (-1, 0), (2**62, 0), (253_402_300_799, 0), (0, -1), (0, 2**31 - 1)):
        moment = timestamp_pb2.Timestamp(seconds=seconds, nanos=nanos)
        yield call("UpdateAdapter", update, {"adapter.expire_time": moment}, f"to expire at {seconds} s {nanos} ns")
    for fields in durations:
        yield call("UpdateAdapter", update, {"ttl": duration_pb2.Duration(**fields)}, f"to live for {fields}")
    other = pb.UpdateAdapterRequest(adapter=pb.Adapter(name=GOOD), update_mask={"paths": ["labels"]})
    yield call("UpdateAdapter", other, {"ttl": duration_pb2.Duration(seconds=1)})
    yield call("UpdateAdapter", update, {}, "the end of every part of a rollout", code=OK)
    for number, digest in enumerate(names.BAD_DIGESTS):
        activate, what = (
            pb.ActivateAdapterVersionRequest(name=GOOD, digest=good_digest),
            f"bad expected digest {number}",
        )
        yield call("ActivateAdapterVersion", activate, {"expected_digest": digest}, what)
        yield call("RollbackAdapter", pb.RollbackAdapterRequest(name=GOOD), {"expected_digest": digest}, what)
    other_digest: dict[str, Any] = {"code": grpc.StatusCode.ABORTED, "reason": "ETAG_MISMATCH"}
    for rpc, message in (
        ("ActivateAdapterVersion", pb.ActivateAdapterVersionRequest(name=GOOD, digest=good_digest)),
        ("RollbackAdapter", pb.RollbackAdapterRequest(name=GOOD)),
    ):
        yield call(rpc, message, {"expected_digest": names.UNKNOWN_DIGEST}, **other_digest)
    yield call("RollbackAdapter", pb.RollbackAdapterRequest(name=GOOD), {"etag": "x"}, **other_digest)
    nothing: dict[str, Any] = {"code": grpc.StatusCode.FAILED_PRECONDITION, "reason": "NO_FORMER_VERSION"}
    yield call("RollbackAdapter", pb.RollbackAdapterRequest(name=GOOD), {}, "nothing to go back to", **nothing)


def described(rpc: str, message: Message, prefix: str) -> Iterator[Case]:
    """Labels and display names."""
    labels, display_name = f"{prefix}labels", f"{prefix}display_name"
    at_limit = names.MAX_TEXT_BYTES
    for key in names.BAD_LABEL_KEYS:
        yield call(rpc, message, {labels: {key: "x"}})
    for value in ("v" * (at_limit + 1), "é" * (at_limit // 2) + "x", "v" * 100_000):
        yield call(rpc, message, {labels: {"key": value}}, fields=(f"{labels}['key']",), says=str(at_limit))
    for text in ("d" * (at_limit + 1), "\U0001f642" * (at_limit // 4) + "x", "d" * 100_000):
        yield call(rpc, message, {display_name: text}, says=str(at_limit))
    many = {f"k{index}": "" for index in range(names.MAX_LABELS + 1)}
    yield call(rpc, message, {labels: many}, says=str(names.MAX_LABELS))
    most = dict(list(many.items())[: names.MAX_LABELS])
    for good in ({labels: {key: "v" * at_limit}} for key in names.GOOD_LABEL_KEYS):
        yield call(rpc, message, good, code=OK)
    yield call(rpc, message, {labels: most}, code=OK)
    for text in ("d" * at_limit, "\U0001f642" * (at_limit // 4), "\0\n\x1b[31m", ""):
        yield call(rpc, message, {display_name: text}, code=OK)


def _owned(rpc: str, message: Message, prefix: str) -> Iterator[Case]:
    """Owners, visibilities and lists of tenants."""
    for owner in names.BAD_OWNERS:
        yield call(rpc, message, {f"{prefix}owner": owner})
    for tenants, index in names.BAD_TENANT_LISTS:
        yield call(rpc, message, {f"{prefix}shared_with": tenants}, fields=(f"{prefix}shared_with{index}",))
    for visibility in (4, -1, 2**31 - 1):
        yield call(rpc, message, {f"{prefix}visibility": visibility})


def _sources() -> Iterator[Case]:
    create = pb.CreateAdapterRequest(adapter_id="valid", validate_only=True)
    for source in (
        *("", "/", "good", "nobody/good", "/etc", "/etc/passwd", "..", "../good", "file:///etc", "s3://bucket/x", "\0"),
        *(f"{ROOT_NAME}", f"{ROOT_NAME}/", f"{ROOT_NAME}//good", f"{ROOT_NAME}/../good", f"{ROOT_NAME}/good/.."),
        *(f"{ROOT_NAME}/./good", f"{ROOT_NAME}/good/", f"{ROOT_NAME}/a\0b", f"{ROOT_NAME}\\good", f"{ROOT_NAME}/a\\b"),
        *(f"{ROOT_NAME}/out", f"{ROOT_NAME}/" + "a/" * 600 + "a", f" {ROOT_NAME}/good", f"{ROOT_NAME.upper()}/good"),
    ):
        yield call("CreateAdapter", create, {"source": source}, code=DENIED, reason="PATH_NOT_ALLOWED")
    for source in (
        "missing",
        "empty",
        "half",
        "folder",
        "loop",
        "good/adapter_config.json",
        "x" * 300,
        "é",
        "a\nb",
        "*",
    ):
        yield call("CreateAdapter", create, {"source": f"{ROOT_NAME}/{source}"})
    yield call("CreateAdapter", create, {"source": f"{ROOT_NAME}/good"}, code=OK)


def _uploads() -> Iterator[Case]:
    for upload_id in ["", *names.BAD_REQUEST_IDS]:
        yield call("GetUpload", pb.GetUploadRequest(), {"upload_id": upload_id})
    for upload_id in names.GOOD_REQUEST_IDS:  # that nobody used
        yield call(
            "GetUpload", pb.GetUploadRequest(), {"upload_id": upload_id}, code=NOT_FOUND, reason="UPLOAD_NOT_FOUND"
        )

"""AdapterResidencyService: names, digests, tiers, workers, times to wait."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from motet.v1 import adapters_pb2, residency_pb2 as pb

from tests.hostile.bad_inputs import names
from tests.hostile.bad_inputs.case import INVALID, OK, Case, set_path, short
from tests.hostile.bad_inputs.facts import Facts

SERVICE = "/motet.v1.AdapterResidencyService/"
GOOD = "adapters/good"  # is registered
ARENA, CACHE = adapters_pb2.ADAPTER_TIER_ARENA, adapters_pb2.ADAPTER_TIER_HOST_CACHE


def cases(facts: Facts) -> Iterator[Case]:
    """All of them."""
    yield from _watches()
    for rpc, kind in (("LoadAdapter", pb.LoadAdapterRequest), ("UnloadAdapter", pb.UnloadAdapterRequest)):
        good = kind(name=GOOD, tier=ARENA)
        for number, name in enumerate([*names.BAD_RESOURCES, *(f"adapters/{bad}" for bad in names.BAD_IDS)]):
            yield _case(rpc, good, "name", name, name=f"bad name {number}")
        for selector in ("", "0", "01", "-1", "UP", "a.b", "1@2", "1234567890", "x" * 64):
            yield _case(rpc, good, "name", f"{GOOD}@{selector}")
        for name in ("adapters/nobody", f"{GOOD}@99", f"{GOOD}@nothing"):
            yield _case(rpc, good, "name", name, code=grpc.StatusCode.NOT_FOUND)
        for number, digest in enumerate(names.BAD_DIGESTS):
            yield _case(rpc, good, "digest", digest, name=f"bad digest {number}")
        yield _case(rpc, good, "digest", names.UNKNOWN_DIGEST, code=grpc.StatusCode.NOT_FOUND)
        twice = kind(name=f"{GOOD}@1", tier=ARENA, digest=facts.good_digest)
        yield _case(rpc, twice, "name", f"{GOOD}@1")
        for tier in (0, 1, 4, -1, 2**31 - 1):
            yield _case(rpc, good, "tier", tier)
        for worker_id in ("", "UP", "a b", "x" * 64, "a/b", "\n"):
            yield _case(rpc, good, "worker_ids", [worker_id], field="worker_ids[0]")
        yield _case(rpc, good, "worker_ids", ["a", "a"])
        yield _case(rpc, good, "worker_ids", [f"w{number}" for number in range(257)])
        yield _case(rpc, kind(name=GOOD, tier=CACHE), "worker_ids", ["a"])
        for seconds, nanos in ((-1, 0), (301, 0), (2**62, 0), (1, -1), (0, 2**31 - 1), (300, 1)):
            wait = duration_pb2.Duration(seconds=seconds, nanos=nanos)
            yield _case(rpc, good, "wait", wait, name=f"wait of {seconds} s and {nanos} ns")
        yield _case(rpc, good, "worker_ids", ["nobody"], code=OK)


def _watches() -> Iterator[Case]:
    watch = pb.WatchAdaptersRequest()
    bad_names = [*names.BAD_RESOURCES[1:], *(f"adapters/{bad}" for bad in names.BAD_IDS), f"{GOOD}@1"]
    for number, name in enumerate(bad_names):
        yield _case("WatchAdapters", watch, "name", name, name=f"bad name {number}")
    for token in ("x", "0" * 47, "0" * 49, "A" * 48, "0" * 100_000, "\n" * 48):
        yield _case("WatchAdapters", watch, "resume_token", token)


def _case(
    rpc: str,
    message: Message,
    path: str,
    value: object,
    *,
    code: grpc.StatusCode = INVALID,
    field: str = "",
    name: str = "",
) -> Case:
    changed = type(message)()
    changed.CopyFrom(message)
    set_path(changed, path, value)
    return Case(
        name=f"{rpc}: {name}" if name else f"{rpc}: {path} = {short(value)}",
        method=SERVICE + rpc,
        messages=(changed.SerializeToString(),),
        code=code,
        fields=(field or path,) if code is INVALID else (),
    )

"""FleetService: ids of workers, and drains that may not be made."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from motet.v1 import fleet_pb2 as pb

from tests.hostile.bad_inputs.case import INVALID, OK, Case, short
from tests.hostile.bad_inputs.facts import Facts

SERVICE = "/motet.v1.FleetService/"
BAD_IDS = ("", "UP", "a b", "x" * 64, "a/b", "\n", "\0", "é", "x" * 100_000)
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def cases(_facts: Facts) -> Iterator[Case]:
    """All of them. The only worker of the system is w0."""
    for rpc, kind in (("DrainWorker", pb.DrainWorkerRequest), ("UndrainWorker", pb.UndrainWorkerRequest)):
        for number, worker_id in enumerate(BAD_IDS):
            yield _case(rpc, kind(worker_id=worker_id), f"bad id {number}", INVALID)
        yield _case(rpc, kind(worker_id="nobody"), "an unknown worker", NOT_FOUND, "WORKER_NOT_FOUND")
    last, refused = pb.DrainWorkerRequest(worker_id="w0"), grpc.StatusCode.FAILED_PRECONDITION
    yield _case("DrainWorker", last, "the last worker", refused, "LAST_WORKER")
    nobody = pb.DrainWorkerRequest(worker_id="nobody", force=True)
    yield _case("DrainWorker", nobody, "an unknown worker with force", NOT_FOUND, "WORKER_NOT_FOUND")
    yield _case("UndrainWorker", pb.UndrainWorkerRequest(worker_id="w0"), "a worker that is not drained", OK)


def _case(
    rpc: str,
    message: pb.DrainWorkerRequest | pb.UndrainWorkerRequest,
    what: str,
    code: grpc.StatusCode,
    reason: str = "",
) -> Case:
    return Case(
        name=f"{rpc}: {what} {short(message.worker_id)}",
        method=SERVICE + rpc,
        messages=(message.SerializeToString(),),
        code=code,
        reason=reason,
        fields=("worker_id",) if code is INVALID else (),
    )

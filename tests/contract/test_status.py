"""A gauge is written once: in status.proto, and where it is computed."""

from __future__ import annotations

import dataclasses

import motet.types
import pytest
from motet.v1 import status, status_pb2
from motet.wire import status_from

from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.types import WorkerLimits

MESSAGES = ("ModelStatus", "WorkerStatus", "QueueStatus", "AdapterStatus", "TenantStatus", "LimitStatus")


@pytest.mark.parametrize("name", MESSAGES)
def test_the_sdk_has_every_field_of_a_status_message(name: str) -> None:
    fields = dataclasses.fields(getattr(status, name))
    assert [field.name for field in fields] == [field.name for field in getattr(status_pb2, name).DESCRIPTOR.fields]


def test_every_count_of_a_scheduler_is_a_field_of_the_workers_status() -> None:
    limits = WorkerLimits(
        num_blocks=8, block_size=4, max_rows=2, max_step_tokens=8, num_slots=1, arena_bytes=0, max_model_len=16
    )
    reported = Scheduler(limits).stats().reported()
    assert reported.keys() < {field.name for field in dataclasses.fields(status.WorkerStatus)}
    assert reported["num_blocks"] == 8 and "is_stuck" not in reported


def test_what_a_server_does_not_set_is_zero_or_none() -> None:
    seen = status_from(status_pb2.GetStatusResponse(workers=[{"worker_id": "w0"}], tenants=[{"tenant": "a"}]))
    assert isinstance(seen, motet.types.ServerStatus)
    (worker,), (tenant,) = seen.workers, seen.tenants
    assert (worker.worker_id, worker.num_blocks, worker.step_time_ms) == ("w0", 0, 0.0)
    assert (tenant.tenant, tenant.tokens_per_minute) == ("a", None)

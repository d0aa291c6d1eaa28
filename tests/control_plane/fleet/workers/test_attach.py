"""Which workers may attach, and what a session takes from them."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
from dataclasses import replace

import grpc
import pytest

import contract
from contract import PROTOCOL
from contract.v1 import plan_pb2
from control_plane.errors import (
    AdapterNotServed,
    MotetError,
    StaleControlPlane,
    WorkerIdTaken,
    status_of,
)
from control_plane.fleet.gate.hello import BOUNDS
from control_plane.fleet.workers.endings import EndCause
from control_plane.scheduler.types import Vocabulary
from data_plane.plan import MemoryUse
from data_plane.wire import encode_hello
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    let_time_pass,
    make_fleet,
    make_request,
    read_all,
)


async def test_a_second_worker_of_one_id_waits_while_the_first_is_alive(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0")
    request = make_request(fleet, [3], 20)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await first.turn()
    for last_epoch in (0, first.session.epoch - 1):  # a new process, and one with a session before
        with pytest.raises(WorkerIdTaken, match=r"the id w0 is attached and alive.*with another --worker-id"):
            LoopbackWorker(fleet, "w0", last_epoch=last_epoch)
    assert not first.session.ended.is_set()
    await first.run(reader.done)
    assert await reader == expected(request)
    let_time_pass(clock, fleet, 2.1)  # nothing is heard of the first any more
    second = LoopbackWorker(fleet, "w0")
    assert fleet.num_workers == 1 and first.session.ended.is_set() and not second.session.ended.is_set()


async def test_a_process_that_attaches_anew_takes_the_place_of_its_own_session(clock: FakeClock) -> None:
    """Its old stream was cut on its side alone."""
    fleet = make_fleet(clock)
    before = LoopbackWorker(fleet, "w0")
    request = make_request(fleet, [3], 20)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await before.turn()
    again = LoopbackWorker(fleet, "w0", last_epoch=before.session.epoch)
    assert before.session.end_cause is EndCause.CLOSED
    await again.run(reader.done)
    assert await reader == expected(request)
    assert fleet.num_workers == 1


async def test_a_worker_that_served_a_later_epoch_is_refused_before_it_is_given_a_request(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    request = make_request(fleet, [3], 20)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    with pytest.raises(StaleControlPlane, match="to use this control plane, restart the worker") as caught:
        LoopbackWorker(fleet, "w0", last_epoch=(7 << 32) | 1)
    assert status_of(caught.value) is grpc.StatusCode.FAILED_PRECONDITION  # which the worker does not try again
    assert fleet.num_workers == 0 and fleet.queue_snapshot().num_waiting == 1
    await LoopbackWorker(fleet, "w0").run(reader.done)
    assert await reader == expected(request)


async def test_what_a_worker_says_stands_in_one_line_of_the_log_and_is_cut_off(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fleet = make_fleet(clock)
    text = "it broke\nERROR forged line \x1b[31m" + "x" * 10_000
    for kind in ("fault", "leave"):
        worker = LoopbackWorker(fleet, kind)
        message = plan_pb2.AttachRequest()
        getattr(message, kind).reason = text
        worker.session.receive(message)
    loader = LoopbackWorker(fleet, "loader")
    stream = fleet.submit(make_request(fleet, [1], 3, fleet.weights.add("a")))
    loader.session.pump()
    [load] = [m.load_adapter for m in loader.session.outbox.take() if m.WhichOneof("message") == "load_adapter"]
    failed = loader.slot_state(load.slot, load.generation, plan_pb2.SlotState.STATE_FAILED)
    failed.slot_state.reason, failed.slot_state.mismatch = text, True
    loader.session.receive(failed)
    with pytest.raises(AdapterNotServed) as caught:
        await read_all(stream)
    lines = [record.getMessage() for record in caplog.records]
    for entry in ("fault in step 0", "the worker left", "adapter load failed"):
        assert any(entry in line and "it broke\\nERROR forged line \\x1b[31mxxx" in line for line in lines), entry
    assert all("\n" not in line and len(line) < 600 for line in [*lines, str(caught.value)])


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("model_fingerprint", "0" * 64, "checkpoint"),
        ("dtype", "bfloat16", "dtype"),
        ("quantization", "fp8", "quantization 'fp8', this control plane serves 'none'; start both with the same --q"),
        ("vocab_size", 255, "logits"),
        ("num_blocks", 0, "num_blocks"),
        ("num_blocks", 2**24 + 1, "16777217 is not in 1..16777216"),
        ("max_rows", 2**16 + 1, "65537 is not in 1..65536"),
        ("max_step_tokens", 2**20 + 1, "1048577 is not in 1..1048576"),
        ("num_slots", 2**16 + 1, "65537 is not in 1..65536"),
        ("num_host_blocks", 2**21 + 1, "2097153 is not in 0..2097152"),
        ("device", "x" * 129, "129 characters; at most 128"),
        ("protocol_min", PROTOCOL + 1, "protocol"),
        ("worker_id", "../w", "worker_id"),
    ],
)
async def test_worker_that_does_not_match_is_refused(clock: FakeClock, field: str, value: object, match: str) -> None:
    fleet = make_fleet(clock)
    hello = encode_hello(CAPACITIES, "w0").hello
    setattr(hello, field, value)
    if field == "protocol_min":
        hello.protocol_max = PROTOCOL + 1
    with pytest.raises(MotetError, match=match):
        fleet.attach(hello)
    assert fleet.num_workers == 0


async def test_where_a_worker_s_memory_went_is_in_its_status(clock: FakeClock) -> None:
    use = MemoryUse(
        device_bytes=1,
        weights_bytes=2,
        step_bytes=3,
        kv_bytes=4,
        host_kv_bytes=5,
        graph_bytes=6,
        headroom_bytes=7,
        pinned_bytes=8,
    )
    fleet = make_fleet(clock)
    snapshot = fleet.attach(encode_hello(replace(CAPACITIES, memory=use), "w0").hello).snapshot()
    assert (snapshot.memory_bytes, snapshot.weights_bytes, snapshot.step_memory_bytes) == (1, 2, 3)
    assert (snapshot.kv_bytes, snapshot.host_kv_bytes) == (4, 5)
    assert (snapshot.graph_bytes, snapshot.headroom_bytes, snapshot.pinned_bytes) == (6, 7, 8)


async def test_memory_beyond_every_machine_is_refused_by_its_field(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    hello = encode_hello(replace(CAPACITIES, memory=MemoryUse(step_bytes=2**50 + 1)), "w0").hello
    with pytest.raises(
        MotetError, match=r"hello\.memory\.step_bytes: 1125899906842625 is not in 0\.\.1125899906842624"
    ):
        fleet.attach(hello)
    assert fleet.num_workers == 0


async def test_a_worker_of_the_release_before_gets_its_own_version(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "PROTOCOL", PROTOCOL + 1)
    fleet = make_fleet(clock)
    hello = encode_hello(CAPACITIES, "w0").hello
    assert hello.protocol_max == PROTOCOL
    session = fleet.attach(hello)
    [welcome] = [message.welcome for message in session.outbox.take() if message.WhichOneof("message") == "welcome"]
    assert welcome.protocol == PROTOCOL


async def test_a_session_takes_no_memory_for_what_its_worker_only_claims(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    hello = encode_hello(CAPACITIES, "w0").hello
    for name, (_, highest) in BOUNDS.items():
        setattr(hello, name, highest)
    hello.vocab_size = CAPACITIES.vocab_size
    tracemalloc.start()
    try:
        fleet.attach(hello)
        size = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size < 300_000


async def test_a_session_begins_with_the_vocabulary_of_constraints(clock: FakeClock) -> None:
    """The worker reads it before any plan, and the first constrained row does not send it again."""
    vocabulary = Vocabulary("v", "{}", 9, (0,))
    without, worker = LoopbackWorker(make_fleet(clock)), LoopbackWorker(make_fleet(clock, vocabulary))
    assert kinds_sent_to(worker) == ["welcome", "ping", "put_vocabulary"]
    assert kinds_sent_to(without) == ["welcome", "ping"]
    worker.session.send_vocabulary(vocabulary)
    assert kinds_sent_to(worker) == []


def kinds_sent_to(worker: LoopbackWorker) -> list[str | None]:
    """What waits in the outbox, which is empty then."""
    messages = [plan_pb2.AttachResponse.FromString(each.SerializeToString()) for each in worker.session.outbox.take()]
    return [message.WhichOneof("message") for message in messages]

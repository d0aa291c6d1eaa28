"""The plan client against a scripted control plane: what it refuses, reports and survives."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest

from contract import PROTOCOL
from contract.v1 import plan_pb2, plan_pb2_grpc
from data_plane.config import WorkerConfig
from data_plane.errors import AdapterMismatch, SelfCheckFailed
from data_plane.plan import AdapterSource
from data_plane.stream import plan_client, session
from data_plane.stream.plan_client import PlanClient, PlanClientSettings, SourceFactory
from data_plane.worker import source_factory
from tests.fakes.fleet_rig import CAPACITIES, PackedSource, ThreadedWorker, make_packed
from tests.fakes.hash_engine import HashEngine

Script = Callable[["Peer"], Awaitable[None]]
PACKED = make_packed("a")
DIGEST = PACKED.ref.digest
CONFIG = WorkerConfig(control_plane="127.0.0.1:1", model_dir=Path(), worker_id="w0")


class Peer:
    """The control plane's end of one Attach call."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]  # raw messages
        self._context = context

    async def receive(self, kind: str) -> plan_pb2.AttachRequest:
        """The next message of that kind; heartbeats in between are skipped."""
        while (message := await self._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in stubs
            if message.WhichOneof("message") == kind:
                return message
            assert message.WhichOneof("message") == "heartbeat", message
        raise AssertionError(f"the stream ended before a {kind}")

    async def welcome(
        self, epoch: int, *, heartbeat_ms: int = 500, leave_ms: int = 30_000, protocol: int = PROTOCOL
    ) -> plan_pb2.Hello:
        hello = (await self.receive("hello")).hello
        await self.send(
            welcome=plan_pb2.Welcome(
                protocol=protocol,
                epoch=epoch,
                heartbeat_interval_ms=heartbeat_ms,
                dead_after_ms=2000,
                plan_depth=2,
                leave_after_ms=leave_ms,
                stuck_after_ms=60_000,
            )
        )
        return hello

    async def abort(self, code: grpc.StatusCode) -> None:
        await self._context.abort(code, "as the test says")

    async def send(self, **message: object) -> None:
        await self.write(plan_pb2.AttachResponse(**message))  # type: ignore[arg-type]  # the caller names one

    async def write(self, message: plan_pb2.AttachResponse) -> None:
        await self._context.write(message)


async def play(
    *scripts: Script,
    fetch: Callable[[], Awaitable[None]] | None = None,
    make_source: SourceFactory | None = None,
    on_worker: Callable[[ThreadedWorker], None] = lambda _worker: None,
    check_self: Callable[[], None] = lambda: None,
    ends_by_itself: bool = False,
) -> ThreadedWorker:
    """Let a worker meet one script per session, in order; the worker once the last script is through.

    `fetch` is what FetchAdapter does, for a `make_source` that calls it; `on_worker` gets the worker at its start.
    `ends_by_itself`: the worker does not get a request to stop.
    """
    remaining = list(scripts)
    through = asyncio.Event()
    failures: list[BaseException] = []

    class Service(plan_pb2_grpc.WorkerServiceServicer):
        async def Attach(self, _requests: object, context: object) -> None:  # noqa: N802 - the RPC's name
            if not remaining:
                return
            script = remaining.pop(0)
            try:
                await script(Peer(context))  # type: ignore[arg-type]  # a ServicerContext
            except grpc.aio.AbortError:  # the script's own
                raise
            except BaseException as error:
                failures.append(error)
                raise
            finally:
                if failures or not remaining:
                    through.set()

        async def FetchAdapter(self, _request: object, _context: object) -> None:  # noqa: N802 - the RPC's name
            assert fetch is not None, "nobody was to fetch"
            await fetch()

    server = grpc.aio.server()
    plan_pb2_grpc.add_WorkerServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    source = PackedSource({DIGEST: PACKED})
    worker = ThreadedWorker(
        f"127.0.0.1:{port}", "w0", HashEngine(CAPACITIES), make_source or (lambda _stub, _welcome: source), check_self
    )
    on_worker(worker)
    try:
        async with asyncio.timeout(30):
            await through.wait()
        if ends_by_itself:
            await worker.join()
    finally:
        await worker.stop()
        await server.stop(None)
    if failures:
        raise failures[0]
    return worker


def ints(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def plan(step_id: int, epoch: int, **fields: object) -> plan_pb2.StepPlan:
    return plan_pb2.StepPlan(step_id=step_id, epoch=epoch, **fields)  # type: ignore[arg-type]  # the caller's fields


def one_row(**fields: object) -> dict[str, object]:
    new = plan_pb2.NewRow(row=0, token_ids=ints(1, 2), num_prompt_tokens=2, block_ids=ints(0), **fields)  # type: ignore[arg-type]  # the caller's fields
    return {"new_rows": [new], "prefills": ints(0, 2)}


async def test_results_come_in_the_order_of_plans_and_carry_the_epoch() -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(9)
        await peer.send(step_plan=plan(1, 9, **one_row()))
        await peer.send(step_plan=plan(2, 9))
        results = [(await peer.receive("step_result")).step_result for _ in range(2)]
        assert [(result.step_id, result.epoch, result.rows) for result in results] == [
            (1, 9, ints(0)),
            (2, 9, ints(0)),
        ]

    worker = await play(script)
    assert worker.exit_code == 0


async def test_a_plan_for_several_steps_is_answered_step_by_step() -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(9)
        await peer.send(step_plan=plan(1, 9, **one_row()))
        await peer.send(step_plan=plan(2, 9, appended_blocks=ints(0, 1), num_steps=3))
        await peer.send(step_plan=plan(5, 9, freed_rows=ints(0)))
        results = [(await peer.receive("step_result")).step_result for _ in range(5)]
        assert [(result.step_id, result.rows) for result in results] == [(n, ints(0)) for n in range(1, 5)] + [(5, b"")]
        assert len({result.token_ids for result in results[:4]}) > 1
        await peer.send(step_plan=plan(7, 9))
        assert (await peer.receive("fault")).fault.reason == "PlanRefused: step 7 after step 5"

    await play(script)


async def test_a_plan_of_another_epoch_is_a_fault_and_the_next_session_starts_empty() -> None:
    async def first(peer: Peer) -> None:
        await peer.welcome(9)
        await peer.send(step_plan=plan(1, 9, **one_row()))
        await peer.receive("step_result")
        await peer.send(step_plan=plan(2, 8))
        fault = (await peer.receive("fault")).fault
        assert (fault.step_id, fault.reason) == (2, "PlanRefused: epoch 8 in a session of epoch 9")

    async def second(peer: Peer) -> None:
        await peer.welcome(10)
        await peer.send(step_plan=plan(1, 10, **one_row()))  # row 0 is free again
        await peer.receive("step_result")

    await play(first, second)


async def test_an_older_control_plane_is_not_followed() -> None:
    async def newer(peer: Peer) -> None:
        assert (await peer.welcome(9)).last_epoch == 0

    async def older(peer: Peer, epoch: int = 8) -> None:
        await peer.welcome(epoch)
        with contextlib.suppress(asyncio.CancelledError):  # the worker may be gone before the plan is written
            await peer.send(step_plan=plan(1, epoch, **one_row()))

    async def newest(peer: Peer) -> None:
        hello = await peer.welcome(10)
        assert hello.last_epoch == 9
        await peer.receive("heartbeat")

    async def same(peer: Peer) -> None:
        await older(peer, epoch=9)

    worker = await play(newer, older, same, newest)
    assert worker.client.num_sessions == 2


async def test_a_repeated_or_skipped_step_is_a_fault() -> None:
    async def repeated(peer: Peer) -> None:
        await peer.welcome(1)
        await peer.send(step_plan=plan(1, 1, **one_row()))
        await peer.send(step_plan=plan(1, 1, **one_row()))
        await peer.receive("step_result")
        assert "step 1 after step 1" in (await peer.receive("fault")).fault.reason

    async def skipped(peer: Peer) -> None:
        await peer.welcome(2)
        await peer.send(step_plan=plan(2, 2, **one_row()))
        assert "step 2 after step 0" in (await peer.receive("fault")).fault.reason

    await play(repeated, skipped)


async def test_loads_and_evictions_are_reported_and_a_stale_slot_is_a_fault() -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(1)
        await peer.send(load_adapter=plan_pb2.LoadAdapter(slot=3, generation=5, digest=DIGEST, epoch=1))
        ready = (await peer.receive("slot_state")).slot_state
        assert (ready.slot, ready.generation, ready.state, ready.epoch) == (3, 5, plan_pb2.SlotState.STATE_READY, 1)
        assert ready.arena_used_bytes == PACKED.ref.arena_bytes
        await peer.send(step_plan=plan(1, 1, **one_row(slot=3, slot_generation=5)))
        await peer.receive("step_result")
        await peer.send(step_plan=plan(2, 1, freed_rows=ints(0)))
        await peer.receive("step_result")
        await peer.send(evict_adapter=plan_pb2.EvictAdapter(slot=3, generation=5, epoch=1))
        empty = (await peer.receive("slot_state")).slot_state
        assert (empty.state, empty.arena_used_bytes) == (plan_pb2.SlotState.STATE_EMPTY, 0)
        await peer.send(step_plan=plan(3, 1, **one_row(slot=3, slot_generation=5)))
        assert (await peer.receive("fault")).fault.reason.startswith("StaleSlot")

    await play(script)


async def test_a_failed_load_is_reported_with_its_reason() -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(1)
        for slot in (0, 0):
            await peer.send(load_adapter=plan_pb2.LoadAdapter(slot=slot, generation=1, digest=DIGEST, epoch=1))
        states = [(await peer.receive("slot_state")).slot_state for _ in range(2)]
        [failed] = [state for state in states if state.state == plan_pb2.SlotState.STATE_FAILED]
        assert "slot 0 is not an empty one" in failed.reason
        assert not failed.retryable and not failed.mismatch

    await play(script)


async def test_a_load_of_an_adapter_that_does_not_fit_the_model_says_that_no_try_helps() -> None:
    class Refusing:
        def open(self, digest: str) -> Any:
            raise AdapterMismatch(f"adapter {digest}: the model has no linear layers.9.up")

    async def script(peer: Peer) -> None:
        await peer.welcome(1)
        await peer.send(load_adapter=plan_pb2.LoadAdapter(slot=0, generation=1, digest=DIGEST, epoch=1))
        failed = (await peer.receive("slot_state")).slot_state
        assert failed.mismatch and not failed.retryable and "layers.9.up" in failed.reason

    await play(script, make_source=lambda _stub, _welcome: Refusing())


async def test_a_load_that_hangs_does_not_keep_the_worker_from_its_next_session() -> None:
    is_fetching = asyncio.Event()

    async def hang() -> None:
        is_fetching.set()
        await asyncio.Event().wait()

    async def first(peer: Peer) -> None:
        await peer.welcome(9)
        await peer.send(load_adapter=plan_pb2.LoadAdapter(slot=0, generation=1, digest=DIGEST, epoch=9))
        await is_fetching.wait()

    async def second(peer: Peer) -> None:
        await peer.welcome(10)

    await play(
        first,
        second,
        fetch=hang,
        make_source=source_factory(CONFIG),
    )


async def test_a_silent_control_plane_is_left_after_its_time() -> None:
    async def silent(peer: Peer) -> None:
        await peer.welcome(1, heartbeat_ms=20, leave_ms=60)
        leave = (await peer.receive("leave")).leave
        assert leave.reason.startswith("the control plane was silent for ")

    async def second(peer: Peer) -> None:
        await peer.welcome(2)
        await peer.receive("heartbeat")

    worker = await play(silent, second)
    assert worker.client.num_sessions == 2
    assert worker.engine.num_resets == 2


async def test_a_worker_that_is_stopped_says_so_before_it_closes_its_side() -> None:
    workers: list[PlanClient] = []

    async def script(peer: Peer) -> None:
        await peer.welcome(1)
        await peer.receive("heartbeat")
        workers[0].stop()
        assert (await peer.receive("leave")).leave.reason == "the worker stops"
        with pytest.raises(AssertionError, match="the stream ended"):
            await peer.receive("step_result")

    worker = await play(script, on_worker=lambda worker: workers.append(worker.client))
    assert worker.exit_code == 0


async def test_a_wait_for_a_plan_ends_now_and_then_so_that_a_signal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may arrive when the thread that runs its handler is about to wait: nothing then ends the wait."""
    timeouts: list[float | None] = []
    is_repeated = threading.Event()

    class Inbox(SimpleQueue):  # type: ignore[type-arg]  # of any items
        def get(self, block: bool = True, timeout: float | None = None) -> object:
            timeouts.append(timeout)
            if timeouts.count(0.01) > 2:
                is_repeated.set()
            return super().get(block, timeout)

    monkeypatch.setattr(plan_client, "SimpleQueue", Inbox)
    monkeypatch.setattr(session, "SIGNAL_DELAY_S", 0.01)

    async def script(peer: Peer) -> None:
        await peer.welcome(9)
        assert await asyncio.to_thread(is_repeated.wait, 30)
        await peer.send(step_plan=plan(1, 9, **one_row()))
        assert (await peer.receive("step_result")).step_result.step_id == 1

    await play(script)


async def test_a_fault_is_the_last_word_of_its_session() -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(1)
        await peer.send(step_plan=plan(2, 1))
        await peer.receive("fault")
        with pytest.raises(AssertionError, match="the stream ended"):
            await peer.receive("leave")

    await play(script)


@pytest.mark.parametrize("is_sound", [True, False])
async def test_a_worker_that_is_said_to_compute_wrongly_checks_itself(is_sound: bool) -> None:
    checks: list[int] = []

    def check() -> None:
        checks.append(1)
        if not is_sound:
            raise SelfCheckFailed("the logits are not finite")

    async def doubted(peer: Peer) -> None:
        await peer.welcome(1)
        await peer.abort(grpc.StatusCode.DATA_LOSS)

    async def again(peer: Peer) -> None:
        await peer.welcome(2)
        await peer.receive("heartbeat")

    scripts = [doubted, again] if is_sound else [doubted]
    worker = await play(*scripts, check_self=check, ends_by_itself=not is_sound)
    assert (worker.exit_code, worker.client.num_sessions, checks) == ((0, 2, [1]) if is_sound else (2, 1, [1]))


async def test_a_worker_without_control_plane_gives_up_after_its_time() -> None:
    times = iter(range(1000))
    settings = PlanClientSettings("127.0.0.1:1", "w0", exit_when_disconnected_s=2)
    client = PlanClient(
        HashEngine(CAPACITIES),
        settings,
        make_source=lambda _stub, _welcome: PackedSource({}),
        clock=lambda: next(times),
    )
    assert await asyncio.to_thread(client.run) == 1
    assert client.num_sessions == 0


def test_stop_may_interrupt_any_line_of_an_attempt_and_of_the_wait_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler does, in the thread that it interrupts. Nobody listens on the port."""
    monkeypatch.setattr(plan_client, "BACKOFF_MIN_S", 0.001)
    for interrupted_line in range(1, 100):
        client = PlanClient(HashEngine(CAPACITIES), PlanClientSettings("127.0.0.1:1", "w0"), make_source=_no_source)
        thread = threading.Thread(target=_run_interrupted, args=(client, interrupted_line), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), f"a stop in line {interrupted_line} hangs"


def _run_interrupted(client: PlanClient, interrupted_line: int) -> None:
    """Run, and stop before the given line of the client's code."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != plan_client.__file__:
            return None
        if event == "line":
            num_lines += 1
            if num_lines == interrupted_line:
                client.stop()
        return trace

    sys.settrace(trace)
    client.run()


def _no_source(*_: object) -> AdapterSource:
    raise AssertionError("nothing is loaded")


def test_every_status_code_is_fatal_or_retryable() -> None:
    assert not plan_client.FATAL_CODES & plan_client.RETRYABLE_CODES
    assert set(grpc.StatusCode) == plan_client.FATAL_CODES | plan_client.RETRYABLE_CODES

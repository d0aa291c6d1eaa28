"""What tests of the fleet are built from: a clock, a base model, packed adapters, and workers at both distances.

`LoopbackWorker` executes a session's plans in memory, step by step, under the test's control. `GrpcRig` serves a fleet
over a real port to plan clients in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import numpy as np

from contract.v1 import plan_pb2, plan_pb2_grpc
from control_plane.api.rpc import listeners
from control_plane.errors import AdapterDamaged, StoreUnavailable
from control_plane.fleet.assembly import assemble
from control_plane.fleet.fleet import TICK_S, Fleet
from control_plane.fleet.requests.streams import JobStream
from control_plane.fleet.service import WorkerService
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.workers.endings import EndCause
from control_plane.host_cache.base import CacheAddress
from control_plane.scheduler.requests.beam_search import BeamSearcher
from control_plane.scheduler.types import AdapterRef, Combination, Request, Vocabulary, sample_seed
from data_plane.config import WorkerConfig
from data_plane.errors import AdapterLoadError, AdapterMismatch
from data_plane.plan import Capacities, StepOutput
from data_plane.stream.plan_client import PlanClient, PlanClientSettings, SourceFactory
from data_plane.wire import decode_steps, encode_hello, encode_output
from data_plane.worker import source_factory
from tests.fakes.hash_engine import HashEngine, HashEngineFaults, oracle
from tests.fakes.hash_model import chain_of, combined_digest, ranking

FINGERPRINT = hashlib.sha256(b"base").hexdigest()
CAPACITIES = Capacities(
    model_fingerprint=FINGERPRINT,
    dtype="float32",
    device="hash",
    num_blocks=256,
    block_size=4,
    max_rows=16,
    max_step_tokens=64,
    arena_bytes=1 << 20,
    num_slots=4,
    max_model_len=2048,
    vocab_size=256,
    hidden_width=8,
)


STEP_TIME_US = 1000  # that every step of a worker in memory claims to have taken


class FakeClock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


def let_time_pass(clock: FakeClock, fleet: Fleet, seconds: float) -> None:
    """Let time pass in ticks, as in a process that runs; `clock.advance` alone is a process that was stopped."""
    for _ in range(round(seconds / TICK_S)):
        clock.advance(TICK_S)
        fleet.tick()


@dataclass(frozen=True)
class FakeBaseModel:
    fingerprint: str = FINGERPRINT
    dtype: str = "float32"
    vocab_size: int = 256
    quantization: str = "none"


@dataclass(frozen=True)
class FakePacked:
    """One packed adapter in memory."""

    manifest: bytes
    chunk_bytes: tuple[bytes, ...]
    left: asyncio.Event = field(default_factory=asyncio.Event)  # set once a reader has left the chunks
    paths: tuple[Path, ...] = ()  # files that its chunks lie in

    @property
    def ref(self) -> AdapterRef:
        """The adapter as requests name it: one module of rank 8, 16 by 16, float32."""
        return AdapterRef(hashlib.sha256(self.manifest).hexdigest(), arena_bytes=8 * 32 * 4)

    async def parts(self) -> AsyncIterator[bytes]:
        try:
            for chunk in self.chunk_bytes:
                yield chunk
        finally:
            self.left.set()


def make_packed(name: str, *, chunk_bytes: int = 64) -> FakePacked:
    """A packed adapter that differs from those of other names. Its chunk is opaque: hash workers only hash it."""
    chunk = (name.encode() * chunk_bytes)[:chunk_bytes]
    module = {
        "a_sha256": hashlib.sha256(b"a").hexdigest(),
        "b_sha256": hashlib.sha256(b"b").hexdigest(),
        "in_features": 16,
        "name": f"model.layers.0.{name}",
        "out_features": 16,
        "rank": 8,
        "scaling": 1.0,
    }
    entry = {
        "modules": [module],
        "name": "layers.0",
        "sha256": hashlib.sha256(chunk).hexdigest(),
        "size_bytes": len(chunk),
    }
    manifest = {"base_fingerprint": FINGERPRINT, "chunks": [entry], "dtype": "float32", "format": 1, "kind": "lora"}
    return FakePacked(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode(), (chunk,))


class FakeWeights:
    """The host cache as the fleet and the service see it."""

    worker_address = CacheAddress()

    def __init__(self) -> None:
        self.packed: dict[str, FakePacked] = {}
        self.cached: list[str] = []  # digests that ensure_cached was called with
        self.damaged: set[str] = set()

    def add(self, name: str, *, chunk_bytes: int = 64) -> AdapterRef:
        """Make an adapter available."""
        packed = make_packed(name, chunk_bytes=chunk_bytes)
        self.packed[packed.ref.digest] = packed
        return packed.ref

    def is_cached(self, digest: str) -> bool:
        return digest in self.cached

    async def ensure_cached(self, digest: str) -> None:
        self.cached.append(digest)

    def damage(self, digest: str) -> AdapterDamaged | None:
        return AdapterDamaged("the stored weights are damaged") if digest in self.damaged else None

    async def open_packed(self, digest: str) -> FakePacked:
        if (error := self.damage(digest)) is not None:
            raise error
        if digest not in self.packed:
            raise StoreUnavailable(f"adapter {digest[:12]} is not in the store")
        return self.packed[digest]


class InspectedFleet(Fleet):
    """A fleet whose test keeps the parts that it was built from."""

    def __init__(
        self,
        settings: FleetSettings,
        clock: Callable[[], float] = time.monotonic,
        vocabulary: Vocabulary | None = None,
        *,
        ticks_by_itself: bool,
    ) -> None:
        self.weights = FakeWeights()
        self.clock = clock
        base_model = FakeBaseModel()
        self.parts = assemble(settings, base_model, self.weights, incarnation=1, clock=clock, vocabulary=vocabulary)
        super().__init__(self.parts, ticks_by_itself=ticks_by_itself)


def make_fleet(clock: Callable[[], float], vocabulary: Vocabulary | None = None, **settings: object) -> InspectedFleet:
    """A fleet that only ticks when the test says so."""
    checked = FleetSettings(**settings)  # type: ignore[arg-type]  # fields are int or float
    return InspectedFleet(checked, clock, vocabulary, ticks_by_itself=False)


def make_request(
    fleet: InspectedFleet, prompt: list[int], max_tokens: int, adapter: AdapterRef | None = None, **fields: object
) -> Request:
    """A request of now."""
    request = Request(fleet.next_request_id(), tuple(prompt), max_tokens, adapter=adapter, arrival_s=fleet.clock())
    return replace(request, **fields)  # type: ignore[arg-type]  # the caller's fields are Request's


def expected(request: Request, index: int = 0) -> list[int]:
    """All tokens that a completion of the request must have."""
    digest = _digest_of(request)
    seed = sample_seed(request.sampling.seed, index) if request.sampling.temperature > 0 else None
    prompt, active_from = request.prompt_token_ids, request.active_from
    tokens = oracle(FINGERPRINT, digest, prompt, request.max_tokens, seed=seed, active_from=active_from)
    stops = [position for position, token in enumerate(tokens) if token in request.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


def expected_beams(request: Request) -> list[list[int]]:
    """All tokens that each hypothesis of a beam search must have, the best first; nothing where there is none."""
    assert request.beam is not None
    digest = _digest_of(request)
    searcher = BeamSearcher(
        request.beam, stop_token_ids=request.stop_token_ids, min_tokens=0, max_generated=request.max_tokens
    )
    while searcher.beams:
        candidates: list[Iterable[tuple[int, float]]] = []
        for beam in searcher.beams:
            tokens = (*request.prompt_token_ids, *beam.token_ids)
            value = chain_of(FINGERPRINT, digest, tokens, request.active_from)
            # As float32, which is what results carry.
            best = ranking(value, searcher.num_candidates, CAPACITIES.vocab_size)
            candidates.append([(token, float(np.float32(logprob))) for token, logprob in best])
        searcher.advance(candidates)
    hypotheses = [list(hypothesis.token_ids) for hypothesis in searcher.hypotheses]
    return hypotheses + [[]] * (request.beam.width - len(hypotheses))


def _digest_of(request: Request) -> str:
    if request.composition is not None:
        uses = ((use.ref.digest, use.scale) for use in request.composition.uses)
        return combined_digest(uses, is_linear=request.composition.combination is Combination.LINEAR)
    return request.adapter.digest if request.adapter else ""


async def read_all(stream: JobStream) -> list[int]:
    """Every token of the stream. Raises what the stream raises."""
    return [token async for event in stream for token in event.token_ids]


class PackedSource:
    """An AdapterSource over packed adapters in memory."""

    def __init__(self, packed: dict[str, FakePacked]) -> None:
        self._packed = packed

    def open(self, digest: str):  # type: ignore[no-untyped-def]  # AdapterSource's signature
        return self._packed[digest].manifest, iter(self._packed[digest].chunk_bytes)


class LoopbackWorker:
    """A worker of a fleet in the test's own task: nothing happens until the test calls `turn`."""

    def __init__(
        self,
        fleet: InspectedFleet,
        worker_id: str = "w0",
        *,
        capacities: Capacities = CAPACITIES,
        faults: HashEngineFaults | None = None,
        last_epoch: int = 0,
    ) -> None:
        self.engine = HashEngine(capacities, faults)
        self.fleet = fleet
        self.hello = encode_hello(capacities, worker_id, last_epoch).hello
        self.session = fleet.attach(self.hello)
        self.results: list[plan_pb2.AttachRequest] = []  # executed steps and loads, not sent
        self.pongs: list[plan_pb2.AttachRequest] = []  # they leave with the next results
        self.plans: list[plan_pb2.StepPlan] = []  # every plan received
        self.num_replies = 0
        self.load_time_us = 0  # that every load claims to have taken

    async def turn(self) -> None:
        """Take what was sent, execute it, and send every result."""
        await self.receive()
        self.reply()

    async def receive(self) -> None:
        """Take what was sent and execute it; the results wait."""
        await asyncio.sleep(0)  # lets a pump that is due happen
        for message in self.session.outbox.take():
            self._execute(plan_pb2.AttachResponse.FromString(message.SerializeToString()))

    def reply(self, num_results: int | None = None) -> None:
        """Send the oldest results, or all."""
        pongs, self.pongs = self.pongs, []
        for message in pongs:
            self.session.receive(message)
        count = len(self.results) if num_results is None else num_results
        due, self.results = self.results[:count], self.results[count:]
        for message in due:
            self.num_replies += 1
            self.session.receive(message)

    def lose(self) -> None:
        """It dies: its stream breaks."""
        self.session.end(EndCause.LOST, "the stream broke")

    def leave(self) -> None:
        """It leaves on purpose."""
        self.session.receive(plan_pb2.AttachRequest(leave=plan_pb2.Leave(reason="stopped by a signal")))

    async def run(self, until: Callable[[], bool], max_turns: int = 5000) -> None:
        """Turn until the condition holds."""
        for _ in range(max_turns):
            if until():
                return
            await self.turn()
        raise AssertionError(f"not within {max_turns} turns")

    def _execute(self, message: plan_pb2.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "ping":
            self.pongs.append(plan_pb2.AttachRequest(pong=plan_pb2.Pong(sequence=message.ping.sequence)))
        elif kind == "step_plan":
            self.plans.append(message.step_plan)
            for step in decode_steps(message.step_plan):
                output: StepOutput = self.engine.execute(step)
                output = replace(output, step_time_us=STEP_TIME_US)  # nothing shall depend on this machine's speed
                self.results.append(encode_output(output, self.session.epoch))
        elif kind == "load_adapter":
            load = message.load_adapter
            report = self.slot_state(load.slot, load.generation, plan_pb2.SlotState.STATE_READY)
            try:
                self.engine.slots.load(load.slot, load.generation, load.digest, PackedSource(self.fleet.weights.packed))
                report.slot_state.load_time_us = self.load_time_us
            except AdapterLoadError as error:
                report.slot_state.state = plan_pb2.SlotState.STATE_FAILED
                report.slot_state.retryable = error.is_retryable
                report.slot_state.mismatch = isinstance(error, AdapterMismatch)
                report.slot_state.reason = str(error)
            self.results.append(report)
        elif kind == "evict_adapter":
            evict = message.evict_adapter
            self.engine.slots.evict(evict.slot, evict.generation)
            self.results.append(self.slot_state(evict.slot, evict.generation, plan_pb2.SlotState.STATE_EMPTY))

    def slot_state(self, slot: int, generation: int, state: plan_pb2.SlotState.State) -> plan_pb2.AttachRequest:
        return plan_pb2.AttachRequest(
            slot_state=plan_pb2.SlotState(slot=slot, generation=generation, state=state, epoch=self.session.epoch)
        )


class ThreadedWorker:
    """A plan client with a hash engine in a thread."""

    def __init__(
        self,
        address: str,
        worker_id: str,
        engine: HashEngine,
        make_source: SourceFactory | None = None,
        check_self: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.exit_code: int | None = None
        settings = PlanClientSettings(control_plane=address, worker_id=worker_id)
        make_source = make_source or source_factory(
            WorkerConfig(control_plane=settings.control_plane, model_dir=Path(), worker_id=worker_id)
        )
        self.client = PlanClient(engine, settings, make_source=make_source, check_self=check_self)
        self._thread = threading.Thread(target=self._run, name=f"worker-{worker_id}")
        self._thread.start()

    async def stop(self) -> None:
        """Ask it to end and wait for it."""
        self.client.stop()
        await self.join()

    async def join(self) -> None:
        """Wait for its end."""
        await asyncio.to_thread(self._thread.join, 30)
        assert not self._thread.is_alive(), "the worker did not end"

    def _run(self) -> None:
        self.exit_code = self.client.run()


class GrpcRig:
    """A fleet behind a real worker port, in the test's loop. An async context manager; workers end with it."""

    def __init__(self, *, write_timeout_s: float = 30.0, **settings: float) -> None:
        checked = FleetSettings(**settings)  # type: ignore[arg-type]  # fields are int or float
        self.fleet = InspectedFleet(checked, ticks_by_itself=True)
        self.weights = self.fleet.weights
        self.workers: list[ThreadedWorker] = []
        self._server = listeners.worker_server(write_timeout_s=write_timeout_s)
        service = WorkerService(self.fleet, self.weights)
        plan_pb2_grpc.add_WorkerServiceServicer_to_server(service, self._server)
        self.port = int(listeners.bind(self._server, "127.0.0.1:0").rpartition(":")[2])
        self._changed = asyncio.Event()
        self.fleet.on_workers_changed(self._changed.set)

    async def __aenter__(self) -> GrpcRig:
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            await worker.stop()
        await self.fleet.close()
        await self._server.stop(None)

    async def add_worker(
        self,
        worker_id: str,
        *,
        capacities: Capacities = CAPACITIES,
        faults: HashEngineFaults | None = None,
        port: int | None = None,
    ) -> ThreadedWorker:
        """A worker, once it is attached; `port` goes through a proxy."""
        num_workers = self.fleet.num_workers
        worker = ThreadedWorker(f"127.0.0.1:{port or self.port}", worker_id, HashEngine(capacities, faults))
        self.workers.append(worker)
        await self.until(lambda: self.fleet.num_workers > num_workers)
        return worker

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait for something that attaching or losing a worker brings about."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

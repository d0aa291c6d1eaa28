"""A random walk over everything that can happen to a fleet; whatever a stream yields is the oracle's tokens.

Samples, beam searches, tenants of unequal weights, priorities, deadlines, adapters that are deleted, readers so slow
that their requests pause, requests that are moved to idle workers, and workers that are attached, lost and die.
MOTET_WALK_STEPS sets how many actions are taken in all and MOTET_WALK_SEED from which seed on.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from control_plane.errors import DeadlineExceeded, MotetError, QueueFull
from control_plane.fleet.requests import streams
from control_plane.fleet.requests.streams import JobStream
from control_plane.fleet.tenants import TenantLimits, TenantTable
from control_plane.fleet.workers.endings import EndCause
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.probe import SchedulerProbe
from control_plane.scheduler.types import BeamSearch, Request, Sampling
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    expected_beams,
    make_fleet,
    make_request,
)

NUM_ACTIONS = 600
NUM_SEEDS = max(5, int(os.environ.get("MOTET_WALK_STEPS", "0")) // NUM_ACTIONS)
FIRST_SEED = int(os.environ.get("MOTET_WALK_SEED", "1"))  # from 1: no suspect runs apart in the walk of seed 0
TENANTS = TenantTable(named={"heavy": TenantLimits(weight=3.0)})
MAX_UNREAD_TOKENS = 8  # instead of 256, which no request of a walk has
SMALL = replace(
    CAPACITIES, num_blocks=48, num_host_blocks=30, max_rows=6, max_step_tokens=24, num_slots=2, max_model_len=128
)


@dataclass
class Reader:
    """One request, the stream of its completions, and how far that is read."""

    request: Request
    stream: JobStream
    due: list[list[int]]  # by index
    got: list[list[int]] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.got = [[] for _ in self.due]

    async def read(self) -> bool:
        """Take what is there; whether the stream is over. Raises what ended it."""
        try:
            event = await anext(self.stream)
        except StopAsyncIteration:
            assert all(index in self.given_up or got == self.due[index] for index, got in enumerate(self.got))
            return True
        assert event.index not in self.given_up
        self.got[event.index] += event.token_ids
        assert self.got[event.index] == self.due[event.index][: len(self.got[event.index])]
        return False


class Walk:
    """One fleet, up to three workers, and readers that each read at their own pace."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        # Far enough that nothing is ended by time: every stream must come to its end.
        self.fleet = make_fleet(
            self.clock,
            max_waiting_requests=12,
            worker_grace_s=1e9,
            quarantine_s=0,
            slow_reader_timeout_s=1e9,
            tenants=TENANTS,
        )
        self.adapters = [None, *(self.fleet.weights.add(f"a{i}") for i in range(5))]
        self.workers: dict[str, LoopbackWorker] = {}
        self.readers: dict[int, Reader] = {}
        self.num_groups_moved = 0
        self.num_paused = 0  # actions after which some request was paused
        self.num_beam_searches = 0  # that were read to their ends
        self.errors: list[MotetError] = []
        self.num_finished = 0
        self.everybody: list[LoopbackWorker] = []  # lost ones included
        self.last_epochs: dict[str, int] = {}  # worker id -> of its latest session
        self.num_isolated = 0  # actions after which suspects ran apart
        self.unloading: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Act at random, then let everything end."""
        actions = [self.submit, self.turn, self.turn, self.turn, self.partly, self.read, self.read, self.attach]
        rare = [self.lose, *[self.die_again] * 3, self.cancel, self.give_up, self.unload, self.tick]
        for _ in range(NUM_ACTIONS):
            await self.rng.choice(actions if self.rng.random() < 0.9 else rare)()
            for worker in self.workers.values():
                check_scheduler(worker.session.scheduler)
            isolation = self.fleet.parts.isolation
            isolation.check_invariants()
            self.num_isolated += bool(isolation.stats().num_running)
            self.num_paused += any(worker.session.scheduler.stats().num_paused for worker in self.workers.values())
        if not self.workers:
            await self.attach()
        for _ in range(5000):
            if not self.readers:
                break
            await self.turn()
            await self.read()
            self.fleet.tick()  # at the same time: nothing else ends by its deadline
        assert not self.readers, f"{len(self.readers)} streams never ended"

    async def submit(self) -> None:
        rng = self.rng
        num_samples = rng.choice([1, 1, 2, 3])
        beam = (
            BeamSearch(rng.choice([2, 3]), rng.choice([0.0, 1.0]), rng.random() < 0.5) if rng.random() < 0.2 else None
        )
        if beam is not None:
            num_samples = 1
        is_group = num_samples > 1 or beam is not None
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 20 if is_group else 40))]
        request = make_request(
            self.fleet,
            prompt,
            rng.randint(1, 20 if is_group else 60),
            rng.choice(self.adapters),
            num_samples=num_samples,
            beam=beam,
            sampling=Sampling(temperature=float(num_samples > 1), seed=rng.randrange(2**64)),
            stop_token_ids=frozenset(rng.sample(range(256), rng.choice([0, 8]))),
            tenant=rng.choice(["heavy", "light", "other"]),
            priority=rng.choice([0, 0, 3]),
            deadline_s=self.clock.now_s + rng.uniform(0.05, 0.5) if rng.random() < 0.2 else None,
        )
        try:
            stream = self.fleet.submit(request)
        except QueueFull as error:
            self.errors.append(error)
            return
        due = expected_beams(request) if beam else [expected(request, index) for index in range(num_samples)]
        self.readers[request.request_id] = Reader(request, stream, due)

    async def attach(self) -> None:
        worker_id = f"w{self.rng.randrange(3)}"
        former = self.workers.get(worker_id)
        if former is None or self.rng.random() < 0.02:  # the same process attaches anew
            # The process that was there may have outlived the end of its session.
            outlived = self.rng.choice([0, self.last_epochs.get(worker_id, 0)])
            last_epoch = former.session.epoch if former else outlived
            self.workers[worker_id] = LoopbackWorker(self.fleet, worker_id, capacities=SMALL, last_epoch=last_epoch)
            self.last_epochs[worker_id] = self.workers[worker_id].session.epoch
            self.everybody.append(self.workers[worker_id])
            await self.workers[worker_id].receive()
            self.clock.advance(self.rng.choice([0.0, 0.02]))  # the way of the pong: plans to some run far ahead

    async def turn(self) -> None:
        for worker in list(self.workers.values()):
            await worker.turn()

    async def partly(self) -> None:
        """Some worker executes its plans and sends only a part of the results."""
        if self.workers:
            worker = self.rng.choice(sorted(self.workers.values(), key=lambda worker: worker.session.epoch))
            await worker.receive()
            worker.reply(self.rng.randint(0, len(worker.results)))

    async def read(self) -> None:
        """Some readers take what is there."""
        for request_id, reader in list(self.readers.items()):
            if self.rng.random() < 0.7 or not (reader.stream.num_unread_tokens or reader.stream.has_ended):
                continue
            try:
                if not await reader.read():
                    continue
                self.num_finished += 1
                self.num_beam_searches += reader.request.beam is not None
            except MotetError as error:
                assert reader.request.deadline_s is not None or not isinstance(error, DeadlineExceeded)
                self.errors.append(error)
            del self.readers[request_id]

    async def lose(self) -> None:
        if self.workers:
            worker = self.workers.pop(self.rng.choice(sorted(self.workers)))
            scheduler = worker.session.scheduler
            num_rows = Counter(SchedulerProbe(scheduler).running_ids())
            self.num_groups_moved += any(num_rows[request_id] > 1 for request_id in scheduler.request_ids)
            worker.session.end(EndCause.LOST if self.rng.random() < 0.3 else EndCause.LEFT, "lost")

    async def die_again(self) -> None:
        """A worker dies, is started again, and dies before it answered anything."""
        if self.workers:
            worker_id = self.rng.choice(sorted(self.workers))
            self.workers.pop(worker_id).lose()
            worker = LoopbackWorker(self.fleet, worker_id, capacities=SMALL)
            self.everybody.append(worker)
            await worker.receive()
            worker.lose()

    async def cancel(self) -> None:
        if self.readers:
            self.readers.pop(self.rng.choice(sorted(self.readers))).stream.cancel()

    async def give_up(self) -> None:
        """Some reader cancels one of its completions."""
        several = [reader for reader in self.readers.values() if reader.request.num_samples > 1]
        if several:
            reader = self.rng.choice(several)
            index = self.rng.randrange(reader.request.num_samples)
            reader.given_up.add(index)
            reader.stream.cancel_index(index)

    async def unload(self) -> None:
        adapter = self.rng.choice(self.adapters[1:])
        assert adapter is not None, "the base model is not unloaded"
        self.unloading.append(asyncio.create_task(self.fleet.unload(adapter.digest)))

    async def tick(self) -> None:
        self.clock.advance(0.1)
        self.fleet.tick()


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
async def test_whatever_happens_every_stream_yields_the_oracles_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_TOKENS", MAX_UNREAD_TOKENS)
    walk = Walk(seed)
    await walk.run()
    seen = {
        "streams read to their ends": walk.num_finished - 20,
        "beam searches": walk.num_beam_searches,
        "pauses": walk.num_paused,
        "suspects that ran apart": walk.num_isolated,
        "requests moved": walk.fleet.queue_snapshot().num_migrated,
        "several completions moved": walk.num_groups_moved,
        "swaps": sum(worker.session.scheduler.stats().num_swapped_out for worker in walk.everybody),
        "plans of several steps": sum(plan.num_steps > 1 for worker in walk.everybody for plan in worker.plans),
    }
    assert seed > 5 or min(seen.values()) > 0, f"the walk did not go where it should: {seen}"
    # Only what the walk cannot avoid: a full queue, a deadline, and too many deaths of workers.
    lost = [error for error in walk.errors if not isinstance(error, QueueFull | DeadlineExceeded)]
    assert {type(error).__name__ for error in lost} <= {"WorkerLost", "PoisonedRequest"}
    assert len(lost) < walk.num_finished / 4
    for _ in range(30):
        await walk.turn()
    assert all(task.done() for task in walk.unloading)
    assert walk.fleet.queue_snapshot().num_requests == walk.fleet.queue_snapshot().num_waiting == 0
    for snapshot in walk.fleet.worker_snapshots():
        assert (snapshot.num_blocks_held, snapshot.num_running, snapshot.num_plans_in_flight) == (0, 0, 0)

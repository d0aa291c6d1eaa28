"""A random walk over everything that can happen to a fleet; whatever a stream yields is the oracle's tokens."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import grpc
import pytest

from control_plane.errors import MotetError, QueueFull
from control_plane.fleet.jobs import JobStream
from control_plane.scheduler.types import Request, Sampling
from tests.fakes.fleet_rig import CAPACITIES, FakeClock, LoopbackWorker, expected, make_fleet, make_request

NUM_ACTIONS = 600
SMALL = replace(
    CAPACITIES, num_blocks=48, num_host_blocks=30, max_rows=6, max_step_tokens=24, num_slots=2, max_model_len=128
)


class Walk:
    """One fleet, up to three workers, and readers that each read at their own pace."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        # Far enough that nothing is ended by time: every stream must come to its end.
        self.fleet = make_fleet(self.clock, max_waiting_requests=20, worker_grace_s=1e9, slow_reader_timeout_s=1e9)
        self.adapters = [None, *(self.fleet._weights.add(f"a{i}") for i in range(5))]  # type: ignore[attr-defined]  # FakeWeights
        self.workers: dict[str, LoopbackWorker] = {}
        self.streams: dict[int, tuple[Request, JobStream, dict[int, list[int]]]] = {}  # tokens by index
        self.given_up: set[tuple[int, int]] = set()  # (request id, index)
        self.num_groups_moved = 0
        self.errors: list[MotetError] = []
        self.num_finished = 0
        self.everybody: list[LoopbackWorker] = []  # lost ones included
        self.retiring: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Act at random, then let everything end."""
        actions = [self.submit, self.turn, self.turn, self.turn, self.partly, self.read, self.read, self.attach]
        rare = [self.lose, self.lose, self.cancel, self.give_up, self.retire, self.tick]
        for _ in range(NUM_ACTIONS):
            await self.rng.choice(actions if self.rng.random() < 0.9 else rare)()
            for worker in self.workers.values():
                worker.session.scheduler.check_invariants()
        if not self.workers:
            await self.attach()
        for _ in range(5000):
            if not self.streams:
                break
            await self.turn()
            await self.read()
        assert not self.streams, f"{len(self.streams)} streams never ended"

    async def submit(self) -> None:
        rng = self.rng
        num_samples = rng.choice([1, 1, 2, 3])
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 40 if num_samples == 1 else 20))]
        request = make_request(
            self.fleet,
            prompt,
            rng.randint(1, 60 if num_samples == 1 else 20),
            rng.choice(self.adapters),
            num_samples=num_samples,
            sampling=Sampling(temperature=float(num_samples > 1), seed=rng.randrange(2**64)),
            stop_token_ids=frozenset(rng.sample(range(256), rng.choice([0, 8]))),
        )
        try:
            stream = self.fleet.submit(request)
            self.streams[request.request_id] = (request, stream, {index: [] for index in range(num_samples)})
        except QueueFull as error:
            self.errors.append(error)

    async def attach(self) -> None:
        worker_id = f"w{self.rng.randrange(3)}"
        if worker_id not in self.workers or self.rng.random() < 0.02:  # else: a second one fences the first
            self.workers[worker_id] = LoopbackWorker(self.fleet, worker_id, capacities=SMALL)
            self.everybody.append(self.workers[worker_id])
            await self.workers[worker_id].receive()
            self.clock.advance(self.rng.choice([0.0, 0.02]))  # the way of the pong: plans to some run far ahead

    async def turn(self) -> None:
        for worker in list(self.workers.values()):
            await worker.turn()

    async def partly(self) -> None:
        """Some worker executes and answers only a part of it."""
        if self.workers:
            worker = self.rng.choice(sorted(self.workers.values(), key=lambda worker: worker.session.epoch))
            await worker.receive()
            worker.answer(self.rng.randint(0, len(worker.answers)))

    async def read(self) -> None:
        """Some readers take what is there."""
        for request_id in list(self.streams):
            request, stream, answers = self.streams[request_id]
            if self.rng.random() < 0.3 and (stream.num_unread_tokens or stream.has_ended):
                try:
                    event = await anext(stream)
                    assert (request_id, event.index) not in self.given_up
                    answers[event.index] += event.token_ids
                except StopAsyncIteration:
                    for index in answers:
                        assert (request_id, index) in self.given_up or answers[index] == expected(request, index)
                    self.num_finished += 1
                    del self.streams[request_id]
                except MotetError as error:
                    self.errors.append(error)
                    del self.streams[request_id]
                for index, tokens in answers.items():
                    assert tokens == expected(request, index)[: len(tokens)]

    async def lose(self) -> None:
        if self.workers:
            worker = self.workers.pop(self.rng.choice(sorted(self.workers)))
            is_death = self.rng.random() < 0.3
            self.num_groups_moved += any(
                group.num_rows > 1 and not group.is_ended for group in worker.session.scheduler.groups.values()
            )
            worker.session.end(grpc.StatusCode.UNAVAILABLE, "lost", is_death=is_death)

    async def cancel(self) -> None:
        if self.streams:
            _, stream, _ = self.streams.pop(self.rng.choice(sorted(self.streams)))
            stream.cancel()

    async def give_up(self) -> None:
        """Some reader wants one of its answers no more."""
        several = [i for i, (request, _, _) in self.streams.items() if request.num_samples > 1]
        if several:
            request_id = self.rng.choice(several)
            request, stream, _ = self.streams[request_id]
            index = self.rng.randrange(request.num_samples)
            self.given_up.add((request_id, index))
            stream.cancel_index(index)

    async def retire(self) -> None:
        adapter = self.rng.choice(self.adapters[1:])
        assert adapter is not None, "the base model is not retired"
        self.retiring.append(asyncio.create_task(self.fleet.retire(adapter.digest)))

    async def tick(self) -> None:
        self.clock.advance(0.1)
        self.fleet.tick()


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_every_stream_yields_the_oracles_tokens(seed: int) -> None:
    walk = Walk(seed)
    await walk.run()
    assert walk.num_finished > 20
    assert walk.fleet.queue_snapshot().num_migrated > 0
    assert walk.num_groups_moved > 0
    assert any(plan.num_steps > 1 for worker in walk.everybody for plan in worker.plans)
    # Only what the walk cannot avoid: a full queue, and the fourth loss of a worker.
    assert {type(error).__name__ for error in walk.errors} <= {"QueueFull", "WorkerLost", "PoisonedRequest"}
    assert len([error for error in walk.errors if not isinstance(error, QueueFull)]) < walk.num_finished / 4
    for _ in range(30):
        await walk.turn()
    assert all(task.done() for task in walk.retiring)
    assert walk.fleet.queue_snapshot().num_requests == walk.fleet.queue_snapshot().num_waiting == 0
    for snapshot in walk.fleet.worker_snapshots():
        assert (snapshot.num_blocks_held, snapshot.num_running, snapshot.num_plans_in_flight) == (0, 0, 0)

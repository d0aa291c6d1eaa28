"""Requests with known completions, sent by threads and tasks as long as a round lasts, and what became of each.

A call that fails is sent again by hand until its deadline: if that helps, the SDK should have done it.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from motet import AsyncClient, Chunk, Client, FinishReason, MotetError

from tests.hostile.faults.together import stack_of
from tests.hostile.faults.truth import Job, Truth

HUNG_AFTER_S = 10.0  # past the deadline of a call
Options = dict[str, object]


@dataclass
class Call:
    """One request of the load and what came of it. Written by its own thread, read when that has ended."""

    job: Job
    is_async: bool
    begun_s: float
    deadline_s: float
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by index of the completion
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    first_s: float | None = None  # from the request to its first token
    longest_gap_s: float = 0.0  # between tokens
    gap_begun_s: float = 0.0  # when the longest wait for a token began, that for the first included
    error: str = ""  # class and reason of what the SDK raised
    error_text: str = ""
    error_s: float = 0.0  # when
    is_avoidable: bool = False  # the same request, sent again within the deadline, was answered
    is_ended: bool = False
    is_cancelled: bool = False  # by the load itself
    _last_s: float = 0.0

    def take(self, chunk: Chunk, now_s: float) -> None:
        """One chunk of the stream."""
        self.digests.add(chunk.adapter_digest)
        if chunk.finish_reason is not None:
            self.reasons[chunk.index] = chunk.finish_reason
        tokens = self.token_ids.setdefault(chunk.index, [])
        assert chunk.token_offset == len(tokens) or not chunk.token_ids, "tokens out of order"
        tokens.extend(chunk.token_ids)
        self.texts[chunk.index] = self.texts.get(chunk.index, "") + chunk.text
        if chunk.token_ids:
            if self.first_s is None:
                self.first_s = now_s - self.begun_s
                self._last_s, self.gap_begun_s = now_s, self.begun_s
            elif now_s - self._last_s > self.longest_gap_s:
                self.longest_gap_s, self.gap_begun_s = now_s - self._last_s, self._last_s
            self._last_s = now_s

    def fail(self, error: BaseException, now_s: float) -> None:
        reason = getattr(error, "reason", "")
        self.error = type(error).__name__ + (f" {reason}" if reason else "")
        self.error_text, self.error_s = str(error)[:300], now_s

    @property
    def longest_wait_s(self) -> float:
        """For a token, the first one included."""
        return max(self.longest_gap_s, self.first_s or 0.0)


def problem_of(call: Call, truth: Truth, digests: dict[str, set[str]]) -> str:
    """What is wrong with the tokens that came, of a call that failed as well; empty if nothing is."""
    job = call.job
    if len(call.digests) > 1:
        return f"chunks of the versions {sorted(call.digests)}"
    digest = next(iter(call.digests), "")
    if call.digests and (digest not in digests.get(job.adapter, set()) if job.adapter else digest):
        return f"version {digest!r} of adapter {job.adapter!r}"
    is_whole = not call.error and not call.is_cancelled
    if is_whole and sorted(call.token_ids) != list(range(job.n)):
        return f"completions {sorted(call.token_ids)} of {job.n}"
    for index, tokens in call.token_ids.items():
        due = list(truth.tokens(job, digest, index))
        if tokens != due[: len(tokens)]:
            place = next(place for place, token in enumerate(tokens) if place >= len(due) or token != due[place])
            return (
                f"completion {index}: token {place} is {tokens[place]}, due are {due[place : place + 3]} of {len(due)}"
            )
        if is_whole and (len(tokens) != len(due) or call.reasons.get(index) is not FinishReason.LENGTH):
            return f"completion {index}: {len(tokens)} of {len(due)} tokens, {call.reasons.get(index)}"
        if is_whole and call.texts[index] != truth.text(tokens):
            return f"completion {index}: the text {call.texts[index]!r} of {truth.text(tokens)!r}"
    return ""


def options_of(job: Job) -> Options:
    """Keyword arguments of generate()."""
    options: Options = {"adapter": job.adapter, "max_tokens": job.num_tokens, "ignore_eos": True}
    options["temperature"] = job.temperature
    if job.temperature > 0:
        options["seed"] = job.seed
    if job.n > 1:
        options["n"] = job.n
    return options


class Load:
    """`num_threads` threads on `num_clients` blocking clients, and `num_tasks` tasks on one asyncio client."""

    def __init__(
        self,
        addresses: Sequence[str],
        truth: Truth,
        *,
        seed: str,
        num_threads: int = 8,
        num_clients: int = 2,
        num_tasks: int = 6,
        timeout_s: float = 30.0,
        cancel_share: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses = addresses
        self._truth = truth
        self._seed = seed
        self._num_threads = num_threads
        self._num_tasks = num_tasks
        self._timeout_s = timeout_s
        self._cancel_share = cancel_share
        self._clock = clock
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        self._clients = [Client(addresses[number % len(addresses)]) for number in range(num_clients)]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"load-{number}", daemon=True)
            for number in range(num_threads)
        ]
        self._loop_thread = threading.Thread(target=self._run_loop, name="load-loop", daemon=True)

    def start(self) -> None:
        for thread in (*self._threads, self._loop_thread):
            thread.start()

    def stop(self) -> list[str]:
        """Begin no more calls, wait until all have ended; the stacks of those that never do."""
        self._is_stopped.set()
        stacks = []
        latest_s = max((call.deadline_s for call in list(self.calls)), default=self._clock()) + HUNG_AFTER_S
        for thread in (*self._threads, self._loop_thread):
            thread.join(max(latest_s - self._clock(), 0.1))
            if thread.is_alive():
                stacks.append(stack_of(thread))
        if not stacks:  # closing the channel of a call that hangs may hang as well
            for client in self._clients:
                client.close()
        return stacks

    # ---- threads ----

    def _run(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        client = self._clients[number % len(self._clients)]
        while not self._is_stopped.is_set():
            call = self._begin(draw, is_async=False)
            num_wanted = self._num_wanted(draw, call.job)
            try:
                self._stream(client, call, num_wanted)
            except MotetError as error:
                call.fail(error, self._clock())
                call.is_avoidable = self._helps_to_ask_again(client, call)
            except Exception as error:
                call.fail(error, self._clock())
            call.is_ended = True

    def _stream(self, client: Client, call: Call, num_wanted: int | None) -> None:
        timeout_s = call.deadline_s - self._clock()
        with client.generate(list(call.job.prompt), timeout_s=timeout_s, **options_of(call.job)) as stream:  # type: ignore[arg-type]
            for chunk in stream:
                call.take(chunk, self._clock())
                if num_wanted is not None and len(call.token_ids.get(0, ())) >= num_wanted:
                    call.is_cancelled = True
                    return

    def _helps_to_ask_again(self, client: Client, call: Call) -> bool:
        """Send the request until its deadline; whether it was answered."""
        pause = threading.Event()
        while (left_s := call.deadline_s - self._clock()) > 0.05:
            again = Call(call.job, call.is_async, self._clock(), call.deadline_s)
            try:
                with client.generate(list(call.job.prompt), timeout_s=left_s, **options_of(call.job)) as stream:  # type: ignore[arg-type]
                    for chunk in stream:
                        again.take(chunk, self._clock())
                return True
            except MotetError:
                pause.wait(0.3)
        return False

    # ---- tasks ----

    def _run_loop(self) -> None:
        asyncio.run(self._run_tasks())

    async def _run_tasks(self) -> None:
        async with AsyncClient(self._addresses[0]) as client, asyncio.TaskGroup() as group:
            for number in range(self._num_tasks):
                group.create_task(self._run_task(client, random.Random(f"{self._seed}/task-{number}")))

    async def _run_task(self, client: AsyncClient, draw: random.Random) -> None:
        while not self._is_stopped.is_set():
            call = self._begin(draw, is_async=True)
            num_wanted = self._num_wanted(draw, call.job)
            try:
                async with asyncio.timeout(self._timeout_s + HUNG_AFTER_S):
                    await self._stream_async(client, call, num_wanted)
            except MotetError as error:
                call.fail(error, self._clock())
                call.is_avoidable = await self._helps_async(client, call)
            except TimeoutError:
                continue  # never ended: it counts as hung
            except Exception as error:
                call.fail(error, self._clock())
            call.is_ended = True

    async def _stream_async(self, client: AsyncClient, call: Call, num_wanted: int | None) -> None:
        timeout_s = call.deadline_s - self._clock()
        async with client.generate(list(call.job.prompt), timeout_s=timeout_s, **options_of(call.job)) as stream:  # type: ignore[arg-type]
            async for chunk in stream:
                call.take(chunk, self._clock())
                if num_wanted is not None and len(call.token_ids.get(0, ())) >= num_wanted:
                    call.is_cancelled = True
                    return

    async def _helps_async(self, client: AsyncClient, call: Call) -> bool:
        while call.deadline_s - self._clock() > 0.05:
            again = Call(call.job, call.is_async, self._clock(), call.deadline_s)
            try:
                async with asyncio.timeout(max(call.deadline_s - self._clock(), 0.0) + HUNG_AFTER_S):
                    await self._stream_async(client, again, None)
                return True
            except (MotetError, TimeoutError):
                await asyncio.sleep(0.3)
        return False

    # ---- both ----

    def _begin(self, draw: random.Random, *, is_async: bool) -> Call:
        now_s = self._clock()
        call = Call(self._truth.draw(draw), is_async, now_s, now_s + self._timeout_s)
        with self._lock:
            self.calls.append(call)
        return call

    def _num_wanted(self, draw: random.Random, job: Job) -> int | None:
        """After how many tokens the load cancels this call; None: it reads to the end."""
        return draw.randrange(1, job.num_tokens + 1) if draw.random() < self._cancel_share else None

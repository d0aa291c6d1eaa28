"""What can go wrong: every fault as a function that breaks something, waits, and mends it again.

A fault holds the processes that it handles, says on its return what it found to be wrong (nothing, in a correct
system), and leaves the rig as it was, so that faults can overlap. Times are drawn by the round's seed.
"""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from motet import Client, MotetError, NotFound, RetryPolicy
from motet.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from tests.hostile.bad_inputs.uploads import UPLOAD, upload
from tests.hostile.faults.load import options_of
from tests.hostile.faults.rig import SLOW_READER_TIMEOUT_S, STEADY, TURNING, Rig
from tests.hostile.faults.together import together
from tests.hostile.faults.truth import Job

CONTROL_PLANE, REDIS, STORE = "control plane", "redis", "store"
HUNG_AFTER_S = 90.0  # calls of a fault's own, each with a deadline far below


@dataclass(frozen=True)
class Moment:
    """What a fault may use: the rig, chance, and a way to wait that ends when the run is broken off."""

    rig: Rig
    draw: random.Random
    pause: Callable[[float], None]
    number: int  # of the round: for names that occur once


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    happen: Callable[[Moment], list[str]]
    weight: float = 1.0
    needs_own_redis: bool = False
    is_slow: bool = False  # takes longer than a short round
    has_room: bool = False  # whether another worker has room meanwhile


# ---- workers ----


def _worker_killed(moment: Moment) -> list[str]:
    rig, worker_id = moment.rig, moment.draw.choice(moment.rig.worker_ids)
    with rig.hold(worker_id):
        rig.worker(worker_id).kill()
        moment.pause(moment.draw.uniform(0.0, 1.5))
        rig.start_worker(worker_id)
    return []


def _workers_killed(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(*rig.worker_ids):
        for worker_id in rig.worker_ids:
            rig.worker(worker_id).kill()
        moment.pause(moment.draw.uniform(0.0, 1.0))
        for worker_id in rig.worker_ids:
            rig.start_worker(worker_id)
    return []


def _worker_stopped(moment: Moment) -> list[str]:
    """By SIGSTOP: shorter and longer than the time after which it counts as dead."""
    rig, worker_id = moment.rig, moment.draw.choice(moment.rig.worker_ids)
    with rig.hold(worker_id):
        rig.worker(worker_id).send(signal.SIGSTOP)
        moment.pause(moment.draw.choice((0.3, 1.0, 2.5, 3.5)))
        rig.worker(worker_id).send(signal.SIGCONT)
    return []


def _worker_terminated(moment: Moment) -> list[str]:
    rig, worker_id = moment.rig, moment.draw.choice(moment.rig.worker_ids)
    with rig.hold(worker_id):
        status = rig.status()
        is_attached = status is not None and worker_id in {worker.worker_id for worker in status.workers}
        code = rig.worker(worker_id).stop(20.0)
        rig.start_worker(worker_id)
    # One that another fault has just started may not handle signals yet.
    return [f"worker {worker_id} ended with status {code} after SIGTERM"] if code != 0 and is_attached else []


# ---- control plane ----


def _control_plane_killed(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(CONTROL_PLANE, REDIS):
        rig.system.control_plane.kill()
        rig.system.start_control_plane()
    return []


def _control_plane_killed_and_away(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(CONTROL_PLANE, REDIS):
        rig.system.control_plane.kill()
        moment.pause(moment.draw.uniform(1.0, 8.0))
        rig.system.start_control_plane()
    return []


def _control_plane_terminated(moment: Moment) -> list[str]:
    """By SIGTERM, while many new requests arrive, of which none may fail as long as it can wait."""
    rig = moment.rig
    found: list[str] = []
    is_back = threading.Event()
    codes: list[int] = []

    def ask() -> None:
        while not is_back.is_set():
            try:
                client.generate([5, 6, 7], max_tokens=4, ignore_eos=True, timeout_s=30.0).result()
            except MotetError as error:
                found.append(f"a request during the drain ended with {type(error).__name__}: {str(error)[:200]}")

    def terminate() -> None:
        try:
            codes.append(rig.system.control_plane.stop(40.0))
            rig.system.start_control_plane()
        finally:
            is_back.set()

    with rig.hold(CONTROL_PLANE, REDIS), _client(moment, RetryPolicy()) as client:
        _, hung = together([terminate, *[ask] * 12], HUNG_AFTER_S + 40.0)
    return found + hung + [f"the control plane ended with status {code} after SIGTERM" for code in codes if code != 0]


def _control_plane_stopped(moment: Moment) -> list[str]:
    return _stop_control_plane(moment, moment.draw.choice((0.3, 1.0, 2.5, 3.5)))


def _control_plane_stopped_long(moment: Moment) -> list[str]:
    """Longer than a reader may take, and than a worker waits: a machine that was suspended. No reader is blamed."""
    with _unread_streams(moment, 12) as streams:
        moment.pause(0.3)
        _stop_control_plane(moment, SLOW_READER_TIMEOUT_S + moment.draw.uniform(1.0, 4.0))
        return _read_all(moment, streams)


def _stop_control_plane(moment: Moment, stopped_s: float) -> list[str]:
    rig = moment.rig
    with rig.hold(CONTROL_PLANE):
        rig.system.control_plane.send(signal.SIGSTOP)
        moment.pause(stopped_s)
        rig.system.control_plane.send(signal.SIGCONT)
    return []


def _worker_and_control_plane_killed(moment: Moment) -> list[str]:
    rig, worker_id = moment.rig, moment.draw.choice(moment.rig.worker_ids)
    with rig.hold(CONTROL_PLANE, REDIS, worker_id):
        rig.worker(worker_id).kill()
        rig.system.control_plane.kill()
        rig.system.start_control_plane()
        rig.start_worker(worker_id)
    return []


# ---- Redis ----


def _redis_killed(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(REDIS):
        process = rig.redis_process()
        if process is not None:
            process.kill()
        if rig.has_own_redis:
            rig.kill_redis()
            moment.pause(moment.draw.uniform(0.0, 1.5))
            rig.start_redis()
    return []


def _redis_stopped(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(REDIS):
        process = rig.redis_process()
        if process is not None:
            process.suspend()
            moment.pause(moment.draw.choice((0.5, 2.0, 3.5)))
            process.resume()
    return []


def _redis_emptied(moment: Moment) -> list[str]:
    with moment.rig.hold(REDIS), moment.rig.redis_client() as connection:
        for _ in range(moment.draw.choice((1, 3))):
            connection.flushall()
            moment.pause(moment.draw.uniform(0.1, 0.8))
    return []


def _redis_corrupted(moment: Moment) -> list[str]:
    """Values flipped, cut, exchanged, deleted, or of another type."""
    way = moment.draw.choice(("flip", "cut", "exchange", "delete", "retype"))
    with moment.rig.hold(REDIS), moment.rig.redis_client() as connection:
        keys = sorted(connection.scan_iter("motet:a:*"))
        values = {key: connection.get(key) for key in keys if connection.type(key) == b"string"}
        for index, key in enumerate(keys):
            value = values.get(key)
            if not isinstance(value, bytes) or not value:
                continue
            if way == "flip":
                place = moment.draw.randrange(len(value))
                connection.set(key, value[:place] + bytes([value[place] ^ 0x10]) + value[place + 1 :])
            elif way == "cut":
                connection.set(key, value[: len(value) // 2])
            elif way == "exchange":
                connection.set(key, values.get(keys[index - 1]) or b"")
            elif way == "delete" and moment.draw.random() < 0.5:
                connection.delete(key)
            elif way == "retype":
                connection.delete(key)
                connection.lpush(key, b"x")
    _load_again(moment)
    return []


def _redis_slow(moment: Moment) -> list[str]:
    with moment.rig.hold(REDIS), moment.rig.redis_client() as connection:
        connection.execute_command("DEBUG", "SLEEP", str(moment.draw.choice((0.5, 2.0))))
    return []


def _load_again(moment: Moment) -> None:
    """Ask for every adapter, so that cold ones are read."""
    with _client(moment) as client:
        for name in STEADY:
            with contextlib.suppress(MotetError):
                client.generate([5, 6], adapter=name, max_tokens=1, timeout_s=20.0).result()


# ---- store and adapters ----


def _store_away(moment: Moment) -> list[str]:
    """The directory is renamed, as by an unmounted volume. What was answered OK must be there after a restart."""
    rig, name = moment.rig, f"stored-{moment.number}"
    store = rig.store_dir()
    aside = store.with_name("store-aside")
    directory = rig.adapters.make(f"stored-{moment.number % 7}")
    was_taken = False
    with rig.hold(STORE, CONTROL_PLANE, REDIS):
        store.rename(aside)
        try:
            with _client(moment) as client, contextlib.suppress(MotetError):
                client.adapters.register(name, directory, timeout_s=5.0)
                was_taken = True
            moment.pause(moment.draw.uniform(0.0, 1.0))
        finally:
            if store.exists():  # made anew by the server: it lay below the mount point
                store.rename(store.with_name(f"store-lost-{moment.number}"))
            aside.rename(store)
        rig.system.control_plane.kill()
        rig.system.start_control_plane()
        is_there = name in rig.registered()
        _delete(moment, rig.admin, name)
    if was_taken and not is_there:
        return ["a registration was answered OK while the store was away, and is lost after a restart"]
    return []


def _adapter_turned(moment: Moment) -> list[str]:
    """Its active version moves to and fro, by activation and by registering the same bytes again."""
    rig = moment.rig
    digests = sorted(rig.digests[TURNING])
    with _client(moment) as client, rig.hold(STORE):
        for _ in range(moment.draw.randrange(3, 12)):
            with contextlib.suppress(MotetError):
                if moment.draw.random() < 0.7:
                    client.adapters.activate(TURNING, moment.draw.choice(digests))
                else:
                    directory = rig.adapters.directory_of(moment.draw.choice(digests))
                    client.adapters.register(TURNING, directory, timeout_s=10.0)
            moment.pause(moment.draw.uniform(0.0, 0.3))
    return []


def _adapter_deleted(moment: Moment) -> list[str]:
    """A name of its own comes, is used, goes while it is used, and stays gone."""
    rig, name = moment.rig, f"fleeting-{moment.number}"
    directory = rig.adapters.make(f"fleeting-{moment.number % 5}")
    with _client(moment) as client, rig.hold(STORE):

        def ask() -> None:
            with contextlib.suppress(MotetError):  # it may be gone already, and other faults may be at work
                client.generate([7, 8, 9], adapter=name, max_tokens=40, ignore_eos=True, timeout_s=20.0).result()

        def delete() -> None:
            moment.pause(moment.draw.uniform(0.0, 0.3))
            _delete(moment, client, name)

        try:
            client.adapters.register(name, directory, timeout_s=20.0)
        except MotetError:
            _delete(moment, client, name)  # its answer alone may be lost
            return []
        _, hung = together([delete, *[ask] * 4], HUNG_AFTER_S)
        try:
            client.generate([7, 8, 9], adapter=name, max_tokens=1, timeout_s=20.0).result()
        except MotetError:
            return hung
    return [*hung, f"adapter {name} answers after its deletion ended"]


def _delete(moment: Moment, client: Client, name: str) -> None:
    """Delete an adapter, however often that takes; nothing where it is not there."""
    for _ in range(60):
        try:
            client.adapters.delete(name, timeout_s=30.0)
            return
        except NotFound:
            return
        except MotetError:
            moment.pause(0.5)


def _upload_cancelled(moment: Moment) -> list[str]:
    """After its last chunk, before the client says that it was the last: nothing may be registered."""
    rig, found = moment.rig, []
    version = rig.adapters.make("cancelled")
    files = {path.name: path.read_bytes() for path in sorted(version.glob("adapter_*"))}
    with grpc.insecure_channel(rig.system.address) as channel:
        for attempt in range(5):
            name, is_held = f"cancelled-{moment.number}-{attempt}", threading.Event()
            all_sent = threading.Event()

            def messages(name: str, is_held: threading.Event, sent: threading.Event) -> Iterator[bytes]:
                for message in upload(files, name):
                    yield message.SerializeToString()
                sent.set()
                is_held.wait(20.0)

            raw: Any = channel  # the stubs demand serializers; these messages are bytes
            call = raw.stream_unary(UPLOAD).future(messages(name, is_held, all_sent), timeout=20.0)
            all_sent.wait(10.0)
            moment.pause(moment.draw.uniform(0.0, 0.1))
            call.cancel()
            is_held.set()
            moment.pause(0.3)
            if name in rig.registered():
                found.append("an upload that was cancelled before its end is registered")
                _delete(moment, rig.admin, name)
    return found


# ---- clients and the network ----


def _client_killed(moment: Moment) -> list[str]:
    """A process with streams under way dies."""
    with moment.rig.hold("client"):
        process = moment.rig.start_client_process(moment.draw.randrange(1 << 30))
        try:
            assert process.stdout is not None
            process.stdout.readline()  # its streams have begun
            moment.pause(moment.draw.uniform(0.0, 0.7))
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return []


def _slow_readers(moment: Moment) -> list[str]:
    """Streams that nobody reads for a while, though not for so long that the server ends them."""
    with _unread_streams(moment, 12) as streams:
        moment.pause(moment.draw.uniform(0.5, 3.0))
        return _read_all(moment, streams)


Stream = tuple[Job, Any]  # a request for one answer and its call


@contextlib.contextmanager
def _unread_streams(moment: Moment, count: int) -> Iterator[list[Stream]]:
    """Calls that take no more than a kilobyte before somebody reads them."""
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(moment.rig.system.address, options=options) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        streams = []
        for _ in range(count):
            job = moment.rig.truth.draw(moment.draw)
            request = generation_pb2.GenerateRequest(
                adapter=job.adapter,
                token_ids=types_pb2.TokenIds(ids=job.prompt),
                sampling=types_pb2.SamplingParams(temperature=job.temperature, seed=job.seed, logprobs=5),
                stopping=types_pb2.StoppingParams(max_tokens=job.num_tokens, ignore_eos=True),
            )
            streams.append((job, stub.Generate(request, timeout=40.0)))
        yield streams


def _read_all(moment: Moment, streams: list[Stream]) -> list[str]:
    """What is wrong with the streams, which are read now: other tokens, or the blame for reading slowly."""

    def read(stream: Stream) -> list[str]:
        job, call = stream
        tokens: list[int] = []
        digest = ""
        try:
            for response in call:
                if response.WhichOneof("event") == "started":
                    digest = response.started.adapter_digest
                tokens += response.delta.token_ids
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return [f"a stream that is read ended with {error.details()}"]
            # Cut by another fault; a raw call is not continued.
        due = list(moment.rig.truth.tokens(job, digest, 0)) if tokens else []
        return [f"a slow reader got {tokens} where {due} are due"] if tokens != due[: len(tokens)] else []

    results, hung = together([functools.partial(read, stream) for stream in streams], HUNG_AFTER_S)
    return [problem for found in results for problem in found] + hung


def _many_cancels(moment: Moment) -> list[str]:
    """Streams that are closed at any moment, most of them before a token."""
    with _client(moment) as client:

        def ask(draw: random.Random) -> None:
            for _ in range(20):
                job = moment.rig.truth.draw(draw)
                with contextlib.suppress(MotetError):
                    stream = client.generate(list(job.prompt), timeout_s=20.0, **options_of(job))  # type: ignore[arg-type]
                    moment.pause(draw.choice((0.0, 0.001, 0.02, 0.1)))
                    stream.close()

        draws = [random.Random(moment.draw.randrange(1 << 30)) for _ in range(8)]
        _, hung = together([functools.partial(ask, draw) for draw in draws], HUNG_AFTER_S)
    return hung


def _many_connects(moment: Moment) -> list[str]:
    """Connections that say nothing, say nonsense, or ask once and go."""
    host, _, port = moment.rig.system.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    nonsense = (b"", b"GET / HTTP/1.1\r\n\r\n", moment.draw.randbytes(200), preface + b"\xff" * 60)
    for index in range(60):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2.0) as connection:
            connection.sendall(nonsense[index % len(nonsense)])
    for _ in range(20):
        with _client(moment) as client, contextlib.suppress(MotetError):
            client.status()
    return []


def _idle_streams(moment: Moment) -> list[str]:
    """Many requests at once whose streams are not read until they are closed."""
    with _client(moment) as client:
        streams = []
        for _ in range(60):
            job = moment.rig.truth.draw(moment.draw)
            streams.append(client.generate(list(job.prompt), timeout_s=20.0, **options_of(job)))  # type: ignore[arg-type]
        moment.pause(1.0)
        for stream in streams:
            stream.close()
    return []


def _connections_cut(moment: Moment) -> list[str]:
    """Those that go through the proxy, at any moment of their streams."""
    for _ in range(moment.draw.randrange(3, 12)):
        moment.rig.proxy.cut()
        moment.pause(moment.draw.uniform(0.02, 0.4))
    return []


def _worker_cut_off(moment: Moment) -> list[str]:
    """The connection of one worker breaks, a few times."""
    with moment.rig.hold("network of workers"):
        for _ in range(moment.draw.choice((1, 1, 3))):
            moment.rig.worker_proxy.cut()
            moment.pause(moment.draw.uniform(0.1, 0.8))
    return []


def _worker_unheard(moment: Moment) -> list[str]:
    """Nothing passes between one worker and the control plane, for less or more time than counts as dead."""
    with moment.rig.hold("network of workers"):
        moment.rig.worker_proxy.freeze()
        try:
            moment.pause(moment.draw.choice((0.5, 1.5, 3.0)))
        finally:
            moment.rig.worker_proxy.thaw()
    return []


def _large_texts(moment: Moment) -> list[str]:
    """Texts of a megabyte, which are refused."""
    text = "word " * 200_000
    with _client(moment) as client:
        for _ in range(moment.draw.choice((1, 4))):
            with contextlib.suppress(MotetError):
                client.generate(text, max_tokens=1, timeout_s=20.0).result()
    return []


@contextlib.contextmanager
def _client(moment: Moment, retry: RetryPolicy | None = None) -> Iterator[Client]:
    with Client(moment.rig.system.address, retry=retry or RetryPolicy(max_attempts=3)) as client:
        yield client


FAULTS: list[Fault] = [
    Fault("worker killed", _worker_killed, weight=3.0, has_room=True),
    Fault("all workers killed", _workers_killed, weight=1.5),
    Fault("worker stopped", _worker_stopped, weight=2.0),
    Fault("worker terminated", _worker_terminated, weight=1.5),
    Fault("control plane killed", _control_plane_killed, weight=3.0),
    Fault("control plane killed and away", _control_plane_killed_and_away, weight=1.0, is_slow=True),
    Fault("control plane terminated", _control_plane_terminated, weight=2.0),
    Fault("control plane stopped", _control_plane_stopped, weight=1.5),
    Fault("control plane stopped for long", _control_plane_stopped_long, weight=0.7, is_slow=True),
    Fault("worker and control plane killed", _worker_and_control_plane_killed, weight=1.0),
    Fault("redis killed", _redis_killed, weight=1.0),
    Fault("redis stopped", _redis_stopped, weight=1.0),
    Fault("redis emptied", _redis_emptied, weight=2.0, needs_own_redis=True),
    Fault("redis corrupted", _redis_corrupted, weight=3.0, needs_own_redis=True),
    Fault("redis slow", _redis_slow, weight=1.0, needs_own_redis=True),
    Fault("store away", _store_away, weight=1.0),
    Fault("adapter turned", _adapter_turned, weight=1.5),
    Fault("adapter deleted", _adapter_deleted, weight=1.0),
    Fault("upload cancelled", _upload_cancelled, weight=1.0),
    Fault("client killed", _client_killed, weight=1.0),
    Fault("slow readers", _slow_readers, weight=1.0),
    Fault("many cancels", _many_cancels, weight=1.0),
    Fault("many connects", _many_connects, weight=1.0),
    Fault("idle streams", _idle_streams, weight=1.0),
    Fault("connections cut", _connections_cut, weight=2.0),
    Fault("worker cut off", _worker_cut_off, weight=1.5),
    Fault("worker unheard", _worker_unheard, weight=1.5),
    Fault("large texts", _large_texts, weight=1.0),
]

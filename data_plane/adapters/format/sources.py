"""Where packed adapters come from: the host cache first, the control plane when that fails. No torch here.

Every source verifies each chunk before returning it. The bytes are not checked again. Called from loader
threads; all calls block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from contract.cache_keys import chunk_keys, manifest_key
from contract.redis_access import RedisAccess, reason_of
from contract.v1 import plan_pb2, plan_pb2_grpc
from data_plane.adapters.format.local_files import read_files
from data_plane.adapters.format.manifest import Manifest, read_manifest, verify_chunk
from data_plane.errors import AdapterCorrupt, AdapterLost, AdapterUnavailable
from data_plane.plan import AdapterSource, ChunkBytes

logger = logging.getLogger(__name__)

# A part takes milliseconds on a healthy network. After these times the control plane is used instead.
CONNECT_TIMEOUT_S = 0.5
READ_TIMEOUT_S = 2.0
# Pause before Redis is tried again after an error; it doubles with each further error.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
# The control plane has no such adapter, or its store holds wrong bytes.
_PERMANENT = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS)
FETCH_TIMEOUT_S = 120.0  # one whole adapter through the control plane, from the artifact store if need be


class HostCacheSource:
    """Reads the host cache with a read-only user. Raises ImportError where redis-py is not installed.

    After an error of Redis itself it does not read for a while, so that loads do not wait for one timeout after the
    other. The first read after the pause has a short time limit. One source serves all loaders.
    """

    def __init__(
        self,
        access: RedisAccess,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        def connect(timeout_s: float) -> redis.Redis:
            client: redis.Redis = redis.Redis.from_url(
                **access.options(),
                socket_connect_timeout=connect_timeout_s,
                socket_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
            return client

        self._redis_error = redis.RedisError
        self._response_error = redis.ResponseError
        self._reason = ""  # why the last read failed
        self._clock = clock  # monotonic, seconds
        self._quiet_until_s = float("-inf")  # Redis is not read before
        self._pause_s = FIRST_PAUSE_S
        # One client for the manifest, which is small and read first, one for the chunks. None: the url cannot be used.
        self._clients: tuple[redis.Redis, redis.Redis] | None = None
        try:
            self._clients = connect(min(connect_timeout_s, read_timeout_s)), connect(read_timeout_s)
        except (ValueError, TypeError) as error:  # its text may hold a password: not logged
            logger.warning("host cache url cannot be read: adapters come through the control plane (%s)", type(error))

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        """See AdapterSource."""
        data = self._get(manifest_key(digest), digest, is_first=True)
        return data, self._chunks(read_manifest(data, digest))

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients or ():
            client.close()

    def _chunks(self, manifest: Manifest) -> Iterator[bytes]:
        for index, chunk in enumerate(manifest.chunks):
            keys = chunk_keys(manifest.digest, index, chunk.size_bytes)
            data = b"".join(self._get(key, manifest.digest) for key in keys)
            verify_chunk(chunk, data, manifest.digest)
            yield data

    def _get(self, key: str, digest: str, *, is_first: bool = False) -> bytes:
        if self._clients is None:
            raise AdapterUnavailable(f"adapter {digest}: the host cache has no usable url")
        if self._clock() < self._quiet_until_s:
            raise AdapterUnavailable(f"adapter {digest}: the host cache failed a moment ago and is paused")
        try:
            value = self._clients[0 if is_first else 1].get(key)
        except (self._redis_error, OSError) as error:
            if isinstance(error, self._response_error) and str(error).startswith("WRONGTYPE"):
                # Somebody else made this key. Redis itself is well, and other adapters are read from it.
                raise AdapterUnavailable(f"adapter {digest}: the host cache has another {key}") from error
            self._quiet_until_s = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            raise AdapterUnavailable(f"adapter {digest}: host cache: {self._note_error(error)}") from error
        self._pause_s = FIRST_PAUSE_S
        if self._reason:
            self._reason = ""
            logger.info("host cache responds")
        if not isinstance(value, bytes):
            raise AdapterUnavailable(f"adapter {digest}: the host cache has no {key}")
        return value

    def _note_error(self, error: Exception) -> str:
        """What is wrong. Logged once for each change: reads are tried again every few seconds."""
        reason = reason_of(error)
        if reason != self._reason:
            self._reason = reason
            logger.warning("host cache cannot be read: adapters come through the control plane reason=%s", reason)
        return reason


class ControlPlaneSource:
    """Reads from the control plane, which reads the artifact store and refills the host cache.

    What was pushed a moment ago to a control plane on this machine is read from its files.
    """

    def __init__(
        self,
        stub: plan_pb2_grpc.WorkerServiceStub,
        worker_id: str,
        *,
        reads_files: bool = False,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        """`reads_files`: whether the control plane is on this machine, and may name files of it."""
        self._stub = stub
        self._worker_id = worker_id
        self._reads_files = reads_files
        self._timeout_s = timeout_s

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        """See AdapterSource."""
        data, pieces = self._begin(digest, reads_files=self._reads_files)
        return data, self._chunks(read_manifest(data, digest), pieces)

    def _begin(self, digest: str, *, reads_files: bool) -> tuple[bytes, _Pieces]:
        """The manifest, and the messages after it."""
        request = plan_pb2.FetchAdapterRequest(digest=digest, worker_id=self._worker_id, reads_files=reads_files)
        try:
            pieces = _Pieces(self._stub.FetchAdapter(request, timeout=self._timeout_s), digest)
        except ValueError as error:  # gRPC raises it for a closed channel
            raise AdapterUnavailable(f"adapter {digest}: the session with the control plane is over") from error
        first = next(pieces, None)
        if first is None or first.WhichOneof("part") != "manifest":
            pieces.close()
            raise AdapterUnavailable(f"adapter {digest}: the control plane sent no manifest")
        return first.manifest, pieces

    def _chunks(self, manifest: Manifest, pieces: _Pieces) -> Iterator[bytes]:
        num_read = 0
        try:
            piece = next(pieces, None)
            if piece is None or piece.WhichOneof("part") != "files" or not self._reads_files:
                yield from _sent_chunks(manifest, piece, pieces)
                return
            try:
                for data in read_files(manifest, piece.files.paths):
                    num_read += 1
                    yield data
                return
            except (AdapterUnavailable, AdapterCorrupt) as error:
                logger.info("adapter is sent instead digest=%s chunk=%d reason=%s", manifest.digest, num_read, error)
        finally:
            pieces.close()
        _, pieces = self._begin(manifest.digest, reads_files=False)
        try:
            for index, data in enumerate(_sent_chunks(manifest, next(pieces, None), pieces)):
                if index >= num_read:
                    yield data
        finally:
            pieces.close()


def _sent_chunks(manifest: Manifest, piece: plan_pb2.FetchAdapterResponse | None, pieces: _Pieces) -> Iterator[bytes]:
    """The chunks of messages that begin with `piece`."""
    for chunk in manifest.chunks:
        parts, num_bytes = list[bytes](), 0
        while num_bytes < chunk.size_bytes:
            if piece is None or not piece.data:
                raise AdapterUnavailable(
                    f"adapter {manifest.digest}: the control plane ended within chunk {chunk.name}"
                )
            parts.append(piece.data)
            num_bytes += len(piece.data)
            piece = next(pieces, None)
        whole = b"".join(parts)
        verify_chunk(chunk, whole, manifest.digest)
        yield whole


class _Pieces:
    """The messages of one FetchAdapter call; a broken call is AdapterUnavailable."""

    def __init__(self, call: Any, digest: str) -> None:
        self._call = call  # iterator of FetchAdapterResponse and grpc.Call at once; grpc has no type for that
        self._digest = digest

    def __iter__(self) -> _Pieces:
        return self

    def __next__(self) -> plan_pb2.FetchAdapterResponse:
        try:
            piece: plan_pb2.FetchAdapterResponse = next(self._call)
            return piece
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code in _PERMANENT:
                raise AdapterLost(f"adapter {self._digest}: FetchAdapter ended with {code}") from error
            raise AdapterUnavailable(f"adapter {self._digest}: FetchAdapter ended with {code}") from error

    def close(self) -> None:
        self._call.cancel()


class FallbackSource:
    """Reads `first`; if it fails at a chunk, reads the rest from `then`, which has the same bytes."""

    def __init__(self, first: AdapterSource, then: AdapterSource) -> None:
        self._first = first
        self._then = then

    def open(self, digest: str) -> tuple[bytes, Iterator[ChunkBytes]]:
        """See AdapterSource."""
        try:
            manifest, chunks = self._first.open(digest)
        except (AdapterUnavailable, AdapterCorrupt) as error:
            logger.info("adapter comes from the second source digest=%s reason=%s", digest, error)
            return self._then.open(digest)
        return manifest, self._chunks(digest, chunks)

    def _chunks(self, digest: str, chunks: Iterator[ChunkBytes]) -> Iterator[ChunkBytes]:
        num_read = 0
        try:
            for data in chunks:
                num_read += 1
                yield data
        except (AdapterUnavailable, AdapterCorrupt) as error:
            logger.info("adapter goes on from the second source digest=%s chunk=%d reason=%s", digest, num_read, error)
            _, rest = self._then.open(digest)
            for index, data in enumerate(rest):
                if index >= num_read:
                    yield data

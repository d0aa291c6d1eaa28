"""How a channel to the server is set up (keepalive, reconnecting, message caps), and when another one is needed.

With TLS from files, each attempt of a call looks at the files. If they have changed, the attempt and those after it use
a new channel; calls under way keep theirs, which is closed when the last of them has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from motet.errors import InvalidArgument, invalid_field
from motet.tls import PathLike, TlsError, TlsFiles, tls_files

logger = logging.getLogger(__name__)

C = TypeVar("C")  # grpc.Channel or grpc.aio.Channel

KEEPALIVE_TIME_MS = 30_000  # the server must allow pings this often (grpc.http2.min_ping_interval_without_data_ms)
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_SEND_BYTES = 8 * 1024 * 1024
MAX_RECEIVE_BYTES = 32 * 1024 * 1024  # a page of 1000 adapters with all their labels

_OPTIONS: dict[str, Any] = {
    # gRPC's retries can leave a blocking call waiting for ever, past its deadline and deaf to cancel(): measured with
    # grpcio 1.85, 3 of 3 streams whose server was killed before the first message. `retries.py` does it instead.
    "grpc.enable_retries": 0,
    "grpc.keepalive_time_ms": KEEPALIVE_TIME_MS,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.initial_reconnect_backoff_ms": 250,
    "grpc.max_reconnect_backoff_ms": 1_000,  # a server that is back is found within this
    "grpc.min_reconnect_backoff_ms": 10_000,  # how long one attempt to connect may take
    "grpc.max_send_message_length": MAX_SEND_BYTES,
    "grpc.max_receive_message_length": MAX_RECEIVE_BYTES,
}


def channel_options(extra: Iterable[tuple[str, Any]] = ()) -> list[tuple[str, Any]]:
    """Options of a channel, for grpc and grpc.aio alike. Those of `extra` replace ours of the same name."""
    return list({**_OPTIONS, **dict(extra)}.items())


def opener(
    module: Any, target: str, options: Iterable[tuple[str, Any]]
) -> Callable[[grpc.ChannelCredentials | None], Any]:
    """Makes channels of `module`, which is grpc or grpc.aio; without TLS if there are no credentials."""
    settings = channel_options(options)

    def open_channel(credentials: grpc.ChannelCredentials | None) -> Any:
        if credentials is None:
            return module.insecure_channel(target, options=settings)
        return module.secure_channel(target, credentials, options=settings)

    return open_channel


@dataclass(frozen=True, slots=True)
class Security:
    """How a client secures its connection: with TLS files, with credentials that the user made, or not at all."""

    files: TlsFiles | None = None
    made: grpc.ChannelCredentials | None = None

    @property
    def has_tls(self) -> bool:
        return self.files is not None or self.made is not None

    @property
    def has_certificate(self) -> bool:
        """Whether the client has a certificate of its own; assumed where the user made the credentials."""
        return self.made is not None or (self.files is not None and self.files.cert is not None)

    def arguments(self) -> dict[str, Any]:
        """What makes another client with the same security."""
        if self.files is None:
            return {"credentials": self.made}
        return {"tls_ca": self.files.ca, "tls_cert": self.files.cert, "tls_key": self.files.key}

    def credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials for a channel that is made now. Raises TlsError."""
        return self.made if self.files is None else self.files.credentials()


def security_of(
    credentials: grpc.ChannelCredentials | None,
    tls_ca: PathLike | None,
    tls_cert: PathLike | None,
    tls_key: PathLike | None,
) -> Security:
    """What a client's arguments ask for. Raises InvalidArgument."""
    try:
        files = tls_files(tls_ca, tls_cert, tls_key)
        if files is not None:
            files.credentials()
    except TlsError as error:
        raise _invalid(error) from error
    if files is not None and credentials is not None:
        raise invalid_field("credentials", "is given beside tls_ca; give one of them")
    return Security(files, credentials)


class Channels(Generic[C]):
    """The channel of one client at present, and those before it that calls still use. Thread-safe."""

    def __init__(
        self,
        security: Security,
        open_channel: Callable[[grpc.ChannelCredentials | None], C],
        close_channel: Callable[[C], None],
    ) -> None:
        self._files = security.files
        self._open_channel = open_channel
        self._close_channel = close_channel
        self._lock = threading.Lock()
        self._stamp = None if self._files is None else self._files.stamp()
        self._current = open_channel(security.credentials())
        self._num_calls: dict[int, int] = {}  # by id of the channel; without files nobody counts
        self._replaced: dict[int, C] = {}  # by id; closed once no call uses them

    @property
    def may_change(self) -> bool:
        """Whether calls have to release their channel when they end."""
        return self._files is not None

    def acquire(self) -> C:
        """The channel for one call."""
        if self._files is None:
            return self._current
        with self._lock:
            self._renew()
            key = id(self._current)
            self._num_calls[key] = self._num_calls.get(key, 0) + 1
            current = self._current
            unused = [self._replaced.pop(key) for key in self._replaced.keys() - self._num_calls.keys()]
        for channel in unused:  # here and not in `release`, which a thread of gRPC calls that must not wait
            self._close_channel(channel)
        return current

    def release(self, channel: C) -> None:
        """A call of this channel has ended."""
        if self._files is None:
            return
        with self._lock:
            key = id(channel)
            self._num_calls[key] -= 1
            if not self._num_calls[key]:
                del self._num_calls[key]

    def all(self) -> list[C]:
        """Every channel that is open."""
        with self._lock:
            return [self._current, *self._replaced.values()]

    def _renew(self) -> None:
        assert self._files is not None, "only files change"
        stamp = self._files.stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            credentials = self._files.credentials()
        except TlsError as error:  # half-written perhaps: read again when they change again
            logger.warning("files of TLS not used, the connection stays as it is error=%s", error)
            return
        logger.info("files of TLS read again")
        self._replaced[id(self._current)] = self._current
        self._current = self._open_channel(credentials)


def _invalid(error: TlsError) -> InvalidArgument:
    name, _, description = str(error).partition(": ")
    return invalid_field(name, description)

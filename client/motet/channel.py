"""How a channel to the server is set up: keepalive, reconnecting, message caps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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

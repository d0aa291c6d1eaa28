"""How a channel to the server is set up: retries before the first token, keepalive, message caps.

Also holds RetryPolicy, which the SDK's own continuation of broken streams follows too.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

KEEPALIVE_TIME_MS = 30_000  # the server must allow pings this often (grpc.http2.min_ping_interval_without_data_ms)
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_SEND_BYTES = 8 * 1024 * 1024
MAX_RECEIVE_BYTES = 32 * 1024 * 1024  # a page of 1000 adapters with all their labels
_MAX_GRPC_ATTEMPTS = 5  # gRPC's own upper limit
_MIN_BACKOFF_S = 0.01  # measured with grpcio 1.85: at 1 ms, calls of grpc.aio can hang in the retry; at 4 ms none did

# Calls that may be sent twice: reads, and writes whose repetition changes nothing. Uploads and deletes are not here.
_REPEATABLE = {
    "motet.v1.GenerationService": ["Generate"],
    "motet.v1.AdapterService": ["GetAdapter", "ListAdapters", "ListAdapterVersions", "PinAdapter", "UnpinAdapter"],
    "motet.v1.StatusService": ["GetStatus"],
    "google.longrunning.Operations": ["GetOperation"],
}


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how patiently UNAVAILABLE is tried again.

    gRPC itself follows it before the first answer of a call; afterwards the SDK does, to continue a broken stream.
    """

    max_attempts: int = 5  # attempts without a new token before the error is raised; 1: never try again
    initial_backoff_s: float = 0.3
    max_backoff_s: float = 5.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if not _MIN_BACKOFF_S <= self.initial_backoff_s <= self.max_backoff_s or self.multiplier < 1:
            raise ValueError(
                f"need {_MIN_BACKOFF_S} <= initial_backoff_s <= max_backoff_s and multiplier >= 1, got {self}"
            )

    def backoff_s(self, attempt: int, generator: random.Random) -> float:
        """Time to wait before attempt `attempt` (from 1), with full jitter above half of it."""
        longest = min(self.initial_backoff_s * self.multiplier ** (attempt - 1), self.max_backoff_s)
        return longest * (0.5 + 0.5 * generator.random())


def channel_options(retry: RetryPolicy, extra: tuple[tuple[str, Any], ...] = ()) -> list[tuple[str, Any]]:
    """Options of a channel, for grpc and grpc.aio alike. `extra` comes last and wins."""
    return [
        ("grpc.service_config", service_config(retry)),
        ("grpc.enable_retries", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 250),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        *extra,
    ]


def service_config(retry: RetryPolicy) -> str:
    """The gRPC service config that retries UNAVAILABLE (a refused stream included) before the first answer."""
    names = [{"service": service, "method": method} for service, methods in _REPEATABLE.items() for method in methods]
    method_config: dict[str, Any] = {"name": names}
    if retry.max_attempts > 1:
        method_config["retryPolicy"] = {
            "maxAttempts": min(retry.max_attempts, _MAX_GRPC_ATTEMPTS),
            "initialBackoff": f"{retry.initial_backoff_s:.3f}s",
            "maxBackoff": f"{retry.max_backoff_s:.3f}s",
            "backoffMultiplier": retry.multiplier,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
    return json.dumps({"methodConfig": [method_config]})

"""What a fault may use, and how it calls the system."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from motet import Client, RetryPolicy

from tests.hostile.faults.rig import Rig

CONTROL_PLANE, REDIS, STORE = "control plane", "redis", "store"
HUNG_AFTER_S = 90.0  # calls of a fault's own, each with a deadline far below


@dataclass(frozen=True)
class Moment:
    """What a fault may use: the rig, chance, and a way to wait that ends when the run is broken off."""

    rig: Rig
    draw: random.Random
    pause: Callable[[float], None]
    number: int  # of the round: for names that occur once


@contextlib.contextmanager
def calls_of(moment: Moment, retry: RetryPolicy | None = None) -> Iterator[Client]:
    with Client(moment.rig.system.address, retry=retry or RetryPolicy(max_attempts=3)) as client:
        yield client

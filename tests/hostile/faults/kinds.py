"""What can go wrong: every fault as a function that breaks something, waits, and mends it again.

A fault holds the processes that it handles, says on its return what it found to be wrong (nothing, in a correct
system), and leaves the rig as it was, so that faults can overlap. Times are drawn by the round's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.hostile.faults.client_faults import (
    client_killed,
    connections_cut,
    idle_streams,
    large_texts,
    many_cancels,
    many_connects,
    slow_readers,
    upload_cancelled,
    worker_cut_off,
    worker_unheard,
)
from tests.hostile.faults.moment import Moment
from tests.hostile.faults.process_faults import (
    control_plane_killed,
    control_plane_killed_and_away,
    control_plane_stopped,
    control_plane_stopped_long,
    control_plane_terminated,
    worker_and_control_plane_killed,
    worker_killed,
    worker_stopped,
    worker_terminated,
    workers_killed,
)
from tests.hostile.faults.storage_faults import (
    adapter_deleted,
    adapter_turned,
    redis_corrupted,
    redis_emptied,
    redis_killed,
    redis_slow,
    redis_stopped,
    store_away,
)


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    happen: Callable[[Moment], list[str]]
    weight: float = 1.0
    needs_own_redis: bool = False
    is_slow: bool = False  # takes longer than a short round
    has_room: bool = False  # whether another worker has room meanwhile


FAULTS: list[Fault] = [
    Fault("worker killed", worker_killed, weight=3.0, has_room=True),
    Fault("all workers killed", workers_killed, weight=1.5),
    Fault("worker stopped", worker_stopped, weight=2.0),
    Fault("worker terminated", worker_terminated, weight=1.5),
    Fault("control plane killed", control_plane_killed, weight=3.0),
    Fault("control plane killed and away", control_plane_killed_and_away, weight=1.0, is_slow=True),
    Fault("control plane terminated", control_plane_terminated, weight=2.0),
    Fault("control plane stopped", control_plane_stopped, weight=1.5),
    Fault("control plane stopped for long", control_plane_stopped_long, weight=0.7, is_slow=True),
    Fault("worker and control plane killed", worker_and_control_plane_killed, weight=1.0),
    Fault("redis killed", redis_killed, weight=1.0),
    Fault("redis stopped", redis_stopped, weight=1.0),
    Fault("redis emptied", redis_emptied, weight=2.0, needs_own_redis=True),
    Fault("redis corrupted", redis_corrupted, weight=3.0, needs_own_redis=True),
    Fault("redis slow", redis_slow, weight=1.0, needs_own_redis=True),
    Fault("store away", store_away, weight=1.0),
    Fault("adapter turned", adapter_turned, weight=1.5),
    Fault("adapter deleted", adapter_deleted, weight=1.0),
    Fault("upload cancelled", upload_cancelled, weight=1.0),
    Fault("client killed", client_killed, weight=1.0),
    Fault("slow readers", slow_readers, weight=1.0),
    Fault("many cancels", many_cancels, weight=1.0),
    Fault("many connects", many_connects, weight=1.0),
    Fault("idle streams", idle_streams, weight=1.0),
    Fault("connections cut", connections_cut, weight=2.0),
    Fault("worker cut off", worker_cut_off, weight=1.5),
    Fault("worker unheard", worker_unheard, weight=1.5),
    Fault("large texts", large_texts, weight=1.0),
]

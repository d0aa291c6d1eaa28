"""Workers and control planes that are killed, stopped and terminated."""

from __future__ import annotations

import signal
import threading

from motet import MotetError, RetryPolicy

from tests.hostile.faults.client_faults import _read_all, _unread_streams
from tests.hostile.faults.moment import CONTROL_PLANE, HUNG_AFTER_S, REDIS, Moment, calls_of
from tests.hostile.faults.rig import SLOW_READER_TIMEOUT_S
from tests.hostile.faults.together import together


def worker_killed(moment: Moment) -> list[str]:
    rig, worker_id = moment.rig, moment.draw.choice(moment.rig.worker_ids)
    with rig.hold(worker_id):
        rig.worker(worker_id).kill()
        moment.pause(moment.draw.uniform(0.0, 1.5))
        rig.start_worker(worker_id)
    return []


def workers_killed(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(*rig.worker_ids):
        for worker_id in rig.worker_ids:
            rig.worker(worker_id).kill()
        moment.pause(moment.draw.uniform(0.0, 1.0))
        for worker_id in rig.worker_ids:
            rig.start_worker(worker_id)
    return []


def worker_stopped(moment: Moment) -> list[str]:
    """By SIGSTOP: shorter and longer than the time after which it counts as dead."""
    rig, worker_id = moment.rig, moment.draw.choice(moment.rig.worker_ids)
    with rig.hold(worker_id):
        rig.worker(worker_id).send(signal.SIGSTOP)
        moment.pause(moment.draw.choice((0.3, 1.0, 2.5, 3.5)))
        rig.worker(worker_id).send(signal.SIGCONT)
    return []


def worker_terminated(moment: Moment) -> list[str]:
    rig, worker_id = moment.rig, moment.draw.choice(moment.rig.worker_ids)
    with rig.hold(worker_id):
        status = rig.status()
        is_attached = status is not None and worker_id in {worker.worker_id for worker in status.workers}
        code = rig.worker(worker_id).stop(20.0)
        rig.start_worker(worker_id)
    # One that another fault has just started may not handle signals yet.
    return [f"worker {worker_id} ended with status {code} after SIGTERM"] if code != 0 and is_attached else []


def control_plane_killed(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(CONTROL_PLANE, REDIS):
        rig.system.control_plane.kill()
        rig.system.start_control_plane()
    return []


def control_plane_killed_and_away(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(CONTROL_PLANE, REDIS):
        rig.system.control_plane.kill()
        moment.pause(moment.draw.uniform(1.0, 8.0))
        rig.system.start_control_plane()
    return []


def control_plane_terminated(moment: Moment) -> list[str]:
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
                found.append(f"a request during the shutdown ended with {type(error).__name__}: {str(error)[:200]}")

    def terminate() -> None:
        try:
            codes.append(rig.system.control_plane.stop(40.0))
            rig.system.start_control_plane()
        finally:
            is_back.set()

    with rig.hold(CONTROL_PLANE, REDIS), calls_of(moment, RetryPolicy()) as client:
        _, hung = together([terminate, *[ask] * 12], HUNG_AFTER_S + 40.0)
    return found + hung + [f"the control plane ended with status {code} after SIGTERM" for code in codes if code != 0]


def control_plane_stopped(moment: Moment) -> list[str]:
    return _stop_control_plane(moment, moment.draw.choice((0.3, 1.0, 2.5, 3.5)))


def control_plane_stopped_long(moment: Moment) -> list[str]:
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


def worker_and_control_plane_killed(moment: Moment) -> list[str]:
    rig, worker_id = moment.rig, moment.draw.choice(moment.rig.worker_ids)
    with rig.hold(CONTROL_PLANE, REDIS, worker_id):
        rig.worker(worker_id).kill()
        rig.system.control_plane.kill()
        rig.system.start_control_plane()
        rig.start_worker(worker_id)
    return []

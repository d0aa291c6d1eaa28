"""Threads whose tasks take long get the lowest priority, and others take their place."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from data_plane.constraints.lanes import NEW_MOST_S, NEW_NICENESS, NEW_SHARE, SLOW_NICENESS, SLOW_S, Lanes
from data_plane.constraints.matchers import following_threads
from data_plane.constraints.priorities import cpu_s, new_threads

LONG_S = 60.0
MUCH_LATER_S = 100 * NEW_MOST_S / NEW_SHARE  # new grammars have all of their share again
RUNS: dict[str, Callable[[Lanes], Callable[[Callable[[], None]], None]]] = {
    "quick": lambda lanes: lanes.run_quick,
    "new": lambda lanes: lanes.run_new,
    "slow": lambda lanes: lanes.run_slow,
}


class TimedLanes(Lanes):
    """Lanes whose clock stands still until the test moves it."""

    def __init__(self) -> None:
        self.time_s = 0.0
        super().__init__(1)

    def now_s(self) -> float:
        return self.time_s


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def above(more: int) -> int:
    """The niceness that is so far above that of this process."""
    return min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + more, 19)


def result_of(run: Callable[[Callable[[], None]], None], task: Callable[[], object]) -> object:
    found: list[object] = []
    done = threading.Event()

    def keep() -> None:
        found.append(task())
        done.set()

    run(keep)
    assert done.wait(LONG_S)
    return found[0]


def compute_until(condition: Callable[[], bool]) -> None:
    """Take CPU time without Python's lock, as a grammar does."""
    x, end_s = torch.zeros(1000), time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        x.sin_()


@pytest.mark.parametrize(("lane", "more"), [("quick", 0), ("new", NEW_NICENESS), ("slow", SLOW_NICENESS)])
def test_each_lane_has_its_priority(lane: str, more: int) -> None:
    lanes = Lanes(1)
    assert result_of(RUNS[lane](lanes), niceness) == above(more)


@pytest.mark.parametrize("lane", ["quick", "new"])
def test_a_task_that_takes_long_gets_the_lowest_priority_and_another_thread_takes_its_place(lane: str) -> None:
    """The thread that follows its tokens, too. The task behind it runs while it goes on."""
    lanes, behind, done = TimedLanes(), threading.Event(), threading.Event()
    run, found = RUNS[lane](lanes), list[int]()

    def take_long() -> None:
        helpers = following_threads()
        lanes.begin(helpers)
        compute_until(behind.is_set)
        found.append(lanes.has_low_priority())
        found.extend(os.getpriority(os.PRIO_PROCESS, each) for each in [threading.get_native_id(), *helpers])
        done.set()

    run(take_long)
    run(behind.set)
    assert done.wait(LONG_S)
    assert found == [True, above(SLOW_NICENESS), above(SLOW_NICENESS)]
    lanes.time_s = MUCH_LATER_S  # on a busy machine it may take all of the share before its thread is demoted
    assert result_of(run, niceness) == above(NEW_NICENESS if lane == "new" else 0)


def test_a_task_is_not_judged_by_what_the_one_before_took() -> None:
    lanes = Lanes(1)

    def take_some() -> None:
        lanes.begin([])
        compute_until(lambda: lanes.cpu_s() > SLOW_S / 4)
        lanes.begin([])
        compute_until(lambda: lanes.cpu_s() > SLOW_S / 4)

    result_of(lanes.run_quick, take_some)
    assert result_of(lanes.run_quick, lanes.cpu_s) == 0.0


def test_tasks_that_wait_without_computing_keep_their_thread() -> None:
    """As on a machine whose cores are all busy: the clock goes on, the CPU time does not."""
    lanes, release = Lanes(1), threading.Event()

    def task() -> bool:
        lanes.begin([])
        release.wait(10 * SLOW_S)
        return lanes.has_low_priority()

    assert result_of(lanes.run_quick, task) is False


def test_no_lane_has_more_threads_than_it_may() -> None:
    lanes, count, most, lock, done = Lanes(2), [0], [0], threading.Lock(), threading.Semaphore(0)

    def task() -> None:
        with lock:
            count[0] += 1
            most[0] = max(most[0], count[0])
        lanes.begin([])
        torch.zeros(1000).sin_()
        with lock:
            count[0] -= 1
        done.release()

    for _ in range(50):
        lanes.run_new(task)
    assert all(done.acquire(timeout=LONG_S) for _ in range(50))
    assert most[0] <= 2


def test_cpu_time_counts_the_threads_that_help() -> None:
    lanes = Lanes(1)

    def task() -> float:
        ended = threading.Event()
        with new_threads() as ids:
            helper = threading.Thread(target=compute_until, args=[ended.is_set])
            helper.start()
        lanes.begin(ids)
        began_s = cpu_s(ids[0])
        while cpu_s(ids[0]) < began_s + 0.02:
            ended.wait(0.005)
        taken_s = lanes.cpu_s()
        ended.set()
        helper.join()
        return taken_s

    taken = result_of(lanes.run_slow, task)
    assert isinstance(taken, float) and taken >= 0.02


def test_the_threads_that_a_thread_starts_are_found_and_no_others() -> None:
    release, other = threading.Event(), threading.Thread(target=lambda: release.wait(LONG_S))
    other.start()
    with new_threads() as ids:
        started = [threading.Thread(target=lambda: release.wait(LONG_S)) for _ in range(2)]
        for thread in started:
            thread.start()
    assert sorted(ids) == sorted(thread.native_id or 0 for thread in started)
    release.set()
    for thread in [other, *started]:
        thread.join()


def test_a_thread_that_is_not_there_has_no_cpu_time() -> None:
    assert cpu_s(1 << 23) == 0.0


def use_up(lanes: Lanes) -> None:
    """Let new grammars take more CPU time than their share is at most."""

    def take_long() -> None:
        lanes.begin([])
        compute_until(lambda: lanes.cpu_s() > NEW_MOST_S)

    for _ in range(100):  # a task is paid for until its thread is demoted
        if result_of(lanes.run_new, niceness) == above(SLOW_NICENESS):
            return
        result_of(lanes.run_new, take_long)
    pytest.fail("new grammars had more than their share")


def test_new_grammars_have_the_lowest_priority_beyond_their_share_of_the_time() -> None:
    lanes = TimedLanes()
    assert result_of(lanes.run_new, niceness) == above(NEW_NICENESS)
    use_up(lanes)
    assert result_of(lanes.run_quick, niceness) == above(0)
    lanes.time_s = MUCH_LATER_S
    assert result_of(lanes.run_new, niceness) == above(NEW_NICENESS)


def test_new_grammars_beyond_their_share_do_not_wait_for_slow_ones() -> None:
    lanes, release, done = TimedLanes(), threading.Event(), threading.Event()
    use_up(lanes)
    lanes.run_slow(lambda: compute_until(release.is_set))
    lanes.run_new(done.set)
    assert done.wait(LONG_S)
    release.set()

"""Rounds: a load with known completions, one to three faults at drawn times, and all checks at its end."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.hostile.faults.kinds import FAULTS, Fault
from tests.hostile.faults.load import Call, Load, problem_of
from tests.hostile.faults.moment import Moment
from tests.hostile.faults.rig import ProcessUse, Rig
from tests.hostile.faults.together import together

WARM_S = 0.6  # of load before the first fault
LATEST_FAULT_S = 0.8  # after that
FAULT_ENDS_S = 200.0  # whatever hangs in it
AFTER_S = 0.6  # of load after the last fault
NUM_FAULTS = (1, 1, 1, 2, 3)
PAUSE = threading.Event()


@dataclass(frozen=True)
class Window:
    """When a fault was at work."""

    name: str
    begin_s: float
    end_s: float

    def overlaps(self, call: Call) -> bool:
        """Whether the call's longest wait began while the fault was at work, or it was waiting when the fault began."""
        wait_end_s = call.gap_begun_s + call.longest_wait_s
        return call.gap_begun_s <= self.end_s and wait_end_s >= self.begin_s


@dataclass
class RoundResult:
    """What one round showed."""

    number: int
    names: tuple[str, ...]  # of the faults
    is_real: bool
    duration_s: float = 0.0
    num_right: int = 0
    num_cancelled: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # class and reason of each
    avoidable: list[str] = field(default_factory=list)  # of those, with their texts
    hung: list[str] = field(default_factory=list)  # a stack each
    waits_s: list[float] = field(default_factory=list)  # longest wait for a token of each call that met a fault
    problems: list[str] = field(default_factory=list)  # found by faults, in logs, at rest
    use: list[ProcessUse] = field(default_factory=list)  # of every process, at rest

    @property
    def kind(self) -> str:
        return " + ".join(self.names) or "none"

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.avoidable or self.hung or self.problems)


def draw_faults(rig: Rig, draw: random.Random, *, slow: bool) -> list[Fault]:
    """One to three different kinds that this rig can have. `slow`: also those that take more than a few seconds."""
    possible = [fault for fault in FAULTS if slow or not fault.is_slow]
    if rig.has_own_redis:  # mostly what only this rig can have
        possible = [fault for fault in possible if fault.needs_own_redis or draw.random() < 0.4]
    else:
        possible = [fault for fault in possible if not fault.needs_own_redis]
    chosen: list[Fault] = []
    for _ in range(draw.choice(NUM_FAULTS)):
        left = [fault for fault in possible if fault not in chosen]
        if left:
            chosen += draw.choices(left, [fault.weight for fault in left])
    return chosen


def run_round(
    rig: Rig,
    number: int,
    seed: str,
    faults: Sequence[Fault],
    *,
    clock: Callable[[], float] = time.monotonic,
    **load_options: object,
) -> RoundResult:
    """One round on a rig that is whole; it is whole again afterwards, or the result says what is left."""
    begun_s = clock()
    result = RoundResult(number, tuple(sorted(fault.name for fault in faults)), rig.is_real)
    rig.new_log_problems()  # what came before is not this round's
    load = Load(rig.addresses, rig.truth, seed=f"{seed}/load", **load_options)  # type: ignore[arg-type]
    load.start()
    PAUSE.wait(WARM_S)
    windows, found = _let_happen(rig, number, seed, faults, clock)
    PAUSE.wait(AFTER_S)
    result.hung = load.stop()
    result.problems += found
    try:
        rig.whole()
    except AssertionError as error:
        result.problems.append(str(error))
    if left := rig.wait_rest():
        result.problems.append(f"not at rest: {left}")
    result.problems += [f"log: {line}" for line in rig.new_log_problems()]
    result.problems += _registry_problems(rig)
    result.use = rig.use()
    _judge(result, load.calls, rig, windows)
    result.duration_s = clock() - begun_s
    return result


def _let_happen(
    rig: Rig, number: int, seed: str, faults: Sequence[Fault], clock: Callable[[], float]
) -> tuple[list[Window], list[str]]:
    def happen(index: int, fault: Fault) -> tuple[Window, list[str]]:
        draw = random.Random(f"{seed}/fault-{index}")
        PAUSE.wait(draw.uniform(0.0, LATEST_FAULT_S))
        begin_s = clock()
        try:
            found = fault.happen(Moment(rig, draw, lambda seconds: _rest(seconds), number))
        except Exception as error:  # the fault itself could not be had: the rig reports what is broken
            found = [f"the fault {fault.name} failed: {type(error).__name__}: {str(error)[:300]}"]
        return Window(fault.name, begin_s, clock()), found

    calls = [functools.partial(happen, index, fault) for index, fault in enumerate(faults)]
    ended, hung = together(calls, FAULT_ENDS_S)
    found = [problem for _, problems in ended for problem in problems]
    return [window for window, _ in ended], found + [f"a fault did not end: {stack}" for stack in hung]


def _rest(seconds: float) -> None:
    PAUSE.wait(seconds)


def _registry_problems(rig: Rig) -> list[str]:
    """Adapters that are missing, that nobody registered, or whose version nobody made active."""
    registered = rig.registered()
    problems = [f"adapter {name} is gone" for name in sorted(set(rig.digests) - set(registered))]
    problems += [f"adapter {name} is there" for name in sorted(set(registered) - set(rig.digests))]
    return problems + [
        f"adapter {name} has the version {digest}"
        for name, digest in registered.items()
        if name in rig.digests and digest not in rig.digests[name]
    ]


def _judge(result: RoundResult, calls: Sequence[Call], rig: Rig, windows: Sequence[Window]) -> None:
    """Compare every call with the truth."""
    for call in calls:
        if not call.is_ended:
            if call.is_async:
                result.hung.append(f"a task's call: {call.job}")
            continue
        if wrong := problem_of(call, rig.truth, rig.digests):
            result.wrong.append(f"{wrong}; {call.job.adapter or 'base'}, error {call.error or 'none'}")
            continue
        if any(window.overlaps(call) for window in windows):
            result.waits_s.append(call.longest_wait_s)
        if call.error:
            result.errors.append(call.error)
            if call.is_avoidable:
                result.avoidable.append(f"{call.error}: {call.error_text}")
        elif call.is_cancelled:
            result.num_cancelled += 1
        else:
            result.num_right += 1

"""Rounds of kills: start the victim, kill it at a random moment, compare what the next one finds with its reports.

What a victim reported as done is there, and whole. What it had begun may be there or not. Nothing else is left over.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hostile.kills.victim import adapters, live

LONGEST_LIFE_S = 0.4
PATIENCE_S = 60.0


@dataclass
class Report:
    """What the rounds found."""

    num_kills: int = 0
    num_done: int = 0  # changes that were reported as done
    num_while_opening: int = 0  # kills before the store was open
    num_while_changing: int = 0  # kills with a change under way
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_kills} kills, {self.num_while_opening} while the store was opened, {self.num_while_changing} "
            f"within a change; {self.num_done} changes done; {len(self.failures)} failures"
        )


class Truth:
    """What must be in the store: for each name the states that it may have, None for no name."""

    def __init__(self) -> None:
        self._states: dict[str, list[tuple[str, frozenset[str]] | None]] = {}
        self._open: dict[str, dict[str, Any]] = {}  # by task: the change that began

    def begin(self, task: str, change: dict[str, Any]) -> None:
        self._open[task] = change

    def done(self, task: str, change: dict[str, Any]) -> None:
        del self._open[task]
        name, state = change["name"], self._state(change["name"])
        match change["action"]:
            case "register":
                versions = state[1] if state else frozenset()
                self._states[name] = [(change["digest"], versions | {change["digest"]})]
            case "delete":
                self._states[name] = [None]
            case "delete version":
                assert state is not None
                self._states[name] = [(state[0], state[1] - {change["digest"]})]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def problems(self, found: dict[str, Any]) -> list[str]:
        """What is wrong with what was found, which counts from now on."""
        names: dict[str, Any] = found["names"]
        problems = [f"damaged {digest}" for digest in found["damaged"]]
        problems += [f"left over {name}" for name in found["leftovers"]]
        problems += [f"{name} is {entry['state']}" for name, entry in names.items() if entry["state"] != "active"]
        begun = {change["name"]: change for change in self._open.values()}
        for name in names.keys() | self._states.keys():
            entry = names.get(name)
            state = (entry["active"], frozenset(entry["versions"])) if entry else None
            before = self._state(name)
            if state != before and not _may_follow(before, state, begun.get(name)):
                problems.append(f"{name}: found {state}, reported {before}, begun {begun.get(name)}")
            self._states[name] = [state]
        self._open.clear()
        return problems

    def _state(self, name: str) -> tuple[str, frozenset[str]] | None:
        return self._states.get(name, [None])[-1]


def _may_follow(
    before: tuple[str, frozenset[str]] | None, after: tuple[str, frozenset[str]] | None, change: dict[str, Any] | None
) -> bool:
    """Whether the change that was under way makes the one state of the other."""
    if change is None:
        return False
    versions = before[1] if before else frozenset()
    match change["action"]:
        case "register":  # of any adapter: which one is known when it is done
            return after is not None and after[1] == versions | {after[0]}
        case "delete":
            return after is None
        case _:
            return before is not None and after == (before[0], versions - {change["digest"]})


def run_rounds(directory: Path, num_rounds: int, generator: random.Random) -> Report:
    """Kill so many victims. This process has no threads: it forks."""
    adapters(directory)
    report, truth = Report(), Truth()
    for number in range(num_rounds):
        life_s = generator.uniform(0.0, LONGEST_LIFE_S)
        has_opened = _round(directory, generator.randrange(1 << 32), life_s, truth, report, is_last=False)
        report.num_kills += 1
        report.num_while_opening += not has_opened
        report.num_while_changing += has_opened and truth.num_open > 0
        if report.failures:
            report.failures.append(f"in round {number}")
            return report
    _round(directory, 0, PATIENCE_S, truth, report, is_last=True)
    left = [path for path in (directory / "store").rglob("*") if path.is_file()]
    if names := [path.name for path in left if path.parent != directory / "store"]:
        report.failures.append(f"left over after all names were deleted: {names}")
    return report


def _round(directory: Path, seed: int, life_s: float, truth: Truth, report: Report, *, is_last: bool) -> bool:
    """One victim, killed after its life; whether it had opened the store."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            asyncio.run(live(directory, writing, seed, is_last=is_last))
        except BaseException:
            os.write(writing, f"failed {json.dumps(traceback.format_exc())}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    data = b""
    kill_at_s = time.monotonic() + life_s
    while (left_s := kill_at_s - time.monotonic()) > 0:
        if select.select([reading], [], [], left_s)[0]:
            if not (part := os.read(reading, 1 << 16)):
                break
            data += part
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while part := os.read(reading, 1 << 16):
        data += part
    os.close(reading)
    return _read_lines(data.decode(), truth, report)


def _read_lines(text: str, truth: Truth, report: Report) -> bool:
    has_opened = False
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("state", "failed"):
            content = json.loads(rest)
            report.failures += truth.problems(content) if word == "state" else [content]
            has_opened = True
            continue
        task, _, change = rest.partition(" ")
        if word == "begin":
            truth.begin(task, json.loads(change))
        else:
            truth.done(task, json.loads(change))
            report.num_done += 1
    return has_opened

"""Keeps measurements of this machine, so that a choice between ways to compute is made once per machine: `measured`.

Results lie beside the compiled library, in one file for each CPU, number of threads, torch and library. A file that is
damaged, or cannot be read or written, costs a measurement, nothing else. MOTET_MEASURE_AGAIN=1 measures once more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernels.native.build import cache_folder, library_name
from kernels.native.cpu import this_cpu
from kernels.native.folder import CacheFolder, DamagedFile
from kernels.native.program import get_num_threads

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0
KEPT_FILES = 32  # those written last

Results = dict[str, Any]  # what JSON can hold
Way = TypeVar("Way")


def measured(name: str, key: str, measure: Callable[[], Results]) -> Results:
    """The results of `name` for `key` on this machine: those of an earlier start, or what `measure` gives."""
    return _measurements(get_num_threads(), library_name(), cache_folder()).get(name, key, measure)


def best_times_s(
    calls: Mapping[Way, Sequence[Callable[[], object]]],
    *,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Way, float]:
    """The shortest time of one call, for each of several ways to compute the same.

    A way is a list of calls, for instance with copies of the weights, so that a call does not find in the caches what
    the one before it left there. The ways take turns, so that a busy neighbour is met by all of them: two turns, and
    more while the budget lasts.
    """
    best = dict.fromkeys(calls, float("inf"))
    begun = clock()
    num_turns = 0
    while num_turns < 2 or clock() - begun < budget_s:
        for way, way_calls in calls.items():
            for call in way_calls:
                start = clock()
                call()
                best[way] = min(best[way], clock() - start)
        num_turns += 1
    return best


class Measurements:
    """The results of one machine, in a file of a folder and in memory."""

    def __init__(
        self,
        folder: CacheFolder | None,
        machine: Mapping[str, object],
        *,
        again: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`machine`: all that results depend on. `again`: what the file holds is replaced, each result once."""
        self._folder = folder
        self._machine = {name: str(value) for name, value in machine.items()}
        self._again = again
        self._now = now
        self._known: dict[tuple[str, str], Results] = {}
        described = json.dumps(self._machine, sort_keys=True)
        self.file_name = f"measured-{hashlib.sha256(described.encode()).hexdigest()[:24]}.json"

    def get(self, name: str, key: str, measure: Callable[[], Results]) -> Results:
        """What is known, else what `measure` gives, which is kept."""
        if (name, key) not in self._known:
            found = None if self._again else _result(self._stored(), name, key)
            self._known[name, key] = self._measure(name, key, measure) if found is None else found
        return self._known[name, key]

    def _measure(self, name: str, key: str, measure: Callable[[], Results]) -> Results:
        begun_s = time.monotonic()
        # Through JSON, so that this start and later ones get the same.
        results: Results = json.loads(json.dumps(measure()))
        took_ms = (time.monotonic() - begun_s) * 1e3
        logger.info("measured name=%s key=%s took_ms=%.0f results=%s", name, key, took_ms, json.dumps(results))
        if self._folder is None:
            return results
        try:
            with self._folder.locked(LOCK_TIMEOUT_S):
                stored = self._stored()
                found = None if self._again else _result(stored, name, key)
                if found is not None:
                    return found  # another process was first, and both choose the same
                entries = stored.setdefault(name, {})
                entries[key] = {"measured_at_s": int(self._now()), "results": results}
                content = json.dumps({"machine": self._machine, "measured": stored}, indent=1)
                self._folder.write(self.file_name, content.encode())
                for other in self._folder.names("measured-", ".json")[KEPT_FILES:]:
                    self._folder.remove(other)
        except OSError as error:
            logger.warning("measurements are not kept, each start takes its own reason=%s", error)
        return results

    def _stored(self) -> dict[str, dict[str, Any]]:
        if self._folder is None:
            return {}
        try:
            content = self._folder.read(self.file_name)
            whole = json.loads(content) if content is not None else {}
        except (DamagedFile, OSError, ValueError) as error:
            logger.warning("measurements are not read reason=%s", error)
            return {}
        return _dictionary_of_dictionaries(whole.get("measured") if isinstance(whole, dict) else None)


def _dictionary_of_dictionaries(value: object) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict):
        return {}
    return {name: entries for name, entries in value.items() if isinstance(entries, dict)}


def _result(stored: Mapping[str, Mapping[str, Any]], name: str, key: str) -> Results | None:
    entry = stored.get(name, {}).get(key)
    results = entry.get("results") if isinstance(entry, dict) else None
    return results if isinstance(results, dict) else None


@cache
def _measurements(num_threads: int, library: str, folder: Path | None) -> Measurements:
    cpu = this_cpu()
    machine = {
        "cpu": cpu.model,
        "features": " ".join(sorted(cpu.features)),
        "num_threads": num_threads,
        "torch": torch.__version__,
        "library": library,
    }
    place = None if folder is None else CacheFolder(folder)
    return Measurements(place, machine, again=os.environ.get("MOTET_MEASURE_AGAIN", "") == "1")

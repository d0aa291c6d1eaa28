"""`motet worker --profile N`: the first N steps with work after attaching as a Chrome trace, for Perfetto. No torch.

Spans of the compute thread and of loaders, the native ops of each step inside of them. The file appears whole, by a
rename, when the last of the steps has ended; from then on nothing is collected.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from data_plane.plan import StepOutput, StepPlan
from data_plane.spans import Span, collecting

logger = logging.getLogger(__name__)


class NativeRun(Protocol):
    """One call of native code (kernels.native.Run)."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def began_ns(self) -> int: ...
    @property
    def times(self) -> npt.NDArray[np.int64]:
        """[ops, 2] when the calling thread, and when all threads, had ended each op."""
        ...


Record = Callable[[], AbstractContextManager[Sequence[NativeRun]]]


class StepProfile:
    """Collects from `start` on, which the compute thread calls. One thread at a time calls the others."""

    def __init__(self, num_steps: int, path: Path, record: Record) -> None:
        """`record` opens the recording of native runs."""
        self._num_steps = num_steps
        self._path = path
        self._record = record
        self._spans: list[Span] = []
        self._runs: Sequence[NativeRun] = []
        self._num_ended = 0
        self._collecting = ExitStack()
        self._is_started = False
        self._compute_thread = 0
        self._writer: threading.Thread | None = None

    def start(self) -> None:
        """Begin to collect; a second call changes nothing."""
        if self._is_started:
            return
        self._is_started = True
        self._compute_thread = threading.get_ident()
        self._collecting.enter_context(collecting(self._spans.append))
        self._runs = self._collecting.enter_context(self._record())
        logger.info("profile started steps=%d path=%s", self._num_steps, self._path)

    def end_step(self, plan: StepPlan, output: StepOutput) -> None:
        """Count a step whose result was sent, if it computed anything; write the file after the last."""
        has_work = len(plan.prefills) or len(output.rows) or len(output.failed_rows) or len(output.waiting_rows)
        if not has_work or self._num_ended == self._num_steps:
            return
        self._num_ended += 1
        if self._num_ended == self._num_steps:
            self._collecting.close()
            events = trace_events(self._spans, self._runs, self._compute_thread, os.getpid())
            # Beside the compute thread: the next step does not wait for the disk.
            self._writer = threading.Thread(target=self._write, args=(events,), name="profile-writer")
            self._writer.start()

    def close(self) -> None:
        """Stop collecting; what is being written is written to its end."""
        self._collecting.close()
        if self._writer is not None:
            self._writer.join()
        elif self._is_started:
            logger.warning(
                "profile not written path=%s: the worker ended after %d of %d steps",
                self._path,
                self._num_ended,
                self._num_steps,
            )

    def _write(self, events: list[dict[str, Any]]) -> None:
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
            unfinished.replace(self._path)
        except OSError as error:  # serving goes on without a profile
            unfinished.unlink(missing_ok=True)
            logger.error("profile not written path=%s: %s", self._path, error)
            return
        logger.info("profile written path=%s steps=%d events=%d", self._path, self._num_steps, len(events))


def trace_events(
    spans: Sequence[Span], runs: Sequence[NativeRun], compute_thread: int, process: int
) -> list[dict[str, Any]]:
    """Complete events of the Trace Event Format. Ops lie on the compute thread, and in them its waits for others."""

    def event(name: str, thread: int, began_ns: int, ended_ns: int) -> dict[str, Any]:
        times = {"ts": began_ns / 1000, "dur": (ended_ns - began_ns) / 1000}  # microseconds
        return {"name": name, "ph": "X", "pid": process, "tid": thread, **times}

    threads = {span.thread for span in spans} | {compute_thread}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
        for thread in sorted(threads)
        for name in ["compute" if thread == compute_thread else "adapter load"]
    ]
    events += [event(span.name, span.thread, span.began_ns, span.ended_ns) for span in spans]
    for run in runs:
        began_ns = run.began_ns
        for name, (own_ns, all_ns) in zip(run.names, run.times.tolist(), strict=True):
            events.append(event(name, compute_thread, began_ns, all_ns))
            if all_ns > own_ns:
                events.append(event("wait for other threads", compute_thread, own_ns, all_ns))
            began_ns = all_ns
    return events

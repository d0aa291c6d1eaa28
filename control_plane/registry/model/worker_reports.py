"""Holds what workers report that they serve. Attached workers come first; without any, the last reports count.

The fleet says who is attached. The registry judges adapters by the modules, the API checks requests and reports
the longest context in the status. A file remembers the last word, so that a restart knows it before a worker is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from contract.expert_names import of_all
from control_plane.registry.model.served_modules import (
    NOTHING_REPORTED,
    Modules,
    WorkerReport,
    decode_report,
    encode_report,
    joined,
)

logger = logging.getLogger(__name__)


class WorkerReports:
    """The workers of one base model. `changes` counts the changes of `modules`."""

    def __init__(self, file: Path | None = None, *, limit: int | None = None) -> None:
        """`file` remembers; None: nothing does. `limit` bounds the context: the checkpoint's or the operator's."""
        self._file = file
        self._limit = limit
        self._report = None if file is None else _read(file)
        self._writing: asyncio.Task[None] | None = None
        self.changes = 0

    @property
    def modules(self) -> Modules:
        """The modules of the base model; empty before a worker reported them."""
        return NOTHING_REPORTED if self._report is None else self._report.modules

    @property
    def max_model_len(self) -> int | None:
        """Longest context that a request may ask for, tokens; None if nobody named one yet."""
        reported = None if self._report is None else self._report.max_model_len
        known = [length for length in (reported, self._limit) if length is not None]
        return min(known, default=None)

    def context_of(self, context_length: int) -> int | None:
        """`max_model_len` for an adapter whose own rotary embedding was trained for so many tokens; 0: it has none."""
        length = self.max_model_len
        if not context_length or length is None or self._report is None:
            return length
        return min(context_length, max(length, self._report.max_adapter_model_len))

    def module_error(self, names: Iterable[str]) -> str:
        """Why an adapter on these modules cannot be served; empty if it can, or if nothing is known."""
        modules = self.modules
        if not modules:
            return ""
        for name in names:
            module = modules.get(of_all(name))
            if module is None:
                return f"it changes {name}, and the workers' model has no such module"
            if module.reason:
                return f"it changes {name}, which takes no adapters: {module.reason}"
        return ""

    def update(self, reports: Sequence[WorkerReport]) -> None:
        """Take the reports of all attached workers; without any the last ones stay."""
        report = joined(reports)
        if report is None or report == self._report:
            return
        if not report.modules:
            report = replace(report, modules=self.modules)
        if report.modules != self.modules:
            self.changes += 1
        self._report = report
        num_refusing = sum(bool(module.reason) for module in report.modules.values())
        logger.info(
            "workers serve max_model_len=%d modules=%d modules_without_adapters=%d",
            report.max_model_len,
            len(report.modules),
            num_refusing,
        )
        if self._file is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().create_task(self._write(self._file))

    async def close(self) -> None:
        """Wait until what is known was written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write(self, file: Path) -> None:
        """Until the file has the present report. What fails costs a restart its memory, and nothing else."""
        written = None
        while written is not self._report:
            written = self._report
            assert written is not None, "a report is written once there is one"
            try:
                await asyncio.to_thread(_replace, file, written)
            except OSError as error:
                logger.warning("workers' report not remembered file=%s error=%s", file, error)


def _read(file: Path) -> WorkerReport | None:
    try:
        return decode_report(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("workers' report not read file=%s error=%s", file, error)
        return None


def _replace(file: Path, report: WorkerReport) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(encode_report(report))
    temporary.replace(file)

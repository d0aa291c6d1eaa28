"""What one generation costs in the audit log: CPU time of the event loop, and of the whole process with its writer.

`python -m benchmarks.control_plane.audit_cost` prints one JSON object, and exits with 1 where a limit of LIMITS is
missed. CPU time is what counts, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from control_plane.access.principal import Principal, Role
from control_plane.api.generation.generation_record import GenerationRecord
from control_plane.audit.audit_log import AuditLog
from control_plane.audit.log_file import LogFile
from control_plane.audit.writer import AuditWriter
from control_plane.caller import Caller
from control_plane.fleet.requests.streams import Place, RunFacts
from control_plane.observers.ended_request import Observers
from control_plane.scheduler.types import AdapterRef, Request, RequestId, SlotRef

# Microseconds of CPU for one generation: in all with a log, and without one.
LIMITS = {"with_us": 30.0, "without_us": 2.0}
WRITER_SHARE = 1000  # generations between two moments in which the writer may catch up, below the bound of its queue


def a_generation(audit: AuditLog) -> None:
    """What GenerationService does for the log around one generation."""
    with GenerationRecord(audit, _CALLER, _CHECKED, _REQUEST, _STREAM, time.monotonic, Observers()) as record:
        record.job = _JOB


def measure(audit: AuditLog, num_generations: int) -> tuple[float, float]:
    """Microseconds of CPU for one generation: of this thread, and of the process."""
    loop_s, process_s = time.thread_time(), time.process_time()
    for number in range(num_generations):
        a_generation(audit)
        if number % WRITER_SHARE == WRITER_SHARE - 1:
            while (stats := audit.stats()) is not None and stats.num_waiting:
                time.sleep(0.0005)
    loop_s, process_s = time.thread_time() - loop_s, time.process_time() - process_s
    return loop_s / num_generations * 1e6, process_s / num_generations * 1e6


def main() -> int:
    """Measure as the flags say and print JSON; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=20_000, help="of each round (default 20000)")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions (default 7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        path = Path(name) / "audit.jsonl"
        writer = AuditWriter(LogFile(path, max_bytes=1 << 40), source="//bench/motet")
        audit = AuditLog(writer)
        writer.start()
        logged = [measure(audit, args.generations) for _ in range(args.rounds + 1)][1:]  # the first one warms up
        writer.close()
        stats = writer.stats()
        line_bytes = path.stat().st_size / stats.num_lines
    unlogged = [measure(AuditLog(), args.generations) for _ in range(args.rounds)]
    report = {
        "with_us": round(statistics.median(process for _, process in logged), 2),
        "with_us_in_the_event_loop": round(statistics.median(loop for loop, _ in logged), 2),
        "without_us": round(statistics.median(process for _, process in unlogged), 2),
        "line_bytes": round(line_bytes),
        "num_lost": stats.num_lost,
    }
    print(json.dumps(report, indent=1))
    is_missed = any(report[name] > limit for name, limit in LIMITS.items())
    return int(is_missed or stats.num_lost > 0)


_CALLER = Caller(
    tenant="team-a", principal=Principal("key:team-a", frozenset({Role.INFER}), ("team-a",)), peer="ipv4:10.0.0.7:51234"
)
_REQUEST = Request(RequestId(12345), tuple(range(512)), 128, adapter=AdapterRef("3f" * 32, 1 << 20), tenant="team-a")
# What the record reads of a request that was checked, of its messages and of its stream.
_CHECKED: Any = SimpleNamespace(adapter_id="poet")
_STREAM: Any = SimpleNamespace(request_id="req-12345", finish_reasons=["length"], first_token_s=1.0, is_finished=True)
_JOB: Any = SimpleNamespace(
    facts=RunFacts([Place("worker-0", 7, SlotRef(3, 12))], num_cached_tokens=256, queue_time_s=0.01, num_new_tokens=128)
)

if __name__ == "__main__":
    sys.exit(main())

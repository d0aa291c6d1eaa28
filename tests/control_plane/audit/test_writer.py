"""The writer of the audit log: one chain whatever the disk does, and nothing is lost without a count."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from motet.audit.chain import GENESIS, TORN_ACTION, check

from control_plane.audit.log_file import LogFile
from control_plane.audit.record import Kind, Outcome
from control_plane.audit.writer import GATHER_RECORDS, STALLED_AFTER_S, AuditWriter
from tests.control_plane.audit.sinks import WAIT_S, MemorySink, a_record, a_writer, lines_of
from tests.fakes.fleet_rig import FakeClock


def actions(sink: MemorySink) -> list[str]:
    return [event["data"]["action"] for event in sink.events()]


def test_records_become_cloud_events_in_one_chain() -> None:
    sink = MemorySink()
    writer = a_writer(sink)
    writer.put(a_record(1, request_id="mine", resource="adapters/poet", digest="d" * 64, more={"tokens": 3}))
    writer.put(a_record(2, Kind.REFUSAL, Outcome.DENIED, reason="PERMISSION_DENIED"))
    writer.close()
    first, second = sink.events()
    assert first == {
        "specversion": "1.0",
        "id": first["id"],
        "source": "//host/motet",
        "type": "motet.audit.v1.generation",
        "time": "2001-09-09T01:46:41.000000Z",
        "subject": "adapters/poet",
        "datacontenttype": "application/json",
        "data": {
            "actor": {"principal": "", "tenant": "a", "method": "none", "peer": ""},
            "action": "action-1",
            "resource": "adapters/poet",
            "digest": "d" * 64,
            "outcome": "success",
            "reason": "",
            "request_id": "mine",
            "correlation_id": "",
            "tokens": 3,
        },
        "prev": GENESIS,
    }
    assert (second["data"]["outcome"], second["data"]["reason"]) == ("denied", "PERMISSION_DENIED")
    assert "subject" not in second and first["id"] != second["id"]
    assert sink.verdict().finding is None and sink.verdict().num_lines == 2


def test_a_restart_goes_on_with_the_chain_of_the_file(tmp_path: Path) -> None:
    for start in range(3):
        writer = a_writer(LogFile(tmp_path / "log", max_bytes=1 << 20))  # type: ignore[arg-type]
        writer.put(a_record(start))
        writer.close()
    verdict = check(lines_of((tmp_path / "log").read_bytes()))
    assert verdict.finding is None and (verdict.num_lines, verdict.begins_after) == (3, GENESIS)


@pytest.mark.parametrize("num_bytes_lost", [1, 2, 100])
@pytest.mark.parametrize("num_lines", [1, 2])
def test_a_torn_last_line_is_kept_and_closed_by_a_line(tmp_path: Path, num_bytes_lost: int, num_lines: int) -> None:
    path = tmp_path / "log"
    writer = a_writer(LogFile(path, max_bytes=1 << 20))  # type: ignore[arg-type]
    for number in range(num_lines):
        writer.put(a_record(number))
    writer.close()
    path.write_bytes(torn := path.read_bytes()[:-num_bytes_lost])
    assert check(lines_of(torn)).finding is not None
    writer = a_writer(LogFile(path, max_bytes=1 << 20))  # type: ignore[arg-type]
    writer.put(a_record(7))
    writer.close()
    content = path.read_bytes()
    assert content.startswith(torn + b"\n")
    verdict = check(lines_of(content))
    assert verdict.finding is None and (verdict.num_lines, verdict.num_torn) == (num_lines + 2, 1)
    [close] = [line.event() for line in lines_of(content) if (event := line.event()) and TORN_ACTION in str(event)]
    assert close is not None
    assert close["data"]["torn_bytes"] == len(torn.splitlines()[-1])


def test_rotation_keeps_the_chain_and_the_number_of_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = a_writer(LogFile(path, max_bytes=2000, num_kept=3))  # type: ignore[arg-type]
    for number in range(40):
        writer.put(a_record(number))
    writer.close()
    rotated = sorted(tmp_path.glob("log.*"))
    assert len(rotated) == 3 and rotated[0].name != "log.000001"
    assert all(file.stat().st_size <= 2000 for file in [*rotated, path])
    assert {file.stat().st_mode & 0o777 for file in [*rotated, path]} == {0o600}
    verdict = check(line for file in [*rotated, path] for line in lines_of(file.read_bytes(), file.name))
    assert verdict.finding is None and verdict.begins_after != GENESIS
    first = lines_of(path.read_bytes())[0].event()
    assert first is not None and first["data"]["action"] == "log.rotate"
    assert (first["data"]["rotated"], len(first["data"]["removed"])) == (rotated[-1].name, 1)


def test_a_crash_between_two_files_keeps_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(3):
        writer = a_writer(LogFile(path, max_bytes=1 << 20))  # type: ignore[arg-type]
        writer.put(a_record(number))
        writer.close()
        if number == 0:
            path.rename(tmp_path / "log.000001")
        elif number == 1:
            path.rename(tmp_path / "log.000002")
            path.touch()
    files = [*sorted(tmp_path.glob("log.*")), path]
    verdict = check(line for file in files for line in lines_of(file.read_bytes(), file.name))
    assert verdict.finding is None and (verdict.num_lines, verdict.begins_after) == (3, GENESIS)


def test_a_full_disk_is_logged_and_leaves_no_gap_once_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    sink = MemorySink()
    sink.room = 100  # a part of the first line
    writer = a_writer(sink, max_waiting_records=5)
    writer.start()
    assert writer.problem == ""
    writer.put(a_record(0, Kind.ACTION))
    assert sink.failed_twice.wait(WAIT_S)
    assert writer.problem == "No space left on device"
    for number in range(1, 20):
        writer.put(a_record(number))
    writer.put(a_record(20, Kind.ACTION))  # a change that had begun before the disk was full
    stats = writer.stats()
    assert (stats.num_lost, stats.problem) == (14, "No space left on device")
    sink.room = None
    writer.close()
    verdict = sink.verdict()
    assert verdict.finding is None
    assert actions(sink) == [*(f"action-{n}" for n in (0, 1, 2, 3, 4, 5, 20)), "log.lost"]
    assert sink.events()[-1]["data"]["generation"] == 14
    text = caplog.text
    assert "audit log not written: No space left on device" in text and "audit records lost" in text
    assert text.count("audit log not written") == 1


def test_a_slow_disk_holds_up_nobody_and_counts_as_a_problem_after_a_while() -> None:
    sink, clock = MemorySink(), FakeClock()
    sink.may_write.clear()
    writer = a_writer(sink, clock=clock, max_waiting_records=100)
    writer.start()
    writer.put(a_record(0))
    assert sink.entered.wait(WAIT_S)
    for number in range(1, 1000):
        writer.put(a_record(number))  # returns although the thread is in a write that does not end
    clock.advance(STALLED_AFTER_S - 0.1)
    assert writer.problem == "100 records wait to be written"
    clock.advance(0.2)
    assert writer.problem == "a write has not ended for 5 s"
    assert writer.stats().num_lost == 999 - 100
    sink.may_write.set()
    writer.close()
    assert sink.verdict().finding is None and len(sink.events()) == 102
    assert writer.problem == ""


def test_closing_ends_although_the_disk_is_full_or_hangs(caplog: pytest.LogCaptureFixture) -> None:
    full = MemorySink()
    full.room = 0
    writer = a_writer(full)
    writer.put(a_record(0))
    writer.close()
    assert full.is_closed.wait(WAIT_S)
    hanging = MemorySink()
    hanging.may_write.clear()
    writer = a_writer(hanging)
    writer.put(a_record(0))
    writer.close(timeout_s=0.01)
    assert caplog.text.count("audit log not written to its end") == 2
    hanging.may_write.set()
    assert hanging.is_closed.wait(WAIT_S)


def test_changes_are_on_the_disk_at_once_and_say_so() -> None:
    sink = MemorySink()
    writer = a_writer(sink)
    writer.start()
    written = threading.Event()
    syncs: list[int] = []
    writer.put(a_record(0, Kind.ACTION, on_written=lambda: (syncs.append(sink.num_syncs), written.set())))  # type: ignore[func-returns-value]
    assert written.wait(WAIT_S)
    assert syncs == [1]
    writer.close()


def test_generations_are_on_the_disk_within_a_second_without_a_further_record() -> None:
    sink = MemorySink()
    synced = threading.Event()
    sink.sync = synced.set  # type: ignore[method-assign]
    writer = a_writer(sink)
    writer.start()
    writer.put(a_record(0))
    assert synced.wait(WAIT_S)
    writer.close()


def test_a_record_that_is_no_json_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    sink = MemorySink()
    writer = a_writer(sink)
    writer.put(a_record(1, more={"x": float("nan")}))
    writer.put(a_record(2))
    writer.close()
    assert actions(sink) == ["action-2", "log.lost"] and sink.verdict().finding is None
    assert "audit record broken action=action-1" in caplog.text


def test_text_takes_a_bounded_amount_of_memory() -> None:
    sink = MemorySink()
    sink.may_write.clear()
    writer = a_writer(sink)
    writer.start()
    writer.put(a_record(0))
    assert sink.entered.wait(WAIT_S)
    for number in range(1, 5):
        writer.put(a_record(number, num_text_bytes=30 << 20))
    assert writer.stats().num_lost == 2
    sink.may_write.set()
    writer.close()
    assert actions(sink) == ["action-0", "action-1", "action-2", "log.lost"]


def test_a_file_that_somebody_moved_is_followed_by_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "log", FakeClock()
    writer = AuditWriter(LogFile(path, max_bytes=1 << 20), source="s", clock=clock)
    writer.start()
    first = threading.Event()
    writer.put(a_record(0, Kind.ACTION, on_written=first.set))
    assert first.wait(WAIT_S)
    path.rename(tmp_path / "moved")
    clock.advance(2)
    with caplog.at_level(logging.WARNING):
        writer.put(a_record(1))
        writer.close()
    assert "audit log file moved" in caplog.text
    lines = [line for file in (tmp_path / "moved", path) for line in lines_of(file.read_bytes())]
    assert check(lines).finding is None and len(lines) == 2


def test_generations_wait_for_others_and_a_change_waits_for_nothing() -> None:
    sink, written = MemorySink(), threading.Event()
    writer = a_writer(sink, gather_s=10 * WAIT_S)
    writer.start()
    writer.put(a_record(1))
    writer.put(a_record(2))
    assert actions(sink) == []
    writer.put(a_record(3, Kind.ACTION, on_written=written.set))
    assert written.wait(WAIT_S)
    assert actions(sink) == ["action-1", "action-2", "action-3"] and sink.verdict().finding is None
    writer.put(a_record(4))
    writer.close(WAIT_S)  # neither does the end of the log
    assert actions(sink)[-1] == "action-4"


def test_many_generations_wait_no_longer() -> None:
    sink, written = MemorySink(), threading.Event()
    writer = a_writer(sink, gather_s=10 * WAIT_S)
    writer.start()
    for number in range(GATHER_RECORDS):
        writer.put(a_record(number, on_written=written.set))
    assert written.wait(WAIT_S)
    writer.close(WAIT_S)
    assert len(actions(sink)) == GATHER_RECORDS

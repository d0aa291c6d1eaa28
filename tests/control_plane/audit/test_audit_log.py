"""The audit log as the control plane uses it: which events get a line, and when changes are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2
from motet.audit.chain import check

from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.methods import REQUIREMENTS
from control_plane.access.principal import Principal, Role, of_roles
from control_plane.access.settings import AccessSettings
from control_plane.access.watched_files import FileWatcher, WatchedFiles
from control_plane.api.rpc.callers import Callers
from control_plane.api.rpc.error_status import status_proto
from control_plane.audit import actions
from control_plane.audit.audit_log import FAILED_CHANGES_PER_S, AuditLog, open_audit_log
from control_plane.caller import Caller, acting_as
from control_plane.errors import (
    AdapterNotFound,
    AuditUnavailable,
    EtagMismatch,
    InvalidRequest,
    MotetError,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    correlation_id_of,
)
from tests.control_plane.audit.sinks import WAIT_S, MemorySink, a_writer, lines_of
from tests.fakes.fleet_rig import FakeClock

WRITER = Principal("key:team-a", of_roles({Role.ADAPTERS_WRITE}), ("team-a",))
CALLER = Caller(tenant="team-a", principal=WRITER, peer="ipv4:10.0.0.7:51234")
PIN, GENERATE = "/motet.v1.AdapterService/PinAdapter", "/motet.v1.GenerationService/Generate"


class Log(AuditLog):
    """A log whose file is in memory and whose time stands still."""

    def __init__(self, **settings: Any) -> None:
        self.sink, self.clock = MemorySink(), FakeClock()
        self.writer = a_writer(self.sink)
        super().__init__(self.writer, clock=self.clock, wall_clock=lambda: 1e9, **settings)

    async def data(self) -> list[dict[str, Any]]:
        """What all lines say, without those of the server's start and end; the log is closed then."""
        await self.close()
        assert self.sink.verdict().finding is None
        return [event["data"] for event in self.sink.events()][1:-1]


@pytest.fixture
async def log() -> AsyncIterator[Log]:
    log = Log()
    log.start()
    yield log
    log.sink.may_write.set()
    await log.close()


async def test_a_change_has_a_line_that_is_on_the_disk_before_it_returns(log: Log) -> None:
    with acting_as(CALLER):
        async with log.change(actions.PIN, "adapters/poet", digest="d" * 64, request_id="r-1"):
            pass
    assert log.sink.events()[-1]["data"] == {
        "actor": {"principal": "key:team-a", "tenant": "team-a", "method": "key", "peer": "ipv4:10.0.0.7:51234"},
        "action": "adapter.pin",
        "resource": "adapters/poet",
        "digest": "d" * 64,
        "outcome": "success",
        "reason": "",
        "request_id": "r-1",
        "correlation_id": "",
    }
    assert log.sink.num_syncs >= 1


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (PermissionDenied("no"), "denied", "PERMISSION_DENIED"),
        (AdapterNotFound("none", resource="adapters/x"), "denied", "ADAPTER_NOT_FOUND"),
        (EtagMismatch("changed"), "failure", "ETAG_MISMATCH"),
        (asyncio.CancelledError(), "failure", "CANCELLED"),
        (ZeroDivisionError(), "failure", "INTERNAL"),
    ],
)
async def test_a_change_that_fails_has_one_line_with_the_reason(
    log: Log, error: BaseException, outcome: str, reason: str
) -> None:
    with pytest.raises(type(error)):
        async with log.change(actions.PIN):
            raise error
    if isinstance(error, MotetError):
        log.refused(PIN, CALLER, error)  # as the interceptor does with the same error
    [data] = await log.data()
    assert (data["outcome"], data["reason"]) == (outcome, reason)
    assert data["correlation_id"] == (correlation_id_of(error) if reason == "INTERNAL" else "")


async def test_an_api_key_that_a_client_puts_into_a_name_is_not_in_the_log(log: Log) -> None:
    secret = "A" * 43
    key = f"motet_ops_{secret}"
    name = f"{'x' * 40}/{key}"
    async with log.change(actions.PIN, name, digest=key, request_id=key):
        pass
    log.refused(GENERATE, CALLER, AdapterNotFound("none", resource=f"adapters/{name}"))
    log.generation(CALLER, None, action="generate", resource=f"adapters/{key}", digest="", request_id=key, more={})
    change, refusal, generation = await log.data()
    assert (change["resource"], change["request_id"]) == (f"{'x' * 40}/motet_ops_***", "motet_ops_***")
    assert refusal["resource"] == f"adapters/{'x' * 40}/motet_ops_***"
    assert (generation["resource"], generation["request_id"]) == ("adapters/motet_ops_***", "motet_ops_***")
    assert secret[:10].encode() not in log.sink.data


async def test_changes_are_refused_while_the_log_cannot_be_written(log: Log) -> None:
    log.sink.room = 0
    log.event(actions.ATTACH, "workers/w0")
    assert await asyncio.to_thread(log.sink.failed_twice.wait, WAIT_S)
    with pytest.raises(
        AuditUnavailable, match=r"cannot be written: No space left on device; changes are refused"
    ) as failure:
        async with log.change(actions.PIN, "adapters/poet"):
            pytest.fail("the change was made")
    assert not failure.value.is_change_made
    stats = log.stats()
    assert stats is not None and stats.problem == "No space left on device"
    log.sink.room = None
    refused, *_ = [data for data in await log.data() if data["action"] == actions.PIN]
    assert (refused["outcome"], refused["reason"]) == ("failure", "AUDIT_LOG_DOWN")


async def test_a_change_whose_line_is_not_written_in_time_ends_with_an_error_that_says_that_it_was_made() -> None:
    log = Log(write_timeout_s=0.0)
    log.start()
    log.sink.may_write.clear()
    is_made = False
    with (
        pytest.raises(AuditUnavailable, match=r"^the change was made, and its line .* is not written") as failure,
        acting_as(CALLER),
    ):
        async with log.change(actions.PIN, "adapters/poet"):
            is_made = True
    assert is_made and failure.value.is_change_made
    info = error_details_pb2.ErrorInfo()
    status_proto(failure.value).details[0].Unpack(info)
    assert (info.reason, info.metadata["change_made"]) == ("AUDIT_LOG_DOWN", "true")
    log.refused(PIN, CALLER, failure.value)  # as the interceptor does with the same error
    log.sink.may_write.set()
    [data] = await log.data()
    assert (data["action"], data["outcome"]) == ("adapter.pin", "success"), "one line, and no second of a failure"


async def test_a_slow_disk_does_not_stall_the_event_loop(log: Log) -> None:
    log.sink.may_write.clear()
    log.event(actions.ATTACH, "workers/w0")
    assert await asyncio.to_thread(log.sink.entered.wait, WAIT_S)
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        for _ in range(100):
            turns += 1
            await asyncio.sleep(0)

    async def change() -> None:
        async with log.change(actions.PIN, "adapters/poet"):
            pass

    changing = asyncio.create_task(change())
    log.generation(CALLER, None, action="generate", resource="@base", digest="", request_id="r", more={})
    await other_work()
    assert turns == 100 and not changing.done()  # the change waits for its line, and nobody else does
    log.sink.may_write.set()
    await changing


async def test_refusals_have_one_line_a_second_for_each_principal_and_reason_and_a_count(log: Log) -> None:
    size = len(log.sink.data)
    for _ in range(1000):
        log.refused(GENERATE, CALLER, Unauthenticated("no key"))
        log.refused(PIN.replace("Pin", "Get"), CALLER, PermissionDenied("no role"))
    log.clock.advance(1.0)
    log.tick()
    data = await log.data()
    assert [(line["reason"], line["action"], line.get("suppressed")) for line in data] == [
        ("UNAUTHENTICATED", "generate", None),
        ("PERMISSION_DENIED", "AdapterService/GetAdapter", None),
        ("UNAUTHENTICATED", "refusals.suppressed", 999),
        ("PERMISSION_DENIED", "refusals.suppressed", 999),
    ]
    assert data[2]["suppressed_by_action"] == {"generate": 999}
    assert len(log.sink.data) - size < 6000


async def test_what_was_suppressed_last_is_written_at_the_end(log: Log) -> None:
    for _ in range(3):
        log.refused(GENERATE, CALLER, QuotaExceeded("full", tenant="a", quota="x", limit=1, retry_after_s=1))
    data = await log.data()
    assert [line.get("suppressed") for line in data] == [None, 2]


async def test_calls_that_fail_otherwise_than_by_a_refusal_have_a_line_only_if_they_would_change_something(
    log: Log,
) -> None:
    log.refused(GENERATE, CALLER, InvalidRequest())
    log.refused(PIN, CALLER, InvalidRequest())
    log.refused(GENERATE, CALLER, AdapterNotFound("none", resource="adapters/x"))
    data = await log.data()
    assert [(line["action"], line["outcome"], line["resource"]) for line in data] == [
        ("adapter.pin", "failure", ""),
        ("generate", "denied", "adapters/x"),
    ]


async def test_changes_that_fail_in_a_flood_are_counted(log: Log) -> None:
    for _ in range(100):
        log.refused(PIN, CALLER, InvalidRequest())
    data = await log.data()
    assert [line["action"] for line in data[:-1]] == ["adapter.pin"] * FAILED_CHANGES_PER_S
    assert data[-1]["suppressed"] == 100 - FAILED_CHANGES_PER_S


async def test_the_line_of_a_refused_role_names_the_principal(log: Log) -> None:
    class Keys:
        def principal(self, presented: Presented) -> Principal | None:
            return WRITER

    class Context:
        def invocation_metadata(self) -> Any:
            return ()

        def peer(self) -> str:
            return CALLER.peer

        def auth_context(self) -> Any:
            return {}

    with pytest.raises(PermissionDenied) as refusal:
        Callers(Authenticator([Keys()]))(GENERATE, Context())  # type: ignore[arg-type]  # what Callers reads of one
    assert refusal.value.refused_principal == WRITER


def test_every_method_that_changes_something_is_an_action() -> None:
    """A method needs a role that only reads, or is named in CHANGES."""
    changing = {
        method
        for method, requirement in REQUIREMENTS.items()
        if requirement in (Role.ADAPTERS_WRITE, Role.ADMIN)
        and "reflection" not in method
        and not method.endswith("/GetUpload")  # for those who upload, and it only reads
    }
    assert changing == set(actions.CHANGES)
    assert GENERATE in REQUIREMENTS
    assert actions.action_of(GENERATE) == "generate"


async def test_a_file_that_is_read_again_has_a_line_with_its_digest(log: Log, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text("secret one")
    files = FileWatcher(on_read=log.file_read).add(WatchedFiles([keys], bytes, what="API keys"))
    former = files.digest
    keys.write_text("secret number two")
    assert files.refresh()
    [data] = await log.data()
    assert (data["action"], data["resource"], data["files"]) == ("file.reload", "API keys", [str(keys)])
    assert data["digest"] == files.digest != former
    assert b"secret" not in log.sink.data


async def test_the_first_line_of_a_start_and_the_last_have_a_digest_of_the_settings() -> None:
    log = Log(settings="listen=127.0.0.1:1")
    await log.close()
    start, stop = (event["data"] for event in log.sink.events())
    assert (start["action"], stop["action"]) == ("server.start", "server.stop")
    assert start["digest"] == stop["digest"] != ""
    assert start["actor"]["principal"] == "server"


def test_a_log_that_cannot_be_opened_ends_the_start_with_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--audit-log: .*none/log cannot be opened: No such file or directory"):
        open_audit_log(AccessSettings(audit_log=str(tmp_path / "none" / "log")), settings="")


@pytest.mark.parametrize("target", [None, "-"])
def test_text_needs_a_file(target: str | None) -> None:
    with pytest.raises(ValueError, match=r"^--audit-text: needs --audit-log with the name of a file"):
        AccessSettings(audit_log=target, audit_text=True)


async def test_a_log_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        log = open_audit_log(AccessSettings(audit_log=str(path)), settings="x")
        log.start()
        async with log.change(actions.PIN, "adapters/poet"):
            pass
        await log.close()
    verdict = check(lines_of(path.read_bytes()))
    assert verdict.finding is None and verdict.num_lines == 6

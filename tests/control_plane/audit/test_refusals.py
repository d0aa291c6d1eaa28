"""A flood of refusals has few lines, and every one of them is counted."""

from __future__ import annotations

from control_plane.access.principal import Principal
from control_plane.audit.refusals import MANY, MAX_WINDOWS, RefusalLimit
from control_plane.caller import Caller
from tests.fakes.fleet_rig import FakeClock


def caller(name: str = "", peer: str = "ipv4:10.0.0.7:1") -> Caller:
    return Caller(principal=Principal(name), peer=peer)


def test_one_line_a_second_for_each_caller_and_reason_and_the_rest_is_counted() -> None:
    clock = FakeClock()
    limit = RefusalLimit(clock)
    assert limit.admit(caller("key:a"), "PERMISSION_DENIED", "adapter.pin")
    assert not limit.admit(caller("key:a"), "PERMISSION_DENIED", "adapter.pin")
    assert not limit.admit(caller("key:a"), "PERMISSION_DENIED", "adapter.delete")
    assert limit.admit(caller("key:a"), "QUOTA_EXCEEDED", "generate")
    assert limit.admit(caller("key:b"), "PERMISSION_DENIED", "adapter.pin")
    assert limit.take_due() == []
    clock.advance(1.0)
    [due] = limit.take_due()
    assert (due.caller.principal.name, due.reason) == ("key:a", "PERMISSION_DENIED")
    assert due.count_by_action == {"adapter.pin": 1, "adapter.delete": 1}
    # The line about the count is that of the second which begins.
    assert not limit.admit(caller("key:a"), "PERMISSION_DENIED", "adapter.pin")
    clock.advance(1.0)
    assert [due.count_by_action for due in limit.take_due()] == [{"adapter.pin": 1}]
    clock.advance(1.0)
    assert limit.take_due() == []
    assert limit.admit(caller("key:a"), "PERMISSION_DENIED", "adapter.pin")


def test_callers_without_a_principal_are_counted_apart_by_host_and_not_by_connection() -> None:
    limit = RefusalLimit(FakeClock())
    assert limit.admit(caller(), "UNAUTHENTICATED", "generate")
    assert not limit.admit(caller(peer="ipv4:10.0.0.7:2"), "UNAUTHENTICATED", "generate")
    assert limit.admit(caller(peer="ipv4:10.0.0.8:1"), "UNAUTHENTICATED", "generate")


def test_many_callers_share_one_count() -> None:
    clock = FakeClock()
    limit = RefusalLimit(clock)
    lines = sum(limit.admit(caller(f"key:{i}"), "UNAUTHENTICATED", "generate") for i in range(10 * MAX_WINDOWS))
    assert lines == MAX_WINDOWS
    [due] = limit.take_due(is_last=True)
    assert (due.reason, due.count_by_action, due.caller.peer) == (MANY, {"generate": 9 * MAX_WINDOWS}, "")
    clock.advance(3.0)
    limit.take_due()
    assert limit.admit(caller("key:new"), "UNAUTHENTICATED", "generate")


def test_failed_changes_may_have_more_lines() -> None:
    limit = RefusalLimit(FakeClock())
    admitted = [limit.admit(caller("key:a"), "ETAG_MISMATCH", "adapter.update", num_lines=20) for _ in range(25)]
    assert admitted == [True] * 20 + [False] * 5

"""When a call is tried again, and for how long, on a clock that the test moves."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import pytest
from motet import Cancelled, DeadlineExceeded, InvalidArgument, MotetError, ResourceExhausted, RetryPolicy, Unavailable
from motet.connection.contact import ServerContact, check_target
from motet.retries import Attempts

REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
    "Failed to connect to remote host: Connection refused"
)


class Call:
    """One call with its clock: `run` lets every attempt fail in turn and waits as the client says."""

    def __init__(self, policy: RetryPolicy | None = None, *, timeout_s: float = 600.0) -> None:
        self.now_s = 50.0
        self.contact = ServerContact("host:50051")
        self.waits: list[float] = []
        self.attempts = Attempts(
            self.contact,
            policy or RetryPolicy(),
            timeout_s=timeout_s,
            clock=lambda: self.now_s,
            generator=random.Random(3),
        )

    def run(self, *errors: MotetError, is_repeatable: bool = True) -> None:
        for error in errors:
            self.waits.append(self.attempts.after(error, is_repeatable=is_repeatable))
            self.now_s += self.waits[-1]


def failed() -> Unavailable:
    return Unavailable("the worker was lost", reason="WORKER_LOST")


def broken() -> Unavailable:
    return Unavailable("Socket closed")


def refused() -> Unavailable:
    return Unavailable(REFUSED)


def test_waits_grow_up_to_their_limit_with_jitter_above_half() -> None:
    call = Call(RetryPolicy(max_attempts=8))
    call.run(*[failed() for _ in range(7)])
    longest = [0.3, 0.6, 1.2, 2.4, 4.8, 5.0, 5.0]
    assert all(most / 2 <= wait <= most for wait, most in zip(call.waits, longest, strict=True))


def test_what_the_server_fails_is_bounded_by_attempts_and_progress_renews_them() -> None:
    call = Call(RetryPolicy(max_attempts=3))
    call.run(failed(), failed())
    call.attempts.progressed()
    call.run(failed(), failed())
    with pytest.raises(Unavailable, match=r"^the worker was lost$"):
        call.run(failed())


def test_absence_does_not_count_as_an_attempt_and_is_polled_every_second_at_most() -> None:
    call = Call(RetryPolicy(max_attempts=2))
    call.run(broken(), *[refused() for _ in range(300)])
    assert max(call.waits) <= 1.0 and call.now_s > 200


def test_absence_is_bounded_by_the_timeout_with_the_cause() -> None:
    call = Call(timeout_s=8.0)
    call.run(broken())
    with pytest.raises(Unavailable) as caught:
        call.run(*[refused() for _ in range(100)])
    assert str(caught.value).startswith("no Motet server responds at host:50051: Connection refused; not tried again: ")
    assert str(caught.value).endswith("s are left of timeout_s=8") and caught.value.reason == "SERVER_UNREACHABLE"
    assert 57.0 < call.now_s < 58.0


def test_server_that_was_never_reached_is_given_up_sooner() -> None:
    call = Call(RetryPolicy(connect_timeout_s=2.0))
    with pytest.raises(Unavailable, match=r"Connection refused; given up after connect_timeout_s=2$"):
        call.run(*[refused() for _ in range(100)])
    assert 51.0 < call.now_s < 52.0


@pytest.mark.parametrize("reached", [broken(), failed(), ResourceExhausted("full", retry_after_s=1.0)])
def test_any_response_or_connection_ends_the_connect_timeout(reached: MotetError) -> None:
    call = Call(RetryPolicy(connect_timeout_s=2.0))
    call.contact.failed(reached)
    call.run(*[refused() for _ in range(30)])
    assert call.now_s > 60.0


def test_absence_counts_from_the_last_sign_of_a_server() -> None:
    call = Call(RetryPolicy(max_absence_s=3.0, max_attempts=10))
    for _ in range(4):
        call.run(broken(), refused(), refused(), failed())
    with pytest.raises(Unavailable, match=r"given up after max_absence_s=3$"):
        call.run(*[refused() for _ in range(30)])


def test_what_may_not_be_made_twice_is_repeated_only_where_no_server_has_begun_it() -> None:
    call = Call()
    call.run(refused(), Unavailable("gone", reason="DRAINING"), refused(), is_repeatable=False)
    for error in (broken(), failed()):
        with pytest.raises(Unavailable):
            call.run(error, is_repeatable=False)


def test_a_change_that_was_made_is_not_repeated() -> None:
    reason, call = "AUDIT_LOG_DOWN", Call()
    call.run(Unavailable("refused", reason=reason, metadata={"change_made": "false"}))
    with pytest.raises(Unavailable, match=r"^the change was made$"):
        call.run(Unavailable("the change was made", reason=reason, metadata={"change_made": "true"}))
    assert len(call.waits) == 1


def test_a_stream_that_finds_no_room_on_its_connection_is_tried_again_until_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server is there and has begun nothing. It was taken for gone: warned of, and given up after an absence."""
    caplog.set_level(logging.INFO, "motet")
    full = Unavailable("Stream removed (RST_STREAM (Received RST_STREAM with error code 7))")
    call = Call(RetryPolicy(max_attempts=2, max_absence_s=3), timeout_s=60.0)
    with pytest.raises(Unavailable, match=r"^the server at host:50051 has no room for another call on .* not tried"):
        call.run(*[full for _ in range(1000)], is_repeatable=False)
    assert sum(call.waits) > 59 and max(call.waits) <= 0.3 and not caplog.messages


def test_errors_that_waiting_does_not_mend_are_raised_as_they_are() -> None:
    call = Call()
    for error in (InvalidArgument("no"), ResourceExhausted("full", retry_after_s=1.0), Cancelled("no", reason="X")):
        with pytest.raises(type(error)) as caught:
            call.run(error)
        assert caught.value is error


def test_deadline_of_the_call_says_what_came_before_it() -> None:
    call = Call(timeout_s=10.0)
    call.run(broken())
    with pytest.raises(DeadlineExceeded) as caught:
        call.run(DeadlineExceeded("Stream removed (Deadline Exceeded)"))
    assert str(caught.value) == (
        "the call had not ended within timeout_s=10; before that: the connection broke to the server at "
        "host:50051: Socket closed"
    )


def test_cancelled_by_the_server_is_an_absence() -> None:
    call = Call(RetryPolicy(max_attempts=2))
    call.run(*[Cancelled("") for _ in range(5)])
    with pytest.raises(Unavailable, match="the connection broke to the server at host:50051: the call was cancelled"):
        call.run(Cancelled(""), is_repeatable=False)


def test_loss_and_return_of_the_server_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "motet")
    call = Call()
    call.run(refused())
    assert caplog.messages == [], "it was never there"
    call.run(broken(), refused(), refused())
    call.attempts.progressed()
    call.run(Unavailable("shutting down", reason="DRAINING"))
    call.attempts.progressed()
    assert caplog.messages == [
        "server gone, calls are tried again until their timeout target=host:50051 "
        "error=the connection broke to the server at host:50051: Socket closed",
        "server responds again target=host:50051",
    ]


@pytest.mark.parametrize(
    "policy",
    [
        {"max_attempts": 0},
        {"initial_backoff_s": 0.0},
        {"multiplier": 0.5},
        {"max_backoff_s": 0.1},
        {"connect_timeout_s": -1.0},
        {"max_absence_s": float("nan")},
    ],
)
def test_policy_out_of_range_is_refused(policy: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(policy))):
        RetryPolicy(**policy)  # type: ignore[arg-type]  # one of each type


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:50051", "localhost:1", "[::1]:65535", "dns:///motet:50051", "unix:/run/motet.sock", "ipv4:127.0.0.1:5"],
)
def test_addresses_that_grpc_can_dial_are_taken_as_they_are(target: str) -> None:
    assert check_target(target) == target


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("127.0.0.1", "'127.0.0.1' has no port; give HOST:PORT, such as 127.0.0.1:50051"),
        ("", "'' has no port; give HOST:PORT, such as 127.0.0.1:50051"),
        ("::1", "'::1' has no port; give HOST:PORT, such as [::1]:50051"),
        (":50051", "':50051' has no host; give HOST:PORT, such as 127.0.0.1:50051"),
        ("host:", "'host:' has the port ''; a port is a number from 1 to 65535"),
        ("host:99999", "'host:99999' has the port '99999'; a port is a number from 1 to 65535"),
        ("host:http", "'host:http' has the port 'http'; a port is a number from 1 to 65535"),
        ("http://h:50051", "'http://h:50051' is a URL; give HOST:PORT without http://, such as h:50051"),
        ("http://me:pw@h:1", "'http://***@h:1' has a user or a password; give HOST:PORT alone"),
        ("me:p@w@h:1", "'***@h:1' has a user or a password; give HOST:PORT alone"),
        ("grpc://h:1/x", "'grpc://h:1/x' is a URL; give HOST:PORT without grpc://, such as h:1"),
    ],
)
def test_address_that_is_none_is_refused_with_the_way_to_write_it(target: str, advice: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_target(target)
    assert str(caught.value) == f"target: {advice}"


@pytest.mark.parametrize("timeout_s", [math.inf, 1e9, 3600, 0.0, -1.0])
def test_attempts_have_a_time_that_grpc_can_count(timeout_s: float) -> None:
    assert Call(timeout_s=timeout_s).attempts.remaining_s == max(min(timeout_s, 1e9), 0.0)


@pytest.mark.parametrize("timeout_s", [math.nan, 1.1e9, 1e300, None, "5", True])
def test_time_that_bounds_no_call_is_refused_by_name(timeout_s: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^timeout_s: is .*; give seconds, at most 1e\+09, or math\.inf"):
        Call(timeout_s=timeout_s)


def test_a_cause_that_is_over_is_not_returned_when_the_time_ends_later() -> None:
    call = Call(timeout_s=10.0)
    call.run(broken())
    call.attempts.progressed()
    assert str(call.attempts.timed_out("no token came")) == "no token came within timeout_s=10; allow more time"

"""When a call is tried again: the policy, and the decision after each failed attempt. No I/O.

gRPC's own retries are switched off (`channel.py`): unary calls, uploads and generations of both clients ask here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from motet.connection.contact import ServerContact, is_absence, is_made, is_refused_stream, is_said_by_server, is_undone
from motet.errors import Cancelled, DeadlineExceeded, MotetError, ResourceExhausted, Unavailable, invalid_field

MAX_TIMEOUT_S = 1e9  # 31 years; gRPC takes much longer ones for a time that is over

_MIN_BACKOFF_S = 0.01
# An attempt that finds no server ends on this machine, so it may be repeated often; how often the network is used is
# decided by the channel's own reconnect time.
_MAX_ABSENCE_BACKOFF_S = 1.0


@dataclass(frozen=True)
class RetryPolicy:
    """When UNAVAILABLE is tried again. The timeout of the call bounds everything; these fields bound it further.

    1. The server took the call and could not do it (reasons such as NO_WORKER, WORKER_LOST, STORE_DOWN): up to
       `max_attempts` attempts in a row.
    2. No server took the call (the connection is refused or broke, or the server shuts down): for `max_absence_s`.
    3. The same, and no server was ever reached by this client: for `connect_timeout_s`.
    4. The connection has as many calls as the server allows: until the call's timeout.

    A generation that gets a new token counts from the beginning.
    """

    max_attempts: int = 5  # attempts in a row that a server failed; 1: no call is ever tried again, for no reason
    initial_backoff_s: float = 0.3
    max_backoff_s: float = 5.0
    multiplier: float = 2.0
    max_absence_s: float | None = None  # seconds; None: until the call's timeout
    connect_timeout_s: float = 10.0  # seconds

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if not _MIN_BACKOFF_S <= self.initial_backoff_s <= self.max_backoff_s or self.multiplier < 1:
            raise ValueError(
                f"need {_MIN_BACKOFF_S} <= initial_backoff_s <= max_backoff_s and multiplier >= 1, got {self}"
            )
        if not self.connect_timeout_s >= 0 or not (self.max_absence_s is None or self.max_absence_s >= 0):
            raise ValueError(f"connect_timeout_s and max_absence_s are seconds from 0, got {self}")

    def backoff_s(self, attempt: int, generator: random.Random) -> float:
        """Time to wait before attempt `attempt` (from 1), with full jitter above half of it."""
        longest = min(self.initial_backoff_s * self.multiplier ** min(attempt - 1, 1000), self.max_backoff_s)
        return longest * (0.5 + 0.5 * generator.random())


def check_timeout_s(timeout_s: float) -> float:
    """`timeout_s`, if a call can be bounded by it. Raises InvalidArgument."""
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if is_number and (timeout_s <= MAX_TIMEOUT_S or timeout_s == math.inf):
        return timeout_s
    raise invalid_field(
        "timeout_s", f"is {timeout_s!r}; give seconds, at most {MAX_TIMEOUT_S:g}, or math.inf for no limit"
    )


class Attempts:
    """The attempts of one call of a user, whatever number of RPCs that takes."""

    def __init__(
        self,
        contact: ServerContact,
        policy: RetryPolicy,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        generator: random.Random,
    ) -> None:
        self.contact = contact
        self.timeout_s = check_timeout_s(timeout_s)
        self._policy = policy
        self._clock = clock
        self._generator = generator
        self._deadline_s = clock() + timeout_s
        self._num_failures = 0  # in a row, without progress
        self._num_absences = 0  # in a row, without progress
        self._absent_since_s: float | None = None  # of the absence that lasts
        self._last_error: MotetError | None = None  # that was tried again

    @property
    def remaining_s(self) -> float:
        """Seconds left for the next attempt, as gRPC can count them."""
        return min(max(self._deadline_s - self._clock(), 0.0), MAX_TIMEOUT_S)

    def progressed(self) -> None:
        """Something new arrived: failures so far do not count any more."""
        self._num_failures = self._num_absences = 0
        self._absent_since_s = None
        self._last_error = None
        self.contact.responded()

    def after(self, error: MotetError, *, is_repeatable: bool) -> float:
        """Seconds to wait before the next attempt, after one that ended with `error`. Raises what is final.

        A call that must not be made twice is tried again only where no server can have begun it. Not for calls that the
        user cancelled: here, CANCELLED comes from a server that goes away.
        """
        error = as_broken(error)
        self.contact.failed(error)
        if isinstance(error, DeadlineExceeded) and not is_said_by_server(error):
            raise self.timed_out("the call had not ended") from error
        if not isinstance(error, Unavailable) or self._policy.max_attempts == 1 or is_made(error):
            raise self.contact.explained(error)
        if not is_repeatable and not is_undone(error):
            raise self.contact.explained(error)
        if is_refused_stream(error):
            self._absent_since_s = None
            delay_s = self._policy.backoff_s(1, self._generator)
        elif is_absence(error):
            delay_s = self._after_absence(error)
        else:
            self._absent_since_s = None
            self._num_failures += 1
            if self._num_failures >= self._policy.max_attempts:
                raise error
            delay_s = self._policy.backoff_s(self._num_failures, self._generator)
        return self._in_time(error, delay_s)

    def when_there_is_room(self, error: ResourceExhausted) -> float:
        """Seconds to wait before an attempt that was refused for want of room is made again. Raises what is final."""
        self.contact.failed(error)
        self._absent_since_s = None
        if error.retry_after_s is None or self._policy.max_attempts == 1:
            raise error
        return self._in_time(error, self._policy.backoff_s(1, self._generator))

    def timed_out(self, what: str) -> DeadlineExceeded:
        """The error for a call whose time ran out; `what` did not happen within it."""
        more = "allow more time"
        if self._last_error is not None:
            more = f"before that: {self.contact.explained(self._last_error).message}"
        return DeadlineExceeded(f"{what} within timeout_s={self.timeout_s:g}; {more}", reason="DEADLINE_EXCEEDED")

    def _after_absence(self, error: MotetError) -> float:
        now_s = self._clock()
        if self._absent_since_s is None:
            self._absent_since_s = now_s
        was_reached = self.contact.was_reached
        limit_s = self._policy.max_absence_s if was_reached else self._policy.connect_timeout_s
        self._num_absences += 1
        delay_s = min(self._policy.backoff_s(self._num_absences, self._generator), _MAX_ABSENCE_BACKOFF_S)
        if limit_s is not None and now_s + delay_s - self._absent_since_s > limit_s:
            limit = f"max_absence_s={limit_s:g}" if was_reached else f"connect_timeout_s={limit_s:g}"
            raise self.contact.explained(error).extended(f"given up after {limit}")
        return delay_s

    def _in_time(self, error: MotetError, delay_s: float) -> float:
        """`delay_s`, or the server's wait if that is longer. Raises `error` if the call's time is over by then."""
        delay_s = max(delay_s, error.retry_after_s or 0.0)
        remaining_s = self.remaining_s
        if delay_s >= remaining_s:
            raise self.contact.explained(error).extended(
                f"not tried again: {remaining_s:.3g} s are left of timeout_s={self.timeout_s:g}"
            )
        self._last_error = error
        return delay_s


def as_broken(error: MotetError) -> MotetError:
    """`error`; but Unavailable for a CANCELLED that this client did not cause: the server closed its port."""
    if not isinstance(error, Cancelled) or is_said_by_server(error):
        return error
    broken = Unavailable(f"the call was cancelled there ({error.message})")
    broken.__cause__ = error
    return broken

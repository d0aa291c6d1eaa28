"""A lease on a remote store: one control plane at a time, kept by documents that are written only where none is.

    leases/{number}.json        the highest number holds the store; its owner rewrites it every few seconds

A lease whose document did not change for `LEASE_S` is void, and the next number may be taken. Two who take one number
cannot both succeed, and one that lost its lease finds a higher number. No clocks of two machines are compared.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

from control_plane.registry.store.store import KeyExists, Store, replace

logger = logging.getLogger(__name__)

LEASE_S = 15.0
RENEW_INTERVAL_S = 4.0
_DIRECTORY = "leases"


class LeaseTaken(OSError):
    """Another control plane holds the store."""


class LeaseUnsupported(OSError):
    """The store writes over a file that it was to create only where none is."""


class LeaseLost(OSError):
    """The lease is not held at this moment: nothing may be changed."""


class StoreLease:
    """`acquire`, then `check` before and after every change, then `release`. Renews itself in a thread of its own."""

    def __init__(
        self,
        bucket: Store,
        *,
        takes_over: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
        renew_interval_s: float = RENEW_INTERVAL_S,
        renews: bool = True,
    ) -> None:
        """`takes_over`: the operator says that no other process uses the store, so an earlier lease is ignored.

        `renews`: in a thread of its own, from `acquire` to `release`.
        """
        self._bucket = bucket
        self._takes_over = takes_over
        self._clock = clock  # monotonic, seconds
        self._renew_interval_s = renew_interval_s
        self._renews = renews
        self._stop = threading.Event()
        self._wait: Callable[[float], object] = wait or self._stop.wait
        self._owner = {"owner": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self._number = 0  # 0: none is held
        self._num_renewals = 0
        self._held_until_s = float("-inf")
        self._is_lost = False  # to somebody else, for good
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease, after waiting for one whose owner shows no life. Raises LeaseTaken or LeaseUnsupported."""
        last = self._highest()
        seen = self._read(last) if last else None
        if seen is not None and not self._takes_over:
            seen = self._wait_until_void(last, seen)
        started_s = self._clock()
        try:
            self._bucket.put_if_absent(_path(last + 1), self._document())
        except KeyExists as error:
            raise LeaseTaken("another control plane took the store just now") from error
        # 1. Somebody who slept since it looked may have taken a number that was gone by already.
        # 2. The owner of the last lease may have woken up while we took the next one.
        if self._highest() != last + 1 or (seen is not None and not self._takes_over and self._read(last) != seen):
            self._bucket.delete(_path(last + 1))
            raise LeaseTaken("another control plane uses the store")
        self._check_creation(last + 1)
        self._number = last + 1
        self._held_until_s = started_s + LEASE_S
        for name in self._names():
            if 0 < _number_of(name) < last:  # the last one stays: whoever looks at it finds ours beside it
                self._bucket.delete(f"{_DIRECTORY}/{name}")
        if self._renews:
            self._thread = threading.Thread(target=self._renew_for_ever, name="motet-lease", daemon=True)
            self._thread.start()
        logger.info("store lease taken number=%d", self._number)

    def check(self) -> None:
        """Raise LeaseLost unless the store is ours at this moment. Not acquired: no check."""
        if self._number and (self._is_lost or self._clock() >= self._held_until_s):
            raise LeaseLost(
                "another control plane took the store over" if self._is_lost else "the lease could not be renewed"
            )

    def renew(self) -> None:
        """Show life. Raises OSError where the store does not respond."""
        started_s = self._clock()
        self._num_renewals += 1
        replace(self._bucket, _path(self._number), self._document())
        if self._highest() > self._number:
            self._is_lost = True
            logger.error("store lease lost to another control plane number=%d", self._number)
        else:
            self._held_until_s = started_s + LEASE_S

    def release(self) -> None:
        """Let the next control plane begin at once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(RENEW_INTERVAL_S)
            self._thread = None
        if self._number and not self._is_lost:
            try:
                replace(self._bucket, _path(self._number), self._document(is_released=True))
            except OSError as error:
                logger.warning("store lease not released, it ends by itself error=%s", error)
        self._number = 0

    def _check_creation(self, number: int) -> None:
        """Raise LeaseUnsupported unless the store refuses to create what is there: some ignore the condition."""
        try:
            # Other content: a retried request that finds its own content counts as a success.
            self._bucket.put_if_absent(_path(number), self._document() + b" ")
        except KeyExists:
            return
        self._bucket.delete(_path(number))
        raise LeaseUnsupported("the store writes over a file that it was to create only where none is")

    def _wait_until_void(self, number: int, seen: bytes) -> bytes:
        """Wait until the lease is released or showed no life for its time; its last document."""
        owner = _decode(seen)
        name = f"host={owner.get('host')} pid={owner.get('pid')}"
        void_at_s = self._clock() + LEASE_S
        while not _is_released(seen) and (left_s := void_at_s - self._clock()) > 0:
            logger.warning("waiting for the store's last lease to end left_s=%.0f %s", left_s, name)
            self._wait(min(left_s, RENEW_INTERVAL_S))
            present = self._read(number)
            if self._highest() > number or (present != seen and not _is_released(present)):
                raise LeaseTaken(f"another control plane uses the store ({name})")
            seen = present
        return seen

    def _renew_for_ever(self) -> None:
        while not self._stop.wait(self._renew_interval_s) and not self._is_lost:
            try:
                self.renew()
            except Exception as error:  # the thread's edge: whatever a file system raises
                logger.warning("store lease not renewed error=%r", error)

    def _names(self) -> list[str]:
        return [entry.name for entry in self._bucket.list(_DIRECTORY)]

    def _highest(self) -> int:
        return max(map(_number_of, self._names()), default=0)

    def _read(self, number: int) -> bytes:
        try:
            return self._bucket.get(_path(number))[0]
        except FileNotFoundError:
            return b""

    def _document(self, *, is_released: bool = False) -> bytes:
        return json.dumps(self._owner | {"num_renewals": self._num_renewals, "is_released": is_released}).encode()


def _path(number: int) -> str:
    return f"{_DIRECTORY}/{number:012d}.json"


def _number_of(name: str) -> int:
    """The number of a lease's document; 0 for any other name."""
    stem = name.removesuffix(".json")
    return int(stem) if name.endswith(".json") and stem.isascii() and stem.isdecimal() else 0


def _is_released(document: bytes) -> bool:
    return _decode(document).get("is_released") is True


def _decode(document: bytes) -> dict[str, object]:
    try:
        value = json.loads(document)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""One control plane on one bucket: the lease, its end and every way to take it over."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from control_plane.registry.store.remote_files import RemoteFiles
from control_plane.registry.store.store_lease import LEASE_S, LeaseLost, LeaseTaken, StoreLease


class Bucket:
    """A bucket in memory, and the control planes that look at it, all on one clock that tests move."""

    def __init__(self) -> None:
        from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

        self.files = RemoteFiles(MemoryFileSystem(), f"lease-{uuid.uuid4().hex}")
        self.now_s = 100.0
        self.while_waiting: Callable[[], None] = lambda: None

    def lease(self, *, takes_over: bool = False) -> StoreLease:
        """Of one more control plane. Its own thread never runs: tests renew."""
        return StoreLease(self.files, takes_over=takes_over, clock=lambda: self.now_s, wait=self._wait, renews=False)

    def _wait(self, timeout_s: float) -> None:
        self.while_waiting()
        self.now_s += timeout_s

    @property
    def documents(self) -> list[str]:
        return self.files.names("leases")


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def test_a_second_control_plane_is_refused_while_the_first_renews(bucket: Bucket) -> None:
    first, second = bucket.lease(), bucket.lease()
    first.acquire()
    bucket.while_waiting = first.renew
    with pytest.raises(LeaseTaken, match=r"another control plane uses the store \(host=.+ pid=\d+\)"):
        second.acquire()
    bucket.now_s += 0.5 * LEASE_S
    first.check()
    second.check()  # never had it: no check


def test_a_lease_that_was_given_back_is_taken_at_once(bucket: Bucket) -> None:
    first, second = bucket.lease(), bucket.lease()
    first.acquire()
    first.release()
    before_s = bucket.now_s
    second.acquire()
    assert bucket.now_s == before_s
    second.check()
    assert bucket.documents == ["000000000001.json", "000000000002.json"]


def test_the_lease_of_a_killed_control_plane_is_waited_for(bucket: Bucket) -> None:
    bucket.lease().acquire()
    before_s = bucket.now_s
    second = bucket.lease()
    second.acquire()
    assert bucket.now_s == before_s + LEASE_S
    second.check()


def test_a_lease_that_is_given_back_during_the_wait_is_taken(bucket: Bucket) -> None:
    first, second = bucket.lease(), bucket.lease()
    first.acquire()
    bucket.while_waiting = first.release
    before_s = bucket.now_s
    second.acquire()
    assert bucket.now_s < before_s + LEASE_S
    second.check()


def test_the_operators_word_takes_a_lease_over_at_once_and_the_former_owner_finds_out(bucket: Bucket) -> None:
    first, second = bucket.lease(), bucket.lease(takes_over=True)
    first.acquire()
    before_s = bucket.now_s
    second.acquire()
    assert bucket.now_s == before_s
    first.renew()
    with pytest.raises(LeaseLost, match="another control plane took the store over"):
        first.check()
    first.release()  # changes nothing of the second one's
    second.renew()
    second.check()


def test_a_lease_that_is_not_renewed_in_time_is_no_lease(bucket: Bucket) -> None:
    lease = bucket.lease()
    lease.acquire()
    bucket.now_s += LEASE_S
    with pytest.raises(LeaseLost, match="could not be renewed"):
        lease.check()
    lease.renew()  # nobody took it meanwhile
    lease.check()


def test_an_owner_that_wakes_up_while_its_lease_is_taken_keeps_it(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for a higher number before there is one, and the one who takes it looks at the owner after that."""
    first, second = bucket.lease(), bucket.lease()
    first.acquire()
    create = bucket.files.create

    def renew_and_create(path: str, data: bytes) -> None:
        first.renew()
        create(path, data)

    monkeypatch.setattr(bucket.files, "create", renew_and_create)
    with pytest.raises(LeaseTaken):
        second.acquire()
    first.renew()
    first.check()
    assert bucket.documents == ["000000000001.json"]


def test_of_two_that_take_one_lease_one_gets_it(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.lease().acquire()
    second, third = bucket.lease(), bucket.lease()
    create = bucket.files.create

    def be_slower(path: str, data: bytes) -> None:
        monkeypatch.setattr(bucket.files, "create", create)
        third.acquire()
        create(path, data)

    monkeypatch.setattr(bucket.files, "create", be_slower)
    with pytest.raises(LeaseTaken, match="just now"):
        second.acquire()
    third.check()


def test_who_slept_over_two_take_overs_takes_no_number_that_is_gone(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.lease().acquire()
    sleeper = bucket.lease()
    create = bucket.files.create

    def sleep_long(path: str, data: bytes) -> None:
        monkeypatch.setattr(bucket.files, "create", create)
        for _ in range(3):
            last = bucket.lease()
            last.acquire()
            last.release()
        create(path, data)

    monkeypatch.setattr(bucket.files, "create", sleep_long)
    with pytest.raises(LeaseTaken):
        sleeper.acquire()
    assert bucket.documents == ["000000000003.json", "000000000004.json"]


def test_other_files_beside_the_leases_are_ignored(bucket: Bucket) -> None:
    for name in ("x.json", "12.txt", "-3.json", "٣.json"):
        bucket.files.replace(f"leases/{name}", b"{}")
    bucket.files.replace("leases/000000000007.json", b"[" * 100_000)
    bucket.lease().acquire()
    assert "000000000008.json" in bucket.documents


def test_a_lease_renews_itself(bucket: Bucket) -> None:
    renewed = StoreLease(bucket.files, renew_interval_s=0.01)
    renewed.acquire()
    first = bucket.files.read("leases/000000000001.json")
    while bucket.files.read("leases/000000000001.json") == first:
        pass
    renewed.release()
    assert b'"is_released": true' in bucket.files.read("leases/000000000001.json")

"""One control plane on one bucket: the lease, its end and every way to take it over."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from control_plane.registry.store.bucket import Bucket, memory_store
from control_plane.registry.store.store import replace
from control_plane.registry.store.store_lease import LEASE_S, LeaseLost, LeaseTaken, StoreLease


class SharedBucket:
    """A bucket in memory, and the control planes that look at it, all on one clock that tests move."""

    def __init__(self) -> None:
        self.files = Bucket(memory_store(f"lease-{uuid.uuid4().hex}"))
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
        return [entry.name for entry in self.files.list("leases")]


@pytest.fixture
def bucket() -> SharedBucket:
    return SharedBucket()


def test_a_second_control_plane_is_refused_while_the_first_renews(bucket: SharedBucket) -> None:
    first, second = bucket.lease(), bucket.lease()
    first.acquire()
    bucket.while_waiting = first.renew
    with pytest.raises(LeaseTaken, match=r"another control plane uses the store \(host=.+ pid=\d+\)"):
        second.acquire()
    bucket.now_s += 0.5 * LEASE_S
    first.check()
    second.check()  # never had it: no check


def test_a_lease_that_was_given_back_is_taken_at_once(bucket: SharedBucket) -> None:
    first, second = bucket.lease(), bucket.lease()
    first.acquire()
    first.release()
    before_s = bucket.now_s
    second.acquire()
    assert bucket.now_s == before_s
    second.check()
    assert bucket.documents == ["000000000001.json", "000000000002.json"]


def test_the_lease_of_a_killed_control_plane_is_waited_for(bucket: SharedBucket) -> None:
    bucket.lease().acquire()
    before_s = bucket.now_s
    second = bucket.lease()
    second.acquire()
    assert bucket.now_s == before_s + LEASE_S
    second.check()


def test_a_lease_that_is_given_back_during_the_wait_is_taken(bucket: SharedBucket) -> None:
    first, second = bucket.lease(), bucket.lease()
    first.acquire()
    bucket.while_waiting = first.release
    before_s = bucket.now_s
    second.acquire()
    assert bucket.now_s < before_s + LEASE_S
    second.check()


def test_the_operators_word_takes_a_lease_over_at_once_and_the_former_owner_finds_out(bucket: SharedBucket) -> None:
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


def test_a_lease_that_is_not_renewed_in_time_is_no_lease(bucket: SharedBucket) -> None:
    lease = bucket.lease()
    lease.acquire()
    bucket.now_s += LEASE_S
    with pytest.raises(LeaseLost, match="could not be renewed"):
        lease.check()
    lease.renew()  # nobody took it meanwhile
    lease.check()


def test_an_owner_that_wakes_up_while_its_lease_is_taken_keeps_it(
    bucket: SharedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for a higher number before there is one, and the one who takes it looks at the owner after that."""
    first, second = bucket.lease(), bucket.lease()
    first.acquire()
    create = bucket.files.put_if_absent

    def renew_and_create(path: str, data: bytes) -> str:
        first.renew()
        return create(path, data)

    monkeypatch.setattr(bucket.files, "put_if_absent", renew_and_create)
    with pytest.raises(LeaseTaken):
        second.acquire()
    first.renew()
    first.check()
    assert bucket.documents == ["000000000001.json"]


def test_of_two_that_take_one_lease_one_gets_it(bucket: SharedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.lease().acquire()
    second, third = bucket.lease(), bucket.lease()
    create = bucket.files.put_if_absent

    def be_slower(path: str, data: bytes) -> str:
        monkeypatch.setattr(bucket.files, "put_if_absent", create)
        third.acquire()
        return create(path, data)

    monkeypatch.setattr(bucket.files, "put_if_absent", be_slower)
    with pytest.raises(LeaseTaken, match="just now"):
        second.acquire()
    third.check()


def test_who_slept_over_two_take_overs_takes_no_number_that_is_gone(
    bucket: SharedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.lease().acquire()
    sleeper = bucket.lease()
    create = bucket.files.put_if_absent

    def sleep_long(path: str, data: bytes) -> str:
        monkeypatch.setattr(bucket.files, "put_if_absent", create)
        for _ in range(3):
            last = bucket.lease()
            last.acquire()
            last.release()
        return create(path, data)

    monkeypatch.setattr(bucket.files, "put_if_absent", sleep_long)
    with pytest.raises(LeaseTaken):
        sleeper.acquire()
    assert bucket.documents == ["000000000003.json", "000000000004.json"]


def test_other_files_beside_the_leases_are_ignored(bucket: SharedBucket) -> None:
    for name in ("x.json", "12.txt", "-3.json", "٣.json"):
        replace(bucket.files, f"leases/{name}", b"{}")
    replace(bucket.files, "leases/000000000007.json", b"[" * 100_000)
    bucket.lease().acquire()
    assert "000000000008.json" in bucket.documents


def test_a_lease_renews_itself(bucket: SharedBucket) -> None:
    renewed = StoreLease(bucket.files, renew_interval_s=0.01)
    renewed.acquire()
    first = bucket.files.get("leases/000000000001.json")[0]
    while bucket.files.get("leases/000000000001.json")[0] == first:
        pass
    renewed.release()
    assert b'"is_released": true' in bucket.files.get("leases/000000000001.json")[0]

"""Which LoRA tasks are cached, within a budget, and what running requests keep."""

from __future__ import annotations

import pytest

from control_plane.errors import Exhausted, InvalidRequest, LoraTaskTaken
from control_plane.host_cache.task_cache import TaskBlob, TaskCache, TaskKey


class _EmptyStore:
    def read_manifest(self, digest: str) -> bytes:
        raise FileNotFoundError(digest)

    def read_range(self, digest: str, index: int, start: int, size_bytes: int) -> bytes:
        raise FileNotFoundError(digest)


def _cache(budget_bytes: int = 100) -> tuple[TaskCache, list[str]]:
    cache, forgotten = TaskCache(_EmptyStore(), budget_bytes=budget_bytes), list[str]()
    cache.on_forgotten = forgotten.append
    return cache, forgotten


def _blob(digest: str, size_bytes: int = 40) -> TaskBlob:
    return TaskBlob(digest, b"m" * 10, [digest.encode() * (size_bytes - 10)])


def _key(task_id: int, tenant: str = "acme") -> TaskKey:
    return TaskKey(tenant, task_id)


def test_the_least_recently_used_task_makes_room() -> None:
    cache, forgotten = _cache()
    cache.add(_key(1), _blob("a"))
    cache.add(_key(2), _blob("b"))
    assert cache.digest_of(_key(1)) == "a"  # a use
    cache.add(_key(3), _blob("c"))
    assert [cache.digest_of(_key(task_id)) for task_id in (1, 2, 3)] == ["a", None, "c"]
    assert forgotten == ["b"] and cache.used_bytes == 80
    assert cache.read_manifest("a") == b"m" * 10 and cache.read_range("a", 0, 2, 3) == b"aaa"
    with pytest.raises(FileNotFoundError):
        cache.read_manifest("b")


def test_an_id_of_another_tenant_does_not_exist() -> None:
    cache, _ = _cache()
    cache.add(_key(1), _blob("a"))
    assert cache.digest_of(_key(1, "globex")) is None
    cache.add(_key(1, "globex"), _blob("b"))
    assert cache.digest_of(_key(1)) == "a"


def test_equal_weights_are_counted_once_and_stay_until_the_last_task_is_gone() -> None:
    cache, forgotten = _cache()
    cache.add(_key(1), _blob("a"))
    cache.add(_key(2), _blob("a"))
    assert cache.used_bytes == 40
    cache.add(_key(3), _blob("b", 60))
    assert forgotten == [] and cache.used_bytes == 100
    cache.add(_key(4), _blob("c", 40))
    assert forgotten == ["a"] and cache.digest_of(_key(1)) is None and cache.digest_of(_key(2)) is None


def test_other_weights_under_the_same_id_are_refused() -> None:
    cache, _ = _cache()
    cache.add(_key(7), _blob("a"))
    cache.add(_key(7), _blob("a"))
    with pytest.raises(LoraTaskTaken, match="task 7 is cached with other weights, of digest a; use another id"):
        cache.add(_key(7), _blob("b"))
    assert cache.digest_of(_key(7)) == "a" and not cache.has_digest("b")


def test_weights_that_never_fit_are_refused_with_bytes_and_flag() -> None:
    cache, _ = _cache()
    with pytest.raises(InvalidRequest, match=r"101 bytes when packed; .* at most 100 bytes .*--task-cache-bytes"):
        cache.add(_key(1), _blob("a", 101))


def test_weights_of_running_requests_are_not_forgotten() -> None:
    cache, forgotten = _cache()
    cache.add(_key(1), _blob("a", 60))
    with cache.lease("a"):
        with pytest.raises(Exhausted, match="leave less than 60 of the 100 bytes"):
            cache.add(_key(2), _blob("b", 60))
        cache.add(_key(3), _blob("c", 40))
        assert cache.digest_of(_key(1)) == "a" and forgotten == []
    assert cache.digest_of(_key(1)) == "a"  # a task stays when its requests have ended
    cache.add(_key(2), _blob("b", 60))
    assert forgotten == ["c", "a"]

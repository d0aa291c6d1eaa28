"""The host cache in Redis: keys and parts of docs/protocol.md, blocking I/O in a few threads, a circuit breaker.

Any failure (down, hung, loading, read-only, full) turns into "not cached" within a second; a watcher tries again with
growing pauses and reads the keys again before it trusts anything there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import redis

from contract.cache_keys import PREFIX, chunk_keys, manifest_key, num_parts, part_key
from contract.process_log import shown
from contract.redis_access import RedisAccess, reason_of, without_arguments
from control_plane.host_cache.base import CacheAddress
from control_plane.host_cache.ledger import Ledger, Sizes
from control_plane.host_cache.packed import read_layout
from control_plane.host_cache.redis_client import MARKER_KEY, find_wrong_permission, make_client
from control_plane.observers.timings import NO_TIMINGS, Timings

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 1.0
SCAN_TIMEOUT_S = 30.0
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
WATCH_INTERVAL_S = 1.0
_THREADS = 4
_WRITES_AT_ONCE = 2  # of one adapter: Redis would wait for us between two parts. 20 MB: 28 ms -> 10
_NOT_TRIED = "not tried yet"
_T = TypeVar("_T")


class _CacheDown(Exception):
    """A call to Redis failed; the failure is in the log already."""


class RedisHostCache:
    """See base.HostCache. Make it inside a running event loop."""

    def __init__(
        self,
        access: RedisAccess,
        *,
        worker_address: CacheAddress | None = None,
        worker_access: RedisAccess | None = None,
        budget_bytes: int,
        call_timeout_s: float = CALL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        timings: Timings = NO_TIMINGS,
    ) -> None:
        """`worker_access`: how workers use it, to see what they may do; None: that is known or cannot be seen."""
        self.worker_address = worker_address or CacheAddress()
        self.budget_bytes = budget_bytes
        self.on_available: Callable[[], None] | None = None
        self.is_available = False  # until the first look at the keys
        self._call_timeout_s = call_timeout_s
        self._clock = clock  # monotonic, seconds
        self._timings = timings
        self._random = random.Random(seed)
        self._ledger = Ledger(budget_bytes)
        self._client = make_client(access, call_timeout_s, max_connections=2 * _THREADS)
        self._worker_access = worker_access
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="motet-redis")
        self._marker = b""  # what the marker key held when the keys were last read
        self.num_scans = 0  # a write that spans a scan gives up: the scan has removed its parts
        self._is_scanning = False
        self._pause_s = FIRST_PAUSE_S
        self._writes_after_s = float("-inf")  # Redis refused to write; reads may go on
        self._error = _NOT_TRIED  # why it is not available; meaningless while it is
        self._check_lock = asyncio.Lock()
        self._removal_lock = asyncio.Lock()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    @property
    def error(self) -> str:
        """See base.HostCache."""
        return "" if self.is_available else self._error

    @property
    def digests(self) -> Sequence[str]:
        """See base.HostCache."""
        return self._ledger.digests

    @property
    def used_bytes(self) -> int:
        """See base.HostCache."""
        return self._ledger.used_bytes

    @property
    def pinned_bytes(self) -> int:
        """See base.HostCache."""
        return self._ledger.pinned_bytes

    @property
    def num_evicted(self) -> int:
        """See base.HostCache."""
        return self._ledger.num_evicted

    def contains(self, digest: str) -> bool:
        """See base.HostCache."""
        return self.is_available and digest in self._ledger

    def touch(self, digest: str) -> None:
        """See base.HostCache."""
        self._ledger.touch(digest)

    def pin(self, digest: str, size_bytes: int, holder: str = "") -> None:
        """See base.HostCache."""
        self._ledger.pin(digest, size_bytes, holder)

    def unpin(self, digest: str, holder: str = "") -> None:
        """See base.HostCache."""
        self._ledger.unpin(digest, holder)

    async def read_manifest(self, digest: str) -> bytes | None:
        """See base.HostCache."""
        self._ledger.touch(digest)
        with contextlib.suppress(_CacheDown):
            return await self._read(manifest_key(digest))
        return None

    async def read_part(self, digest: str, index: int, part: int) -> bytes | None:
        """See base.HostCache."""
        sizes = self._ledger.sizes(digest)
        if sizes is None or index + 1 >= len(sizes) or part >= num_parts(sizes[index + 1]):
            return None
        with contextlib.suppress(_CacheDown):
            return await self._read(part_key(digest, index, part))
        return None

    async def write(self, digest: str, manifest: bytes, sizes: Sequence[int], parts: AsyncIterator[bytes]) -> bool:
        """See base.HostCache."""
        # A scan takes what is not whole yet for leftovers: it ends writes under way, and none begins beside it.
        if not self.is_available or self._is_scanning or self._clock() < self._writes_after_s:
            return False
        all_sizes = (len(manifest), *sizes)
        if not await self._remove_leaving() or self._is_scanning:
            return False
        num_scans = self.num_scans
        if not self._ledger.reserve(digest, all_sizes):
            return False
        if not await self._remove_leaving():
            self._ledger.release(digest)
            self._ledger.left(digest)  # nothing of it was written
            return False
        is_whole = False
        try:
            await self._set_all([key for i, size in enumerate(sizes) for key in chunk_keys(digest, i, size)], parts)
            if num_scans == self.num_scans:
                await self._call(self._client.set, manifest_key(digest), manifest)
            is_whole = num_scans == self.num_scans
        except _CacheDown:
            pass
        finally:
            if is_whole:
                self._ledger.commit(digest)
                self._pause_s = FIRST_PAUSE_S
            elif num_scans == self.num_scans:
                self._ledger.release(digest)
                await self._remove_leaving()
            else:  # a scan ended the reservation, and removed what was written before it
                with contextlib.suppress(_CacheDown):
                    await self._unlink(digest, all_sizes)
        return is_whole

    async def _set_all(self, keys: Sequence[str], parts: AsyncIterator[bytes]) -> None:
        """Set each key to the next part. None is under way when this returns or raises."""
        pending: set[asyncio.Task[Any]] = set()
        try:
            for key in keys:
                data = await anext(parts)
                if len(pending) == _WRITES_AT_ONCE:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                pending.add(asyncio.create_task(self._call(self._client.set, key, data)))
            await asyncio.gather(*pending)
        finally:
            if pending:
                await asyncio.wait(pending)

    async def drop(self, digest: str) -> None:
        """See base.HostCache."""
        self._ledger.remove(digest)
        await self._remove_leaving()

    async def check(self) -> None:
        """See whether Redis responds and still has our marker. If not, trust nothing until its keys are read."""
        async with self._check_lock:
            was_available, error = self.is_available, self._error
            try:
                marker = await self._call(self._get, MARKER_KEY, is_probe=True)
                if was_available and self.is_available and marker is not None and marker == self._marker:
                    return
                await self._scan()
            except _CacheDown:
                return
            self.is_available = True
            self._error = ""
            self._pause_s = FIRST_PAUSE_S
            await self._check_worker_access()
            logger.info(
                "host cache available num_adapters=%d used_bytes=%d",
                len(self.digests),
                self.used_bytes,
                extra=shown("host cache responds") if error not in ("", _NOT_TRIED) else None,
            )
            if self.on_available is not None:
                self.on_available()

    async def close(self) -> None:
        """See base.HostCache."""
        self._watcher.cancel()
        await asyncio.wait([self._watcher])
        self.is_available = False
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    # ---- below: how ----

    async def _watch(self) -> None:
        while True:
            try:
                await self.check()
            except Exception as error:  # the loop's edge
                self._note_error(error)
                logger.exception("host cache check failed")
            await asyncio.sleep(
                WATCH_INTERVAL_S if self.is_available else self._pause_s * self._random.uniform(0.8, 1.2)
            )

    async def _check_worker_access(self) -> None:
        """Warn if the workers' user can do more than it needs, or less. Nobody else would notice."""
        if self._worker_access is None:
            return
        try:
            wrong = await self._call(find_wrong_permission, self._worker_access, self._call_timeout_s)
        except _CacheDown:
            return
        if wrong is not None:
            logger.warning("host cache: %s; give the user the permissions of docs/security.md (Secrets)", wrong)

    async def _read(self, key: str) -> bytes | None:
        return await self._call(self._get, key)

    def _get(self, key: str) -> bytes | None:
        """The value, read in a thread. Also None for a key of another type, which is not ours: it is replaced."""
        try:
            value: bytes | None = self._client.get(key)
        except redis.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            return None
        return value

    async def _call(self, function: Callable[..., _T], *arguments: Any, is_probe: bool = False) -> _T:
        """Run one blocking call in a thread. Raises _CacheDown on any failure.

        A cancelled or timed-out caller leaves the thread to end the call by itself, within the socket's timeout, on a
        connection that no other call gets meanwhile.
        """
        if not (self.is_available or is_probe):
            raise _CacheDown
        timeout_s = SCAN_TIMEOUT_S if function == self._scan_keys else self._call_timeout_s
        begun_s = self._clock()
        try:
            async with asyncio.timeout(timeout_s):
                result = await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
            self._timings.cache_call(self._clock() - begun_s, is_ok=True)
            return result
        except (redis.RedisError, OSError, TimeoutError, RuntimeError) as error:
            self._timings.cache_call(self._clock() - begun_s, is_ok=False)
            self._note_error(error)
            raise _CacheDown from error

    def _note_error(self, error: Exception) -> None:
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        # Redis responds, and refuses: out of memory, read-only, not permitted. Reads may still work.
        if self.is_available and isinstance(error, redis.ResponseError):
            self._writes_after_s = self._clock() + self._pause_s
            logger.warning("host cache refuses a command reason=%s pause_s=%.2f", reason_of(error), self._pause_s)
            return
        reason = reason_of(error)
        if self.is_available or reason != self._error:  # once for each change: it is tried again every few seconds
            sentence = f"the host cache cannot be used: {reason}; adapters are read from the store until Redis responds"
            logger.warning(
                "host cache not available reason=%s error=%s", reason, without_arguments(error), extra=shown(sentence)
            )
        self.is_available = False
        self._error = reason

    async def _remove_leaving(self) -> bool:
        """Remove what the ledger gave up. Returns whether all is removed. The rest is tried again before each write."""
        try:
            async with self._removal_lock:  # what another caller removed may be written again by then
                for digest, sizes in self._ledger.leaving:
                    await self._unlink(digest, sizes)
                    self._ledger.left(digest)
        except _CacheDown:
            return False
        return True

    async def _unlink(self, digest: str, sizes: Sizes) -> None:
        """Remove an adapter's keys, the manifest first."""
        await self._call(self._client.unlink, manifest_key(digest))
        keys = [key for index, size in enumerate(sizes[1:]) for key in chunk_keys(digest, index, size)]
        if keys:
            await self._call(self._client.unlink, *keys)

    async def _scan(self) -> None:
        """Make the ledger what Redis holds; remove what is not whole or exceeds the budget."""
        self.num_scans += 1
        self._is_scanning = True
        try:
            marker, found = await self._call(self._scan_keys, is_probe=True)
        finally:
            self._is_scanning = False
        self._marker = marker
        self.is_available = True
        self._ledger.replace_all(found)
        await self._remove_leaving()

    def _scan_keys(self) -> tuple[bytes, dict[str, Sizes]]:
        """The marker, and whole adapters with their sizes, read in a thread. Other keys of ours are removed."""
        own = secrets.token_hex(16)
        self._client.set(MARKER_KEY, own, nx=True)
        marker = self._get(MARKER_KEY)
        if marker is None:
            self._client.set(MARKER_KEY, own)
            marker = own.encode()
        keys_by_digest: dict[str, set[str]] = {}
        for raw in self._client.scan_iter(match=PREFIX + "*", count=1000):
            key = raw.decode("utf-8", "replace")
            keys_by_digest.setdefault(key[len(PREFIX) :].split(":")[0], set()).add(key)
        found = {}
        for digest, keys in sorted(keys_by_digest.items()):
            sizes = self._whole_sizes(digest, keys)
            if sizes is not None:
                found[digest] = sizes
            else:
                self._client.unlink(manifest_key(digest), *keys)
        return marker, found

    def _whole_sizes(self, digest: str, keys: set[str]) -> Sizes | None:
        manifest = self._get(manifest_key(digest)) if manifest_key(digest) in keys else None
        layout = read_layout(digest, manifest) if manifest is not None else None
        if layout is None:
            return None
        # Counted before they are made: a manifest of somebody else may claim chunks without end.
        if len(keys) != 1 + sum(map(num_parts, layout.sizes)):
            return None
        expected = {key for index, size in enumerate(layout.sizes) for key in chunk_keys(digest, index, size)}
        return (len(layout.manifest), *layout.sizes) if keys == expected | {manifest_key(digest)} else None

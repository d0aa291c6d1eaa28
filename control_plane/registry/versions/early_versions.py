"""Versions that new requests get before they are durable: those that a training run pushes.

The store is still the truth. If storing fails, the record before is in effect again, and the call fails; if the process
dies, the next one starts from the store. Only what was acknowledged is durable, as for any other registration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager

from control_plane.registry.catalog import Catalog
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.records import AdapterRecord

# Makes a packed version ready for requests, in cache and slots. While its block runs, its bytes can be read, although
# the store does not have them yet.
Publish = Callable[[PackedInfo], AbstractAsyncContextManager[None]]


async def show_and_store(
    catalog: Catalog,
    known: AdapterRecord | None,
    record: AdapterRecord,
    packed: PackedInfo,
    publish: Publish,
    store: Callable[[], Awaitable[bool]],
) -> bool:
    """Make the version ready, show it, then store it. Returns what `store` does.

    `known`: the record that `record` replaces. The caller holds the locks of name and blob. Storing begins last, since
    its writes to the disk delay everything else: 50 ms for 20 MB (benchmarks/LOG.md).
    """
    async with publish(packed):
        with _shown(catalog, known, record, packed.digest):
            return await store()


@contextlib.contextmanager
def _shown(catalog: Catalog, known: AdapterRecord | None, record: AdapterRecord, digest: str) -> Iterator[None]:
    """The record in effect, and its version as one that can be served. The record before, if the block raises.

    A record that took its place meanwhile stays: another server's, which the store turned out to have.
    """
    catalog.fresh.add(digest)
    catalog.put(record)
    try:
        yield
    except BaseException:
        current = catalog.find(record.adapter_id)
        is_ours = current is not None and (current.etag, current.active_digest) == (record.etag, record.active_digest)
        if not is_ours:
            pass
        elif known is None:
            catalog.remove(record)
        else:
            catalog.put(known)
        raise
    finally:
        catalog.fresh.discard(digest)

"""Operations: how many run and are remembered, and what is left of one that ended."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.adapters.operations import OperationStore
from control_plane.errors import Exhausted, StoreUnavailable


async def done() -> None:
    return None


async def test_store_is_bounded() -> None:
    store = OperationStore(wall_clock=lambda: 0.0, max_running=2, max_kept=3)
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()

    for _ in range(2):
        store.start("a", "create", work, owner="", is_cancellable=True)
    with pytest.raises(Exhausted, match="at most 2"):
        store.start("a", "create", work, owner="", is_cancellable=True)
    store.start("a", "delete", work, owner="", is_cancellable=False, is_waiting=True)  # one that waits always has room
    gate.set()
    await store.close(timeout_s=5)
    for _ in range(5):
        store.start("a", "create", done, owner="", is_cancellable=True)
        await store.close(timeout_s=5)
    assert len(store.page(100, "")[0]) == 3


async def test_error_that_is_kept_holds_no_frames() -> None:
    """A frame holds the files of an upload, or whatever else was at hand when the error was raised."""
    store = OperationStore()

    async def fail() -> None:
        try:
            raise OSError("disk")
        except OSError as error:
            raise StoreUnavailable("the artifact store does not respond; try again") from error

    operation = store.start("a", "create", fail, owner="", is_cancellable=True)
    assert await operation.wait(60)
    error = operation.error
    assert isinstance(error, StoreUnavailable)
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


async def test_close_cancels_what_does_not_end_in_time() -> None:
    store = OperationStore()
    operation = store.start("a", "delete", asyncio.Event().wait, owner="", is_cancellable=False)  # type: ignore[arg-type]
    operation.cancel()
    assert not await operation.wait(0)
    await store.close(timeout_s=0)
    assert operation.is_done and operation.is_cancelled


async def test_operations_of_one_owner_drive_out_none_of_another() -> None:
    store = OperationStore(wall_clock=lambda: 0.0, max_kept=3)
    first = store.start("b", "delete", done, owner="labs", is_cancellable=False)
    await store.close(timeout_s=5)
    for _ in range(5):
        store.start("a", "verify", done, owner="acme", is_cancellable=True)
        await store.close(timeout_s=5)
    assert store.find(first.operation_id) is first
    assert len(store.page(100, "")[0]) == 3

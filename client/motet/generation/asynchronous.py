"""The stream of a generation's chunks for asyncio, twin of `blocking.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol, Self, TypeAlias

import grpc
import grpc.aio

from motet.connection.bridged_call import BridgedCall
from motet.errors import MotetError, client_closed, error_from_rpc
from motet.generation.state import GenerationState
from motet.inputs.lora_task import TaskUpload
from motet.pauses import AsyncPauses, is_cancelled
from motet.types import Chunk, Completion, Finished, Generation, Started
from motet.v1 import generation_pb2

GenerateCall: TypeAlias = grpc.aio.UnaryStreamCall[Any, Any] | BridgedCall  # its responses are of Generate


class OpenStream(Protocol):
    """Begins one call of a generation."""

    def __call__(
        self,
        request: generation_pb2.GenerateRequest,
        upload: TaskUpload | None,
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...],
        /,
    ) -> GenerateCall: ...


class AsyncGenerationStream(AsyncIterator[Chunk]):
    """Chunks of one request, those of each completion in order. Not to be awaited: read it with `async for`.

    Closing it, leaving its `async with`, a cancelled read or dropping it cancels the request. Leaving an `async for`
    does not cancel the request while the stream is still referred to.
    """

    def __init__(
        self,
        state: GenerationState,
        open_call: OpenStream,
        metadata: tuple[tuple[str, str], ...],
        pauses: AsyncPauses,
    ) -> None:
        self._state = state
        self._open_call = open_call
        self._metadata = metadata
        self._pauses = pauses
        self._is_closed = False
        self._open()

    @property
    def started(self) -> Started | None:
        """What the server made of the request; set from the first chunk on."""
        return self._state.started

    @property
    def finished(self) -> Finished | None:
        """How the first completion ended; set with its last chunk."""
        return self._state.finished

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The completions that have ended, by index."""
        return self._state.completions

    async def __anext__(self) -> Chunk:
        while not self._is_closed:
            try:
                while isinstance(response := await self._call.read(), generation_pb2.GenerateResponse):
                    chunk = self._state.fold(response)
                    if chunk is not None:
                        return chunk
                await self._go_on(None)
            except grpc.RpcError as error:
                if self._is_closed:
                    break
                await self._go_on(error_from_rpc(error))
            except asyncio.CancelledError:
                if self._is_closed and not is_cancelled():  # aclose() by another task
                    break
                if not self._pauses.is_closed or is_cancelled():
                    self._cancel()
                    raise
                await self._go_on(client_closed())
            except BaseException:
                self._cancel()
                raise
        raise StopAsyncIteration

    async def text(self) -> str:
        """Wait for the end and return the whole text of the first completion."""
        async for _ in self:
            pass
        return self._state.text()

    async def result(self) -> Generation:
        """Wait for the end and return every completion. Raises Cancelled if the stream was closed before its end."""
        async for _ in self:
            pass
        return self._state.result()

    async def aclose(self) -> None:
        """Cancel the request if it still runs. Idempotent. Reading by another thread or task ends."""
        self._cancel()
        self._pauses.wake(self)

    def _open(self) -> None:
        request, timeout_s = self._state.next_request()
        try:
            self._call = self._open_call(request, self._state.upload, timeout_s, self._metadata)
        except grpc.aio.UsageError as error:  # what a closed channel raises
            if not self._pauses.is_closed:
                raise
            raise client_closed() from error

    async def _go_on(self, error: MotetError | None) -> None:
        """After the end of a call: send the next one if there is one to send."""
        try:
            delay_s = self._state.after_call(client_closed() if error and self._pauses.is_closed else error)
            if delay_s is None:
                self._is_closed = True
                return
            await self._pauses.wait(delay_s, self)
            if not self._is_closed:
                self._open()
        except BaseException:
            self._is_closed = True
            raise

    def _cancel(self) -> None:
        self._is_closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the call with it
                self._cancel()

"""The stream of a generation's chunks, blocking; `asynchronous.py` is its twin."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from motet.errors import MotetError, client_closed, error_from_rpc
from motet.generation.state import GenerationState
from motet.inputs.lora_task import TaskUpload
from motet.pauses import Pauses
from motet.types import Chunk, Completion, Finished, Generation, Started
from motet.v1 import generation_pb2


class OpenStream(Protocol):
    """Begins one call of a generation."""

    def __call__(
        self,
        request: generation_pb2.GenerateRequest,
        upload: TaskUpload | None,
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...],
        /,
    ) -> grpc.CallIterator[generation_pb2.GenerateResponse]: ...


class GenerationStream(Iterator[Chunk]):
    """Chunks of one request, those of each completion in order.

    Closing it, leaving its `with` or dropping it cancels the request.
    """

    def __init__(
        self,
        state: GenerationState,
        open_call: OpenStream,
        metadata: tuple[tuple[str, str], ...],
        pauses: Pauses,
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

    def __next__(self) -> Chunk:
        while not self._is_closed:
            try:
                for response in self._call:
                    chunk = self._state.fold(response)
                    if chunk is not None:
                        return chunk
                self._go_on(None)
            except grpc.RpcError as error:
                if self._is_closed:
                    break
                self._go_on(error_from_rpc(error))
            except BaseException:
                self.close()
                raise
        raise StopIteration

    def text(self) -> str:
        """Wait for the end and return the whole text of the first completion."""
        for _ in self:
            pass
        return self._state.text()

    def result(self) -> Generation:
        """Wait for the end and return every completion. Raises Cancelled if the stream was closed before its end."""
        for _ in self:
            pass
        return self._state.result()

    def close(self) -> None:
        """Cancel the request if it still runs. Idempotent. Reading by another thread or task ends."""
        self._cancel()
        self._pauses.wake()

    def _cancel(self) -> None:
        self._is_closed = True
        self._call.cancel()  # type: ignore[no-untyped-call]  # the stubs leave it bare

    def _open(self) -> None:
        request, timeout_s = self._state.next_request()
        try:
            self._call = self._open_call(request, self._state.upload, timeout_s, self._metadata)
        except ValueError as error:  # what a closed channel raises
            if not self._pauses.is_closed:
                raise
            raise client_closed() from error

    def _go_on(self, error: MotetError | None) -> None:
        """After the end of a call: send the next one if there is one to send."""
        try:
            delay_s = self._state.after_call(client_closed() if error and self._pauses.is_closed else error)
            if delay_s is None:
                self._is_closed = True
                return
            self._pauses.wait(delay_s, lambda: self._is_closed)
            if not self._is_closed:
                self._open()
                if self._is_closed:  # by another thread just then
                    self._cancel()
        except BaseException:
            self._is_closed = True
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._cancel()

"""The blocking client. Drives what `calls.py`, `generation.py` and `uploads.py` decide; `aio.py` is its twin."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.longrunning import operations_pb2  # type: ignore[import-untyped]  # ships no py.typed

from motet import calls
from motet.channel import RetryPolicy, channel_options
from motet.errors import DeadlineExceeded, error_from_rpc
from motet.generation import GenerationState
from motet.requests import GenerateOptions, Prompt, generate_request, metadata_of
from motet.types import Adapter, AdapterVersion, Answer, Chunk, Finished, Generation, ServerStatus, Started
from motet.uploads import AdapterUpload, Progress
from motet.v1 import adapters_pb2, generation_pb2
from motet.wire import adapter_from

T = TypeVar("T")


class Client:
    """A connection to a Motet server. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float = 10.0,
        tenant: str = "",
        retry: RetryPolicy | None = None,
        options: Sequence[tuple[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        generator: random.Random | None = None,
    ) -> None:
        """`timeout_s` bounds every call but generate, register and waiting for operations, which have their own.

        `tenant`: who generations are counted for; empty: the server's default. A generation may name another.
        `options` are gRPC channel options and win over ours; `clock`, `sleep` and `generator` (jitter) are for tests.
        """
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._tenant = tenant
        self._clock = clock
        self._sleep = sleep
        self._generator = generator or random.Random()
        channel_settings = channel_options(self._retry, tuple(options))
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=channel_settings)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=channel_settings)
        self.adapters = Adapters(self)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float = 600.0,
        **options: Unpack[GenerateOptions],
    ) -> GenerationStream:
        """A stream of chunks, asked for at once. GenerateOptions names the keyword arguments.

        `timeout_s` bounds the whole of it, continuations of a broken stream included.
        """
        request = generate_request(prompt, options)
        metadata = metadata_of(options, self._tenant)
        state = GenerationState(
            request, timeout_s=timeout_s, retry=self._retry, clock=self._clock, generator=self._generator
        )
        method = self._channel.unary_stream(
            calls.GENERATE,
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        return GenerationStream(state, method, metadata, self._sleep)

    def status(self) -> ServerStatus:
        """The system at this moment."""
        return self.send(calls.get_status())

    def send(self, call: calls.UnaryCall[T]) -> T:
        """The answer to one unary call."""
        method = self._channel.unary_unary(
            call.method,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=call.response_type.FromString,
        )
        try:
            return call.read(method(call.request, timeout=self._timeout_s))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    def upload(self, upload: AdapterUpload, timeout_s: float) -> Adapter:
        """Sends one upload; `adapters.register` is the convenient way."""
        method = self._channel.stream_unary(
            calls.UPLOAD_ADAPTER,
            request_serializer=adapters_pb2.UploadAdapterRequest.SerializeToString,
            response_deserializer=adapters_pb2.UploadAdapterResponse.FromString,
        )
        try:
            return adapter_from(method(upload.messages(), timeout=timeout_s).adapter)
        except grpc.RpcError as error:
            raise (upload.failure or error_from_rpc(error)) from error

    def wait_operation(self, operation: operations_pb2.Operation, timeout_s: float) -> operations_pb2.Operation:
        """The operation at its end. Raises the error that it ended with, DeadlineExceeded if it did not end."""
        deadline_s = self._clock() + timeout_s
        num_polls = 0
        while not operation.done:
            if self._clock() >= deadline_s:
                raise DeadlineExceeded(f"{operation.name} has not ended within timeout_s={timeout_s:g}; it goes on")
            self._sleep(calls.poll_interval_s(num_polls))
            operation = self.send(calls.get_operation(operation.name))
            num_polls += 1
        calls.check_operation(operation)
        return operation

    def close(self) -> None:
        """Ends every call and the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Adapters:
    """The adapter registry of a server: `client.adapters`. Names may be given with or without "adapters/"."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def register(
        self,
        name: str,
        directory: str | Path,
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        validate_only: bool = False,
        progress: Progress | None = None,
        timeout_s: float = 600.0,
    ) -> Adapter:
        """Uploads a PEFT adapter directory. A known name gets a new version, which becomes the active one.

        `progress(bytes sent, bytes in all)` is called from another thread. With `validate_only` nothing is stored.
        """
        upload = AdapterUpload(
            name,
            directory,
            display_name=display_name,
            labels=labels,
            validate_only=validate_only,
            progress=progress,
        )
        return self._client.upload(upload, timeout_s)

    def register_from_root(
        self,
        name: str,
        source: str,
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        validate_only: bool = False,
        timeout_s: float = 600.0,
    ) -> Adapter:
        """Registers "{root}/{path}" below one of the directories that the server's operator lists."""
        call = calls.create_adapter(name, source, display_name, labels, validate_only=validate_only)
        operation = self._client.wait_operation(self._client.send(call), timeout_s)
        return calls.adapter_of_operation(operation)

    def list(self, *, page_size: int = 100) -> Iterator[Adapter]:
        """All adapters, ordered by name, fetched a page at a time."""
        page_token = ""
        while True:
            page = self._client.send(calls.list_adapters(page_size, page_token))
            yield from page.items
            page_token = page.next_page_token
            if not page_token:
                return

    def versions(self, name: str, *, page_size: int = 100) -> Iterator[AdapterVersion]:
        """The versions of one adapter, newest first, fetched a page at a time."""
        page_token = ""
        while True:
            page = self._client.send(calls.list_versions(name, page_size, page_token))
            yield from page.items
            page_token = page.next_page_token
            if not page_token:
                return

    def get(self, name: str) -> Adapter:
        """One adapter, placements and target modules included."""
        return self._client.send(calls.get_adapter(name))

    def pin(self, name: str) -> Adapter:
        """Keeps the adapter in the host cache and, once loaded, on the devices."""
        return self._client.send(calls.pin_adapter(name))

    def unpin(self, name: str) -> Adapter:
        """Takes the pin back."""
        return self._client.send(calls.unpin_adapter(name))

    def activate(self, name: str, digest: str, *, etag: str = "") -> Adapter:
        """Makes a registered version the one that new requests get: rollback or roll-forward."""
        return self._client.send(calls.activate_version(name, digest, etag))

    def update(
        self,
        name: str,
        *,
        display_name: str | None = None,
        labels: Mapping[str, str] | None = None,
        etag: str = "",
    ) -> Adapter:
        """Changes what is not None; `labels` replaces all labels."""
        return self._client.send(calls.update_adapter(name, display_name, labels, etag))

    def delete(self, name: str, *, etag: str = "", wait: bool = True, timeout_s: float = 600.0) -> None:
        """Deletes an adapter. Running streams finish; with `wait`, returns when every tier is cleared."""
        operation = self._client.send(calls.delete_adapter(name, etag))
        if wait:
            self._client.wait_operation(operation, timeout_s)


class GenerationStream(Iterator[Chunk]):
    """Chunks of one request, those of each answer in order.

    Closing it, leaving its `with` or dropping it cancels the request.
    """

    def __init__(
        self,
        state: GenerationState,
        method: grpc.UnaryStreamMultiCallable[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
        metadata: tuple[tuple[str, str], ...],
        sleep: Callable[[float], None],
    ) -> None:
        self._state = state
        self._method = method
        self._metadata = metadata
        self._sleep = sleep
        self._is_closed = False
        self._open()

    @property
    def started(self) -> Started | None:
        """What the server made of the request; set from the first chunk on."""
        return self._state.started

    @property
    def finished(self) -> Finished | None:
        """How the first answer ended; set with its last chunk."""
        return self._state.finished

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers that have ended, by index."""
        return self._state.answers

    def __next__(self) -> Chunk:
        while not self._is_closed:
            try:
                for response in self._call:
                    chunk = self._state.fold(response)
                    if chunk is not None:
                        return chunk
                self._state.check_ended()
                self._is_closed = True
            except grpc.RpcError as error:
                if self._is_closed:
                    break
                self._continue_after(error)
            except BaseException:
                self.close()
                raise
        raise StopIteration

    def text(self) -> str:
        """The whole text of the first answer, after waiting for the end."""
        for _ in self:
            pass
        return self._state.text()

    def result(self) -> Generation:
        """Every answer, after waiting for the end. Not after close()."""
        for _ in self:
            pass
        return self._state.result()

    def close(self) -> None:
        """Cancels the request if it still runs. Idempotent; allowed from another thread."""
        self._is_closed = True
        self._call.cancel()  # type: ignore[no-untyped-call]  # the stubs leave it bare

    def _open(self) -> None:
        request, timeout_s = self._state.next_request()
        self._call = self._method(request, timeout=timeout_s, metadata=self._metadata)

    def _continue_after(self, rpc_error: grpc.RpcError) -> None:
        try:
            self._sleep(self._state.backoff_s(error_from_rpc(rpc_error)))
        except BaseException:
            self._is_closed = True
            raise
        if not self._is_closed:
            self._open()
            if self._is_closed:  # closed by another thread just then
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()

"""The blocking client. Drives what `calls.py`, `generation/` and `uploads.py` decide; `aio.py` is its twin."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.longrunning import operations_pb2

from motet import calls
from motet.adapters.blocking import Adapters
from motet.adapters.watch import event_from, watch_method
from motet.calls import StreamedCall
from motet.connection.channel import Channels, opener, security_of
from motet.connection.contact import ServerContact, check_target
from motet.connection.credential import ApiKey, Credential, Metadata
from motet.errors import DeadlineExceeded, client_closed, error_from_rpc
from motet.generation.blocking import GenerationStream
from motet.generation.state import GenerationState
from motet.inputs.lora_task import TaskUpload
from motet.model.blocking import Model
from motet.pauses import Pauses
from motet.pooling.calls import (
    Classifications,
    Embeddings,
    Pooling,
    PoolingInput,
    PoolingOptions,
    ProblemType,
    classify_call,
    embed_call,
)
from motet.requests import GenerateOptions, Prompt, call_metadata, generate_request, metadata_of, task_of
from motet.retries import Attempts, RetryPolicy, check_timeout_s
from motet.tls import PathLike
from motet.types import (
    AdapterEvent,
    ServerStatus,
)
from motet.v1 import generation_pb2, residency_pb2
from motet.workers.blocking import Workers

T = TypeVar("T")


class Client:
    """A connection to a Motet server. Thread-safe; close it, or use it as a context manager.

    AsyncClient in `aio.py` has the same methods for asyncio.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        tls_ca: PathLike | None = None,
        tls_cert: PathLike | None = None,
        tls_key: PathLike | None = None,
        api_key: ApiKey | None = None,
        allow_plaintext_key: bool = False,
        timeout_s: float = 10.0,
        tenant: str = "",
        retry: RetryPolicy | None = None,
        options: Sequence[tuple[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
        generator: random.Random | None = None,
    ) -> None:
        """`target`: HOST:PORT of the server's port for clients, or another gRPC address such as unix:PATH.

        `timeout_s` bounds every call except generate, embed, classify, register and waiting for operations, which have
        timeouts of their own. Within the timeout, a call is repeated as `retry` says.
        `tenant`: who calls are counted for; empty: the credential's first tenant, or the server's default. A generation
        may name another tenant.

        `tls_ca`: file of the authorities that sign the server's certificate, PEM; turns TLS on. `tls_cert`, `tls_key`:
        files of this client's own certificate and key, where the server needs one. Once the files change, further calls
        use a new connection, and calls under way keep theirs. `credentials` is for what files cannot say.

        `api_key`: an API key or a token, where the server needs one. Or a function that returns it: it is called for
        every attempt of a call, so it can return a fresh one, and must not block for long. None: $MOTET_API_KEY; "": no
        key. The key is not sent in plaintext to another machine unless `allow_plaintext_key` is set.

        `options` are gRPC channel options and replace ours of the same name. `clock`, `sleep` and `generator` (for
        jitter) are for tests. Raises InvalidArgument if `target` is not an address that can be dialled, if the files of
        TLS cannot be used, or if the key would be sent in plaintext to another machine.
        """
        security = security_of(credentials, tls_ca, tls_cert, tls_key)
        self._contact = ServerContact(
            check_target(target), has_tls=security.has_tls, has_certificate=security.has_certificate
        )
        self._pauses = Pauses(sleep)
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._tenant = tenant
        self._credential = Credential(api_key, target, has_tls=security.has_tls, may_send_plaintext=allow_plaintext_key)
        self._clock = clock
        self._generator = generator or random.Random()
        self._channels = Channels(security, opener(grpc, target, options), lambda channel: channel.close())
        self.adapters = Adapters(self)
        self.model = Model(self)
        self.workers = Workers(self)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float = 600.0,
        **options: Unpack[GenerateOptions],
    ) -> GenerationStream:
        """Send the request at once and return its stream of chunks. GenerateOptions lists the keyword arguments.

        `timeout_s` bounds the whole request, further attempts and continuations of a broken stream included;
        math.inf: no limit.
        """
        request, attempts = generate_request(prompt, options), self._attempts(timeout_s)
        state = GenerationState(request, attempts, task_of(options))
        return GenerationStream(state, self._open_stream, metadata_of(options, self._tenant), self._pauses)

    def embed(
        self,
        inputs: PoolingInput | Sequence[PoolingInput],
        *,
        adapter: str = "",
        pooling: Pooling | str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        timeout_s: float = 600.0,
        **options: Unpack[PoolingOptions],
    ) -> Embeddings:
        """The embeddings of one input or several: of a text, of token ids, or of a list of these.

        They are those of the base model, or of `adapter`. `pooling`: "last" (the default), "mean" or "first".
        `normalize`: divide each by its length, the default. `dimensions`: how many of the first values to keep, before
        that. `timeout_s` bounds the whole call. PoolingOptions lists further arguments.
        """
        call = embed_call(
            inputs, adapter=adapter, pooling=pooling, normalize=normalize, dimensions=dimensions, options=options
        )
        return self.send(call, timeout_s)

    def classify(
        self,
        inputs: PoolingInput | Sequence[PoolingInput],
        *,
        adapter: str,
        problem_type: ProblemType | str | None = None,
        timeout_s: float = 600.0,
        **options: Unpack[PoolingOptions],
    ) -> Classifications:
        """The classes of one input or several, by the score head of `adapter`.

        `problem_type`: what its logits mean, where the adapter does not say it: "single_label", "multi_label" or
        "regression". `timeout_s` bounds the whole call. PoolingOptions lists further arguments.
        """
        call = classify_call(inputs, adapter=adapter, problem_type=problem_type, options=options)
        return self.send(call, timeout_s)

    def status(self) -> ServerStatus:
        """The system at this moment."""
        return self.send(calls.get_status())

    def send(self, call: calls.UnaryCall[T], timeout_s: float | None = None) -> T:
        """Send one unary call and return its result. `timeout_s` None: the client's."""

        def send(channel: grpc.Channel, remaining_s: float) -> Any:
            method = call.on(channel)
            return method(call.request, timeout=remaining_s, metadata=self._metadata())

        attempts = self._attempts(self._timeout_s if timeout_s is None else timeout_s)
        return call.read(self._call(send, attempts, is_repeatable=call.is_repeatable))

    def watch(self, request: residency_pb2.WatchAdaptersRequest, timeout_s: float) -> Iterator[AdapterEvent]:
        """Events of a watch, which goes on after a break. `adapters.watch` prepares the request."""
        attempts = self._attempts(timeout_s)
        while True:
            if self._pauses.is_closed:
                raise client_closed()
            channel, delay_s = self._channels.acquire(), 0.0
            call = watch_method(channel)(request, timeout=attempts.remaining_s, metadata=self._metadata())
            try:
                for message in call:
                    attempts.progressed()
                    request.resume_token = message.resume_token
                    yield event_from(message)
            except grpc.RpcError as error:
                if self._pauses.is_closed:
                    raise client_closed() from error
                delay_s = attempts.after(error_from_rpc(error), is_repeatable=True)
            finally:
                call.cancel()
                self._channels.release(channel)
            self._pauses.wait(delay_s, lambda: False)

    def upload(self, upload: StreamedCall[T], timeout_s: float) -> T:
        """Send one upload. `adapters.register` prepares it from a directory, `adapters.push` from memory.

        After a broken connection, a registration goes on where the server's copy ends.
        """
        attempts = self._attempts(timeout_s)

        def send(channel: grpc.Channel, _timeout_s: float) -> Any:
            while True:
                self._resume(channel, upload, attempts)
                try:
                    method = calls.stream_method(channel, upload)
                    return method(upload.messages(), timeout=attempts.remaining_s, metadata=self._metadata())
                except grpc.RpcError as error:
                    if upload.failure is not None:
                        raise upload.failure from error
                    if not upload.is_out_of_step(error_from_rpc(error)):
                        raise

        return upload.read(self._call(send, attempts, is_repeatable=True))

    def _resume(self, channel: grpc.Channel, upload: StreamedCall[Any], attempts: Attempts) -> None:
        """Ask the server what it has of the upload, if an attempt broke."""
        if (call := upload.resumption()) is None:
            return
        try:
            response = call.on(channel)(call.request, timeout=attempts.remaining_s, metadata=self._metadata())
        except grpc.RpcError as error:
            # An older server knows no such call, and a server that was started again no such upload.
            if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
                raise
            upload.resume(None)
        else:
            upload.resume(call.read(response))

    def wait_operation(
        self,
        operation: operations_pb2.Operation,
        timeout_s: float,
        on_state: Callable[[operations_pb2.Operation], None] | None = None,
    ) -> operations_pb2.Operation:
        """Wait until the operation has ended and return it.

        `on_state` gets the operation as it was given, and after every further look at it.

        Raises the error that the operation ended with, or DeadlineExceeded if it has not ended in time.
        """
        deadline_s = self._clock() + check_timeout_s(timeout_s)
        num_polls = 0
        if on_state is not None:
            on_state(operation)
        while not operation.done:
            if self._clock() >= deadline_s:
                raise DeadlineExceeded(f"{operation.name} has not ended within timeout_s={timeout_s:g}; it goes on")
            self._pauses.wait(calls.poll_interval_s(num_polls), lambda: False)
            operation = self.send(calls.get_operation(operation.name))
            num_polls += 1
            if on_state is not None:
                on_state(operation)
        calls.check_operation(operation)
        return operation

    def close(self) -> None:
        """End every call and the connection. Another thread or task may still be using the client."""
        self._pauses.close()
        for channel in self._channels.all():
            channel.close()

    def _attempts(self, timeout_s: float) -> Attempts:
        return Attempts(self._contact, self._retry, timeout_s=timeout_s, clock=self._clock, generator=self._generator)

    def _metadata(self) -> Metadata:
        return (*call_metadata(self._tenant), *self._credential.metadata())

    def _open_stream(
        self, request: generation_pb2.GenerateRequest, upload: TaskUpload | None, timeout_s: float, metadata: Metadata
    ) -> grpc.CallIterator[generation_pb2.GenerateResponse]:
        metadata = (*metadata, *self._credential.metadata())
        channel = self._channels.acquire()
        method: Any = calls.generate_method(channel) if upload is None else calls.generate_with_task_method(channel)
        sent: Any = request if upload is None else upload.messages()
        try:
            call: grpc.CallIterator[generation_pb2.GenerateResponse] = method(
                sent, timeout=timeout_s, metadata=metadata
            )
        except BaseException:
            self._channels.release(channel)
            raise
        if self._channels.may_change and not call.add_callback(lambda: self._channels.release(channel)):
            self._channels.release(channel)  # the call has ended already
        return call

    def _call(self, send: Callable[[grpc.Channel, float], T], attempts: Attempts, *, is_repeatable: bool) -> T:
        """What `send` returns, given a channel and the seconds left for it, after as many attempts as that takes."""
        while True:
            if self._pauses.is_closed:
                raise client_closed()
            channel = self._channels.acquire()
            try:
                response = send(channel, attempts.remaining_s)
            except grpc.RpcError as error:
                if self._pauses.is_closed:
                    raise client_closed() from error
                delay_s = attempts.after(error_from_rpc(error), is_repeatable=is_repeatable)
            else:
                attempts.progressed()
                return response
            finally:
                self._channels.release(channel)
            self._pauses.wait(delay_s, lambda: False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""The asyncio client, twin of `client.py`. Drives what `calls.py`, `generation/` and `uploads.py` decide."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakSet

import grpc
import grpc.aio
from google.longrunning import operations_pb2

from motet import calls
from motet.adapters.asynchronous import AsyncAdapters
from motet.adapters.watch import event_from, watch_method
from motet.calls import StreamedCall
from motet.client import Client
from motet.connection.bridged_call import BridgedCall
from motet.connection.channel import Channels, opener, security_of
from motet.connection.contact import ServerContact, check_target
from motet.connection.credential import ApiKey, Credential, Metadata
from motet.errors import DeadlineExceeded, client_closed, error_from_rpc
from motet.generation.asynchronous import AsyncGenerationStream, GenerateCall
from motet.generation.state import GenerationState
from motet.inputs.lora_task import TaskUpload
from motet.model.asynchronous import AsyncModel
from motet.pauses import AsyncPauses, is_cancelled
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
from motet.types import AdapterEvent, ServerStatus
from motet.v1 import generation_pb2, residency_pb2
from motet.workers.asynchronous import AsyncWorkers

T = TypeVar("T")


class AsyncClient:
    """A connection to a Motet server, for one event loop. Make it inside the loop; close it, or use `async with`.

    Client in `client.py` has the same methods and blocks.
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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
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
        self._pauses = AsyncPauses(sleep)
        self._target = target
        self._security = security
        self._closing = set[asyncio.Task[None]]()  # channels that were replaced
        self._lent = WeakSet[Client]()  # for calls that bring weights
        self._options = tuple(options)
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._tenant = tenant
        self._credential = Credential(api_key, target, has_tls=security.has_tls, may_send_plaintext=allow_plaintext_key)
        self._clock = clock
        self._generator = generator or random.Random()
        self._channels = Channels(security, opener(grpc.aio, target, options), self._close_soon)
        self.adapters = AsyncAdapters(self)
        self.model = AsyncModel(self)
        self.workers = AsyncWorkers(self)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float = 600.0,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerationStream:
        """Send the request at once and return its stream of chunks. GenerateOptions lists the keyword arguments.

        `timeout_s` bounds the whole request, further attempts and continuations of a broken stream included;
        math.inf: no limit.
        """
        request, attempts = generate_request(prompt, options), self._attempts(timeout_s)
        state = GenerationState(request, attempts, task_of(options))
        return AsyncGenerationStream(state, self._open_stream, metadata_of(options, self._tenant), self._pauses)

    async def embed(
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
        return await self.send(call, timeout_s)

    async def classify(
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
        return await self.send(call, timeout_s)

    async def status(self) -> ServerStatus:
        """The system at this moment."""
        return await self.send(calls.get_status())

    async def send(self, call: calls.UnaryCall[T], timeout_s: float | None = None) -> T:
        """Send one unary call and return its result. `timeout_s` None: the client's."""
        attempts = self._attempts(self._timeout_s if timeout_s is None else timeout_s)
        while True:
            if self._pauses.is_closed:
                raise client_closed()
            channel = self._channels.acquire()
            try:
                method = call.on(channel)
                metadata = (*call_metadata(self._tenant), *self._credential.metadata())
                response = await method(call.request, timeout=attempts.remaining_s, metadata=metadata)
            except grpc.RpcError as error:
                if self._pauses.is_closed:
                    raise client_closed() from error
                delay_s = attempts.after(error_from_rpc(error), is_repeatable=call.is_repeatable)
            except asyncio.CancelledError as error:
                if self._pauses.is_closed and not is_cancelled():  # the channel was closed over the call
                    raise client_closed() from error
                raise
            else:
                attempts.progressed()
                return call.read(response)
            finally:
                self._channels.release(channel)
            await self._pauses.wait(delay_s, attempts)

    async def watch(self, request: residency_pb2.WatchAdaptersRequest, timeout_s: float) -> AsyncIterator[AdapterEvent]:
        """Events of a watch, which goes on after a break. `adapters.watch` prepares the request."""
        attempts = self._attempts(timeout_s)
        while True:
            if self._pauses.is_closed:
                raise client_closed()
            channel, delay_s = self._channels.acquire(), 0.0
            metadata = (*call_metadata(self._tenant), *self._credential.metadata())
            call = watch_method(channel)(request, timeout=attempts.remaining_s, metadata=metadata)
            try:
                async for message in call:
                    attempts.progressed()
                    request.resume_token = message.resume_token
                    yield event_from(message)
            except grpc.RpcError as error:
                if self._pauses.is_closed:
                    raise client_closed() from error
                delay_s = attempts.after(error_from_rpc(error), is_repeatable=True)
            except asyncio.CancelledError as error:
                if self._pauses.is_closed and not is_cancelled():  # the channel was closed over the call
                    raise client_closed() from error
                raise
            finally:
                call.cancel()
                self._channels.release(channel)
            await self._pauses.wait(delay_s, attempts)

    async def upload(self, upload: StreamedCall[T], timeout_s: float) -> T:
        """Send one upload. `adapters.register` prepares it from a directory, `adapters.push` from memory.

        After a broken connection, a registration goes on where the server's copy ends.
        """
        client = self._blocking_client()
        try:
            return await asyncio.to_thread(client.upload, upload, timeout_s)
        finally:
            client.close()  # where this task was cancelled, it ends the call and with it the thread

    async def wait_operation(
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
            await self._pauses.wait(calls.poll_interval_s(num_polls), object())
            operation = await self.send(calls.get_operation(operation.name))
            num_polls += 1
            if on_state is not None:
                on_state(operation)
        calls.check_operation(operation)
        return operation

    async def close(self) -> None:
        """End every call and the connection. Another thread or task may still be using the client."""
        self._pauses.close()
        for client in list(self._lent):
            client.close()
        for channel in self._channels.all():
            await channel.close(None)
        await asyncio.gather(*self._closing)

    def _open_stream(
        self, request: generation_pb2.GenerateRequest, upload: TaskUpload | None, timeout_s: float, metadata: Metadata
    ) -> GenerateCall:
        if upload is not None:
            client = self._blocking_client()
            self._lent.add(client)
            return BridgedCall(client._open_stream(request, upload, timeout_s, metadata), client.close)
        metadata = (*metadata, *self._credential.metadata())
        channel = self._channels.acquire()
        method = calls.generate_method(channel)
        try:
            call: grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse] = method(
                request, timeout=timeout_s, metadata=metadata
            )
        except BaseException:
            self._channels.release(channel)
            raise
        if self._channels.may_change:
            call.add_done_callback(lambda _call: self._channels.release(channel))
        return call

    def _blocking_client(self) -> Client:
        """A client for calls that send a stream; connection/bridged_call.py says why."""
        security: dict[str, Any] = self._security.arguments()
        client = Client(
            self._target, **security, api_key="", tenant=self._tenant, retry=self._retry, options=self._options
        )
        client._contact, client._credential = self._contact, self._credential
        return client

    def _close_soon(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.ensure_future(channel.close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _attempts(self, timeout_s: float) -> Attempts:
        return Attempts(self._contact, self._retry, timeout_s=timeout_s, clock=self._clock, generator=self._generator)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

"""A real gRPC server on a loopback port whose responses are scripted by the test."""

# ruff: noqa: N802 - the generated services name the methods

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import any_pb2, empty_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2 as rpc_status_pb2
from grpc_status import rpc_status
from motet.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
)

Response = generation_pb2.GenerateResponse
Script = Callable[[generation_pb2.GenerateRequest, grpc.ServicerContext], Iterator[Response]]
DIGEST = "ab" * 32
SEED = 11
WORKER_LOST = error_details_pb2.ErrorInfo(reason="WORKER_LOST")


def abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str, *details: Message) -> NoReturn:
    """End a call with google.rpc details."""
    status = rpc_status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")


def started(*, digest: str = DIGEST, seed: int = SEED, max_tokens: int = 8, n: int = 1, **more: Any) -> Response:
    """The first event."""
    return Response(
        started=generation_pb2.GenerationStarted(
            request_id="req-1",
            adapter="adapters/pirate" if digest else "",
            adapter_digest=digest,
            sampling=types_pb2.SamplingParams(temperature=0.0, top_p=1.0, seed=seed),
            stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=False),
            prompt_tokens=4,
            cached_tokens=2,
            decoding=types_pb2.DecodingParams(n=n, best_of=more.pop("best_of", n)),
            **more,
        )
    )


def delta(offset: int, token_ids: list[int], text: str, *, index: int = 0, **more: Any) -> Response:
    """New tokens."""
    return Response(
        delta=generation_pb2.GenerationDelta(
            index=index,
            token_offset=offset,
            token_ids=token_ids,
            text=text,
            completion_tokens=offset + len(token_ids),
            **more,
        )
    )


def finished(
    num_tokens: int, *, reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_LENGTH, **more: Any
) -> Response:
    """The last event."""
    return Response(
        finished=generation_pb2.GenerationFinished(
            reason=reason,
            usage=types_pb2.Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=num_tokens),
            seed=SEED,
            **more,
        )
    )


def text_of(token: int) -> str:
    """Text of one token of the scripted model."""
    return f"<{token}>"


def playing(
    tokens: list[int], *, per_delta: int = 1, break_after: int | None = None, lag: int = 0, flush_first: bool = False
) -> Script:
    """A faithful server for `tokens`: replays resume_from, then goes on behind it.

    After `break_after` tokens in all it ends with UNAVAILABLE, as a server does that lost its worker. `lag`: text of
    that many tokens is held back until the end, as for stop strings; with `flush_first` it breaks only after the held
    text was sent.
    """

    def released(num_tokens: int) -> str:
        return "".join(text_of(token) for token in tokens[: max(num_tokens - lag, 0)])

    def script(request: generation_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Response]:
        position = len(request.resume_from.ids)
        assert list(request.resume_from.ids) == tokens[:position]
        yield started()
        while position < len(tokens):
            if break_after is not None and position >= break_after:
                abort(context, grpc.StatusCode.UNAVAILABLE, "the worker was lost", WORKER_LOST)
            end = min(position + per_delta, len(tokens))
            yield delta(position, tokens[position:end], released(end)[len(released(position)) :])
            position = end
        tail = "".join(text_of(token) for token in tokens)[len(released(position)) :]
        if tail:
            yield delta(position, [], tail)
        if flush_first:
            abort(context, grpc.StatusCode.UNAVAILABLE, "the worker was lost", WORKER_LOST)
        yield finished(position)

    return script


class _Recorder(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Notes what is sent beside the requests."""

    def __init__(self, seen: list[tuple[str, dict[str, str | bytes]]]) -> None:
        self._seen = seen

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        self._seen.append((details.method.rpartition("/")[2], dict(details.invocation_metadata)))
        return continuation(details)


class ScriptedServer(
    generation_pb2_grpc.GenerationServiceServicer,
    adapters_pb2_grpc.AdapterServiceServicer,
    status_pb2_grpc.StatusServiceServicer,
    operations_pb2_grpc.OperationsServicer,  # type: ignore[misc]
):
    """Serves Generate by scripts, one per call; keeps adapters in a dict; records every request."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.scripts: deque[Script] = deque()
        self.requests: list[Any] = []
        self.time_remaining_s: list[float] = []
        self.tenants: list[str | bytes | None] = []
        self.cancelled = threading.Event()
        self.is_waiting = threading.Event()
        self.adapters: dict[str, adapters_pb2.Adapter] = {}
        self.registration: adapters_pb2.Registration | None = None
        self.version_digests = [f"{number:064x}" for number in (3, 2, 1)]
        self.files: dict[str, bytes] = {}
        self.chunk_sizes: list[int] = []
        self.upload_error: Callable[[grpc.ServicerContext], NoReturn] | None = None
        self.unary_error: Callable[[grpc.ServicerContext], NoReturn] | None = None
        self.num_polls_until_done = 2
        self.downloads: deque[tuple[int, int]] = deque()  # bytes done and in all, at each look at a registration
        self.operation_error: rpc_status_pb2.Status | None = None
        self.status = status_pb2.GetStatusResponse()
        self._pool = ThreadPoolExecutor(max_workers=8)
        self.metadata: list[tuple[str, dict[str, str | bytes]]] = []  # of every call: method, metadata
        self._server = grpc.server(self._pool, interceptors=[_Recorder(self.metadata)])
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self, self._server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(self, self._server)
        operations_pb2_grpc.add_OperationsServicer_to_server(self, self._server)
        if credentials is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.target = f"127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        """Ends at once."""
        self._server.stop(0).wait()
        self._pool.shutdown()

    # ---- generation ----

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        self.requests.append(request)
        self.time_remaining_s.append(context.time_remaining())
        self.tenants.append(dict(context.invocation_metadata()).get("motet-tenant"))
        yield from self.scripts.popleft()(request, context)

    def GenerateWithTask(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        header = next(messages).header
        self.requests.append(header)
        if self.upload_error is not None:
            self.upload_error(context)
        contents = self._contents(header, messages)
        self.files = {file.name: content for file, content in zip(header.files, contents, strict=True)}
        for response in self.scripts.popleft()(header.request, context):
            yield generation_pb2.GenerateWithTaskResponse(response=response)

    def waiting_for_cancel(self, *first: Response) -> Script:
        """Sets `is_waiting` and sends `first`, then nothing more until the client cancels, which sets `cancelled`."""

        def script(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
            context.add_callback(self.cancelled.set)
            self.is_waiting.set()
            yield from first
            assert self.cancelled.wait(30), "the client never cancelled"

        return script

    # ---- adapters ----

    def UploadAdapter(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        header = next(messages).header
        self.requests.append(header)
        if self.upload_error is not None:
            self.upload_error(context)
        for file, content in zip(header.files, self._contents(header, messages), strict=True):
            self.files[file.name] = content
        adapter = make_adapter(
            header.adapter_id,
            display_name=header.display_name,
            labels=dict(header.labels),
            owner=header.owner,
            visibility=header.visibility,
            shared_with=header.shared_with,
            registration=self.registration,
        )
        if not header.validate_only:
            self.adapters[header.adapter_id] = adapter
        return adapters_pb2.UploadAdapterResponse(adapter=adapter)

    def _contents(self, header: Any, messages: Iterator[Any]) -> list[bytes]:
        """The files that follow a header, as it announces them."""
        contents = [bytearray() for _ in header.files]
        for message in messages:
            chunk = message.chunk
            assert chunk.offset == len(contents[chunk.file_index])
            self.chunk_sizes.append(len(chunk.data))
            contents[chunk.file_index] += chunk.data
        for file, content in zip(header.files, contents, strict=True):
            assert file.size_bytes == len(content)
            assert file.sha256 == hashlib.sha256(content).hexdigest()
        return [bytes(content) for content in contents]

    def _find(self, request: Any, context: grpc.ServicerContext) -> adapters_pb2.Adapter:
        self.requests.append(request)
        if self.unary_error is not None:
            self.unary_error(context)
        adapter = self.adapters.get(request.name.removeprefix("adapters/"))
        if adapter is None:
            abort(context, grpc.StatusCode.NOT_FOUND, f"no adapter {request.name}")
        return adapter

    def GetAdapter(self, request: Any, context: grpc.ServicerContext) -> Any:
        return adapters_pb2.GetAdapterResponse(adapter=self._find(request, context))

    def PinAdapter(self, request: Any, context: grpc.ServicerContext) -> Any:
        adapter = self._find(request, context)
        adapter.pinned = True
        return adapters_pb2.PinAdapterResponse(adapter=adapter)

    def UnpinAdapter(self, request: Any, context: grpc.ServicerContext) -> Any:
        adapter = self._find(request, context)
        adapter.pinned = False
        return adapters_pb2.UnpinAdapterResponse(adapter=adapter)

    def ActivateAdapterVersion(self, request: Any, context: grpc.ServicerContext) -> Any:
        adapter = self._find(request, context)
        adapter.active_version.digest = request.digest
        return adapters_pb2.ActivateAdapterVersionResponse(adapter=adapter)

    def UpdateAdapter(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        adapter = self.adapters[request.adapter.name.removeprefix("adapters/")]
        for path in request.update_mask.paths:
            adapter.ClearField(path)
            adapter.MergeFrom(adapters_pb2.Adapter(**{path: getattr(request.adapter, path)}))
        return adapters_pb2.UpdateAdapterResponse(adapter=adapter)

    def ListAdapters(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        names = sorted(self.adapters)
        start = int(request.page_token or 0)
        end = start + (request.page_size or 100)
        return adapters_pb2.ListAdaptersResponse(
            adapters=[self.adapters[name] for name in names[start:end]],
            next_page_token=str(end) if end < len(names) else "",
        )

    def ListAdapterVersions(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        start = int(request.page_token or 0)
        versions = [adapters_pb2.AdapterVersion(digest=d, kind="lora", max_rank=8) for d in self.version_digests]
        end = start + (request.page_size or 100)
        return adapters_pb2.ListAdapterVersionsResponse(
            versions=versions[start:end], next_page_token=str(end) if end < len(versions) else ""
        )

    # ---- operations and status ----

    def DeleteAdapter(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._find(request, context)
        del self.adapters[request.name.removeprefix("adapters/")]
        return operations_pb2.Operation(name="operations/1")

    def DeleteAdapterVersion(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._find(request, context)
        return operations_pb2.Operation(name="operations/1")

    def CreateAdapter(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        if self.unary_error is not None:
            self.unary_error(context)
        operation = operations_pb2.Operation(name=f"operations/create-{request.adapter_id}", done=not self.downloads)
        if operation.done:
            operation.response.Pack(make_adapter(request.adapter_id, registration=self.registration))
        return operation

    def GetOperation(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        if self.downloads:
            return self._download(request.name)
        self.num_polls_until_done -= 1
        operation = operations_pb2.Operation(name=request.name, done=self.num_polls_until_done <= 0)
        if operation.done and self.operation_error is not None:
            operation.error.CopyFrom(self.operation_error)
        elif operation.done:
            operation.response.Pack(empty_pb2.Empty())
        return operation

    def _download(self, name: str) -> Any:
        bytes_done, bytes_total = self.downloads.popleft()
        operation = operations_pb2.Operation(name=name, done=not self.downloads)
        operation.metadata.Pack(
            adapters_pb2.AdapterOperationMetadata(bytes_done=bytes_done, bytes_total=bytes_total, phase="download")
        )
        if operation.done and self.operation_error is not None:
            operation.error.CopyFrom(self.operation_error)
        elif operation.done:
            operation.response.Pack(make_adapter(name.removeprefix("operations/create-")))
        return operation

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        if self.unary_error is not None:
            self.unary_error(context)
        return self.status


def make_adapter(name: str, **fields: Any) -> adapters_pb2.Adapter:
    """An active adapter of one version."""
    return adapters_pb2.Adapter(
        name=f"adapters/{name}",
        uid=f"uid-{name}",
        state=adapters_pb2.ADAPTER_STATE_ACTIVE,
        active_version=adapters_pb2.AdapterVersion(
            digest=DIGEST,
            kind="lora",
            max_rank=8,
            dtype="float32",
            size_bytes=4096,
            target_modules=["m.q_proj"],
            number=2,
        ),
        placements=[adapters_pb2.AdapterPlacement(tier=adapters_pb2.ADAPTER_TIER_ARENA, worker_id="w0")],
        etag="e1",
        **fields,
    )

"""The class that users call: prompts in, results out, on a server that starts and stops with it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from motet.adapters.files import paths_of
from motet.aio import AsyncClient
from motet.client import Client
from motet.errors import FailedPrecondition, MotetError, client_closed, invalid_field
from motet.inputs.conversations import ConversationOptions
from motet.offline.batch import LoopThread, run_all
from motet.offline.inputs import (
    Conversation,
    Item,
    OfflineAdapter,
    OfflinePrompt,
    SamplingParams,
    conversations_of,
    either_sampling,
    items_of,
    prompts_of,
)
from motet.offline.private_server import PrivateServer, Setting, flags_of
from motet.offline.results import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, RequestOutput
from motet.pooling.calls import Classification, Embedding, Pooling, ProblemType
from motet.tls import PathLike
from motet.types import Generation

T = TypeVar("T")
R = TypeVar("R")

_NUM_ADAPTERS_AT_ONCE = 4


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """Let errors say which adapter they are about."""
    try:
        yield
    except MotetError as error:
        error.add_note(f"this was the adapter {name!r}")
        raise


class LLM:
    """A model with adapters, as a library. It runs a server of its own on this machine, until close().

    Use it as a context manager. The server also stops with the program, however that ends. Thread-safe.
    """

    def __init__(
        self,
        model: PathLike,
        *,
        adapters: Mapping[str, PathLike] | None = None,
        max_in_flight: int = 256,
        start_timeout_s: float = 600.0,
        work_dir: PathLike | None = None,
        use_tqdm: bool = True,
        **settings: Setting,
    ) -> None:
        """`model`: checkpoint directory. `adapters`: names, and directories as PEFT writes them.

        `max_in_flight`: requests that are sent before others have ended. `start_timeout_s`: bounds the start of the
        server, which loads the model. `work_dir`: where its temporary directory is made; adapters are copied there.
        `use_tqdm`: show a bar while adapters are registered.

        `settings` are flags of `motet up` with underscores: num_blocks=4096, dtype="bfloat16", device="cuda".

        Raises InvalidArgument for a wrong setting, Unavailable with the end of the server's log if it does not start,
        and what `Client.adapters.register` raises.
        """
        if max_in_flight < 1:
            raise invalid_field("max_in_flight", f"is {max_in_flight}; use at least 1")
        # Twice as many: where a stream has ended for the client, the server may still have it for a moment.
        flags = ["--model", str(model), "--max-streams-per-connection", str(2 * max_in_flight), *flags_of(settings)]
        for name, directory in (adapters or {}).items():
            with _about(name):
                paths_of(Path(directory))  # before the model is loaded
        self._max_in_flight = max_in_flight
        self._parts = _Parts(work_dir, flags)
        self._finalizer = weakref.finalize(self, self._parts.close)
        try:
            self._parts.start(start_timeout_s)
            names = list((adapters or {}).items())
            self._run(names, self._register, "adapters", use_tqdm=use_tqdm, max_in_flight=_NUM_ADAPTERS_AT_ONCE)
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> Client:
        """The SDK's client of the server: adapters, status, tokens and single generations."""
        return self._parts.client

    def generate(
        self,
        prompts: OfflinePrompt | Sequence[OfflinePrompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: OfflineAdapter | Sequence[OfflineAdapter] = None,
        use_tqdm: bool = True,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; results are in the order of the prompts.

        A prompt is text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}. `sampling` and `adapter`
        are one for all prompts or a list with one each; `sampling_params` is vLLM's name of `sampling`. An adapter is a
        name, also "name@version"; {"a": 0.7, "b": 0.3}
        for several with scales; or None for the base model.

        The first error is raised, with a note that has the prompt's index, and the other requests are cancelled. With
        `return_errors`, it is in the prompt's result instead, and the others go on. Raises Unavailable if the server
        ends.
        """
        items = items_of(prompts_of(prompts), either_sampling(sampling, sampling_params), adapter, {})
        return self._complete(items, use_tqdm=use_tqdm, return_errors=return_errors)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: OfflineAdapter | Sequence[OfflineAdapter] = None,
        use_tqdm: bool = True,
        return_errors: bool = False,
        **conversation: Unpack[ConversationOptions],
    ) -> list[RequestOutput]:
        """Continue one conversation or several: lists of messages, as ChatMessage or {"role": ..., "content": ...}.

        ConversationOptions lists further arguments, such as `tools`, for all of them. The rest is as for generate().
        """
        items = items_of(conversations_of(messages), either_sampling(sampling, sampling_params), adapter, conversation)
        return self._complete(items, use_tqdm=use_tqdm, return_errors=return_errors)

    def encode(
        self,
        inputs: OfflinePrompt | Sequence[OfflinePrompt],
        *,
        adapter: str | Sequence[str | None] | None = None,
        pooling: Pooling | str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Embedding]:
        """The embedding of every input, in order. `Client.embed` describes the arguments."""
        items = items_of(prompts_of(inputs, "inputs"), None, adapter, {})
        return self._embed(items, "inputs", pooling, normalize, dimensions, use_tqdm)

    def embed(
        self,
        prompts: OfflinePrompt | Sequence[OfflinePrompt],
        *,
        adapter: str | Sequence[str | None] | None = None,
        pooling: Pooling | str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The embeddings of encode() as vLLM has them: `output.outputs.embedding`. Prompts are as for generate()."""
        items = items_of(prompts_of(prompts), None, adapter, {})
        found = self._embed(items, "prompts", pooling, normalize, dimensions, use_tqdm)
        return [
            PoolingRequestOutput(
                item.prompt, item.adapter, EmbeddingOutput(one.values), one.prompt_tokens, one.cached_tokens
            )
            for item, one in zip(items, found, strict=True)
        ]

    def classify(
        self,
        prompts: OfflinePrompt | Sequence[OfflinePrompt],
        *,
        adapter: str | Sequence[str],
        problem_type: ProblemType | str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The classes of every prompt, in order, by adapters' score heads: `output.outputs.probs`.

        Prompts are as for generate(). `Client.classify` describes `problem_type`.
        """
        items = items_of(prompts_of(prompts), None, adapter, {})

        async def send(item: Item) -> Classification:
            classes = await self._parts.async_client.classify(
                _pooled(item), adapter=_one_adapter(item), problem_type=problem_type, timeout_s=math.inf
            )
            return classes.classifications[0]

        return [
            PoolingRequestOutput(
                item.prompt,
                item.adapter,
                ClassificationOutput(one.probabilities, one.logits, one.label),
                one.prompt_tokens,
                one.cached_tokens,
            )
            for item, one in zip(items, _all_done(self._run(items, send, "prompts", use_tqdm)), strict=True)
        ]

    def close(self) -> None:
        """Stop the server and remove its directory. Idempotent."""
        self._finalizer()

    def _embed(
        self,
        items: Sequence[Item],
        what: str,
        pooling: Pooling | str | None,
        normalize: bool | None,
        dimensions: int | None,
        use_tqdm: bool,
    ) -> list[Embedding]:
        async def send(item: Item) -> Embedding:
            embeddings = await self._parts.async_client.embed(
                _pooled(item),
                adapter=_one_adapter(item),
                pooling=pooling,
                normalize=normalize,
                dimensions=dimensions,
                timeout_s=math.inf,
            )
            return embeddings.embeddings[0]

        return _all_done(self._run(items, send, what, use_tqdm))

    def _complete(self, items: Sequence[Item], *, use_tqdm: bool, return_errors: bool) -> list[RequestOutput]:
        async def send(item: Item) -> Generation:
            async with self._parts.async_client.generate(item.prompt, timeout_s=math.inf, **item.options) as stream:
                return await stream.result()

        results = self._run(items, send, "prompts", use_tqdm, stops_at_error=not return_errors)
        return [
            RequestOutput(item.prompt, item.adapter, None, result)
            if isinstance(result, MotetError)
            else RequestOutput(item.prompt, item.adapter, result)
            for item, result in zip(items, results, strict=True)
        ]

    async def _register(self, named: tuple[str, PathLike]) -> None:
        name, directory = named
        with _about(name):
            await self._parts.async_client.adapters.register(name, Path(directory), timeout_s=math.inf)

    def _run(
        self,
        items: Sequence[T],
        send: Callable[[T], Awaitable[R]],
        what: str,
        use_tqdm: bool,
        *,
        max_in_flight: int | None = None,
        stops_at_error: bool = True,
    ) -> list[R | MotetError]:
        if not items:
            return []
        bar = _bar(len(items), what, is_shown=use_tqdm)
        tokens = [0, 0]

        def on_done(result: object) -> None:
            if isinstance(result, Generation):
                tokens[0] += result.started.prompt_tokens
                tokens[1] += sum(completion.finished.usage.completion_tokens for completion in result.completions)
                if elapsed_s := bar.format_dict["elapsed"]:
                    bar.postfix = f"{tokens[0] / elapsed_s:.0f} in, {tokens[1] / elapsed_s:.0f} out tokens/s"
            bar.update(1)

        with bar:
            results: list[R | MotetError] = self._parts.run(
                lambda ended: run_all(
                    items,
                    send,
                    max_in_flight=max_in_flight or self._max_in_flight,
                    ended=ended,
                    on_done=on_done,
                    stops_at_error=stops_at_error,
                )
            )
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Parts:
    """What an LLM has to close. It does not know its LLM, so that one which nobody has any more is closed."""

    def __init__(self, work_dir: PathLike | None, flags: Sequence[str]) -> None:
        self._process_id = os.getpid()
        self._directory = Path(tempfile.mkdtemp(prefix="motet-llm-", dir=work_dir))
        self._server = PrivateServer(self._directory, flags)
        self._loop = LoopThread()
        self._client: Client | None = None
        self._async_client: AsyncClient | None = None
        self._ended: asyncio.Task[MotetError] | None = None
        self._is_closed = False

    @property
    def client(self) -> Client:
        """Raises Cancelled after close(), FailedPrecondition in a process that was forked since."""
        self._check_process()
        if self._client is None or self._is_closed:
            raise client_closed()
        return self._client

    @property
    def async_client(self) -> AsyncClient:
        """The client that the loop's thread uses."""
        assert self._async_client is not None, "after start()"
        return self._async_client

    def start(self, timeout_s: float) -> None:
        self._loop.run(self._start(timeout_s))
        self._client = Client(self._server.address, api_key=self._server.api_key)

    async def _start(self, timeout_s: float) -> None:
        await self._server.start(timeout_s)
        self._async_client = AsyncClient(self._server.address, api_key=self._server.api_key)
        self._ended = asyncio.create_task(self._server.wait_end())

    def run(self, work: Callable[[asyncio.Task[MotetError]], Any]) -> Any:
        """The result of `work`, which gets the task that ends with the server. Raises as `client` does."""
        self._check_process()
        if self._ended is None or self._is_closed:
            raise client_closed()
        return self._loop.run(work(self._ended))

    def close(self) -> None:
        if os.getpid() != self._process_id:
            return  # a fork has neither the loop's thread nor a child to stop: the server is the other process's
        self._is_closed = True
        if self._client is not None:
            self._client.close()
        self._loop.run(self._stop())
        self._loop.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise FailedPrecondition(
                f"this LLM belongs to process {self._process_id}, of which this one is a fork; make another LLM here, "
                "or use that one from threads"
            )

    async def _stop(self) -> None:
        if self._async_client is not None:
            await self._async_client.close()
        await self._server.stop()
        if self._ended is not None:
            await self._ended


def _pooled(item: Item) -> Any:
    return item.prompt


def _one_adapter(item: Item) -> str:
    if isinstance(item.adapter, Mapping):
        raise invalid_field("adapter", "names several; embeddings and classes take one")
    return item.adapter or ""


def _all_done(results: list[R | MotetError]) -> list[R]:
    """Without errors, which were raised."""
    return [result for result in results if not isinstance(result, MotetError)]


def _bar(total: int, what: str, *, is_shown: bool) -> Any:
    from tqdm.auto import tqdm  # comes with transformers, which the server needs

    return tqdm(total=total, desc=what, unit=what.removesuffix("s"), disable=not is_shown)

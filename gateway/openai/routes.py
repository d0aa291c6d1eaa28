"""Routes of the OpenAI-compatible API below `/v1`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import msgspec
from motet import AsyncClient, Chunk, GenerateOptions, MotetError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http.bodies import Bodies
from gateway.http.described import JSON, Described, Description
from gateway.http.errors import Refusal
from gateway.http.upstream import Upstream
from gateway.openai.chats.tool_choice import tool_choice_of
from gateway.openai.embeddings import EmbeddingBody, embeddings
from gateway.openai.errors import refused
from gateway.openai.forms import Forms, Reading
from gateway.openai.generations import chunks_of
from gateway.openai.handlers import decoded, name_fields
from gateway.openai.items.inputs import chat_of
from gateway.openai.items.messages import ResponsesBody
from gateway.openai.items.output import ResponseOutput
from gateway.openai.items.stream import collected, events_of, renamed
from gateway.openai.messages import Body, ChatBody, CompletionBody
from gateway.openai.models import MAX_LISTED, Models, Source
from gateway.openai.options import chat_options, completion_options, prompts_of
from gateway.openai.replies import Reply
from gateway.openai.responses import EventStream, while_connected
from gateway.openai.settings import OpenAiSettings

B = TypeVar("B", bound=Body)


def openai_routes(
    upstream: Upstream, bodies: Bodies, settings: OpenAiSettings, models: Models, timeout_s: float
) -> list[Described]:
    """The API, to be mounted at `/v1` with EXCEPTION_HANDLERS. `timeout_s` bounds one generation."""
    api = _Api(upstream, bodies, settings, models, timeout_s)
    streamed = (JSON, "text/event-stream")

    def about(summary: str, body: Any = None, media: tuple[str, ...] = (JSON,), **query: str) -> Description:
        return Description(summary=summary, body=body, response_media=media, query=query)

    listing = about("Models, the base model first", after="the model before", limit=f"1 to {MAX_LISTED}")
    return [
        Described("POST", "/completions", api.completions, about("Continue prompts", CompletionBody, streamed)),
        Described("POST", "/chat/completions", api.chat_completions, about("Continue a chat", ChatBody, streamed)),
        Described("POST", "/responses", api.responses, about("Complete items", ResponsesBody, streamed)),
        Described("POST", "/embeddings", api.embeddings, about("Vectors of texts or token ids", EmbeddingBody)),
        Described("GET", "/models", api.list_models, listing),
        Described("GET", "/models/{model:path}", api.get_model, about("One model")),
    ]


class _Api:
    """The handlers. Nothing is kept between requests."""

    def __init__(
        self, upstream: Upstream, bodies: Bodies, settings: OpenAiSettings, models: Models, timeout_s: float
    ) -> None:
        self._upstream = upstream
        self._bodies = bodies
        self._settings = settings
        self._models = models
        self._timeout_s = timeout_s
        self._forms = Forms()

    async def completions(self, request: Request) -> Any:
        body = await self._body(request, CompletionBody)
        options, prompts = completion_options(body), prompts_of(body, self._settings.max_prompts)
        client = self._upstream.client
        source = await self._models.resolve(body.model, client, is_checked=True)
        echoed = [await _text_of(prompt, source, client) for prompt in prompts] if body.echo else []
        reply = Reply(body.model, is_chat=False, n=body.n or 1, echoed=echoed, num_prompts=len(prompts))
        chunks = chunks_of(client, prompts, _with(options, source, reply), self._timeout_s)
        return await self._respond(request, body, reply, chunks)

    async def chat_completions(self, request: Request) -> Any:
        body = await self._body(request, ChatBody)
        reply = Reply(body.model, is_chat=True, n=body.n or 1)
        return await self._respond(request, body, reply, await self._chat(body, reply))

    async def responses(self, request: Request) -> Any:
        body = await decoded(self._bodies, request, ResponsesBody)
        reply = Reply(body.model, is_chat=True, n=1, prefix="resp_")
        output = ResponseOutput(body, reply)
        try:
            chunks = await self._chat(chat_of(body), reply)
        except (Refusal, MotetError) as error:
            raise renamed(error) from error
        if body.stream:
            events = events_of(output, reply, chunks)
            return EventStream(events, lambda: reply.headers, self._settings, is_typed=True)
        whole = await while_connected(request, collected(output, reply, chunks))
        return Response(msgspec.json.encode(whole), media_type="application/json", headers=reply.headers)

    async def _chat(self, body: ChatBody, reply: Reply) -> AsyncGenerator[tuple[int, Chunk, str], None]:
        """The chunks of a chat, none of which is there yet; they teach `reply` how they are read."""
        choice = tool_choice_of(body.tool_choice, body.tools)
        options = chat_options(body, choice)
        client = self._upstream.client
        source = await self._models.resolve(body.model, client, is_checked=True)

        def begin(source: Source, further: GenerateOptions) -> AsyncGenerator[tuple[int, Chunk, str], None]:
            whole = _with({**options, **further}, source, reply)
            return chunks_of(client, [body.messages], whole, self._timeout_s)

        reading = Reading(body, choice, source, self._forms, options.get("constraint"))
        return await reading.chunks(reply, begin, client)

    async def embeddings(self, request: Request) -> Response:
        body = await decoded(self._bodies, request, EmbeddingBody)
        work = embeddings(body, self._models, self._upstream.client, self._timeout_s)
        return Response(msgspec.json.encode(await while_connected(request, work)), media_type="application/json")

    async def list_models(self, request: Request) -> Response:
        limit = request.query_params.get("limit", str(MAX_LISTED))
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LISTED):
            raise refused("limit", f"is not from 1 to {MAX_LISTED}")
        after = request.query_params.get("after", "")
        return JSONResponse(await self._models.listed(self._upstream.client, after=after, limit=int(limit)))

    async def get_model(self, request: Request) -> Response:
        return JSONResponse(await self._models.get(request.path_params["model"], self._upstream.client))

    async def _body(self, request: Request, kind: type[B]) -> B:
        body = await decoded(self._bodies, request, kind)
        if body.n is not None and not 1 <= body.n <= 128:
            raise refused("n", f"is {body.n}; give 1 to 128")
        name_fields(request, _own_names(body))
        return body

    async def _respond(
        self, request: Request, body: Body, reply: Reply, chunks: AsyncGenerator[tuple[int, Chunk, str], None]
    ) -> Any:
        if body.stream:
            with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(_events(reply, chunks, with_usage), lambda: reply.headers, self._settings)
        await while_connected(request, _collect(reply, chunks))
        return Response(msgspec.json.encode(reply.whole()), media_type="application/json", headers=reply.headers)


async def _collect(reply: Reply, chunks: AsyncGenerator[Any, None]) -> None:
    async with contextlib.aclosing(chunks):
        async for position, chunk, fingerprint in chunks:
            choice = reply.add(position, chunk, fingerprint)
            choice.text.append(chunk.text)
            choice.logprobs.extend(chunk.logprobs)


async def _events(
    reply: Reply, chunks: AsyncGenerator[Any, None], with_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    async with contextlib.aclosing(chunks):
        async for position, chunk, fingerprint in chunks:
            choice = reply.add(position, chunk, fingerprint)
            for event in reply.events(choice, chunk, with_usage=with_usage):
                yield event
    if with_usage:
        yield reply.usage_event()


def _own_names(body: Body) -> dict[str, str]:
    """What this body calls fields that have more than one name."""
    names = {}
    if body.structured_outputs is not None and body.response_format is None:
        names["response_format"] = "structured_outputs"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None and body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    if getattr(body, "best_of", None) is None:
        names["best_of"] = "n"  # as many are sampled
    return names


def _with(options: GenerateOptions, source: Source, reply: Reply) -> GenerateOptions:
    # The key keeps all prompts of the request on one version where the adapter has a canary.
    options["routing_key"] = options["request_id"] = reply.id
    if source.adapter:
        options["adapter"] = source.adapter
    if source.digest:
        options["adapter_digest"] = source.digest
    if source.fingerprint:
        options["model_fingerprint"] = source.fingerprint
    return options


async def _text_of(prompt: str | list[int], source: Source, client: AsyncClient) -> str:
    if isinstance(prompt, str):
        return prompt
    return await client.model.detokenize(prompt, adapter=source.adapter, adapter_digest=source.digest)

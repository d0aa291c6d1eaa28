"""The generations of one request: one for each prompt, all under way at once, read as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from motet import AsyncClient, Chunk, GenerateOptions, MotetError
from motet.requests import Prompt

_OF_A_PROMPT = frozenset({"text", "token_ids"})  # fields that differ among the prompts of a request
_WAITING = 64  # chunks of several prompts that wait for their reader


def chunks_of(
    client: AsyncClient, prompts: Sequence[Prompt], options: GenerateOptions, timeout_s: float
) -> AsyncGenerator[tuple[int, Chunk, str], None]:
    """Position of the prompt, its next chunk, and the base model's fingerprint. Raises MotetError.

    Whatever ends the iteration ends the generations; close the iterator.
    """
    if len(prompts) == 1:
        return _one(client, 0, prompts[0], options, timeout_s)
    return _several(client, prompts, options, timeout_s)


async def _several(
    client: AsyncClient, prompts: Sequence[Prompt], options: GenerateOptions, timeout_s: float
) -> AsyncGenerator[tuple[int, Chunk, str], None]:
    queue: asyncio.Queue[tuple[int, Chunk, str] | BaseException | None] = asyncio.Queue(_WAITING)

    async def run(position: int, prompt: Prompt) -> None:
        try:
            async with contextlib.aclosing(_one(client, position, prompt, options, timeout_s)) as items:
                async for item in items:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:  # raised to the reader
            await queue.put(_about(error, position))

    tasks = [asyncio.ensure_future(run(position, prompt)) for position, prompt in enumerate(prompts)]
    try:
        num_running = len(tasks)
        while num_running:
            got = await queue.get()
            if isinstance(got, BaseException):
                raise got
            if got is None:
                num_running -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _about(error: Exception, position: int) -> Exception:
    """The error, which says which prompt it is about if it is about one of them only."""
    if not isinstance(error, MotetError):
        return error
    fields = {violation.field.partition(".")[0] for violation in error.field_violations}
    return (
        error.extended(f"this is about prompt number {position} of the list, counted from 0")
        if fields & _OF_A_PROMPT
        else error
    )


async def _one(
    client: AsyncClient, position: int, prompt: Prompt, options: GenerateOptions, timeout_s: float
) -> AsyncGenerator[tuple[int, Chunk, str], None]:
    if position and (request_id := options.get("request_id")):
        options = {**options, "request_id": f"{request_id}-{position}"}
    async with client.generate(prompt, timeout_s=timeout_s, **options) as stream:
        fingerprint: str | None = None
        async for chunk in stream:
            if fingerprint is None:
                fingerprint = "" if stream.started is None else stream.started.model_fingerprint
            yield position, chunk, fingerprint

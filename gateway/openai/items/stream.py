"""A response's chunks as events, or read to their end; errors have the names of the request's own fields."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from motet import Chunk, MotetError

from gateway.http.errors import Refusal
from gateway.openai import errors
from gateway.openai.errors import refusal_of
from gateway.openai.items.inputs import field_of
from gateway.openai.items.output import Event, ResponseOutput
from gateway.openai.replies import Reply


async def events_of(
    output: ResponseOutput, reply: Reply, chunks: AsyncGenerator[tuple[int, Chunk, str], None]
) -> AsyncGenerator[Event, None]:
    """The events. An error behind the first one is an event; raises Refusal before that."""
    has_begun = False
    try:
        async with contextlib.aclosing(chunks):
            async for position, chunk, fingerprint in chunks:
                choice = reply.add(position, chunk, fingerprint)
                for event in () if has_begun else output.begin():
                    yield event
                has_begun = True
                for event in output.add(choice, chunk):
                    yield event
    except (Refusal, MotetError) as error:
        refusal = renamed(error)
        if not has_begun:
            raise refusal from error
        for event in output.fail(refusal):
            yield event


async def collected(
    output: ResponseOutput, reply: Reply, chunks: AsyncGenerator[tuple[int, Chunk, str], None]
) -> dict[str, Any]:
    """The response once it has ended. Raises Refusal."""
    try:
        async with contextlib.aclosing(chunks):
            async for position, chunk, fingerprint in chunks:
                for _ in output.add(reply.add(position, chunk, fingerprint), chunk):
                    pass
    except (Refusal, MotetError) as error:
        raise renamed(error) from error
    return output.whole()


def renamed(error: Refusal | MotetError) -> Refusal:
    """A refusal of the chat that a request became, with the name of the request's field."""
    refusal = refusal_of(error)
    param = getattr(refusal, "param", None)
    return refusal if param is None else errors.renamed(refusal, field_of(param))

"""A grammar that the version which would respond cannot have, as it has other tokens: the active version responds."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from motet import GenerateOptions, InvalidArgument
from motet.errors import FieldViolation
from motet.responses import ResponseForm, load_template
from motet.responses.bundled import BUNDLED

from gateway.http.errors import Refusal
from gateway.openai.chats.tool_choice import tool_choice_of
from gateway.openai.forms import Forms, Reading
from gateway.openai.messages import ChatBody
from gateway.openai.models import Source

ACTIVE = "ab" * 32
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class OneForm(Forms):
    """The active version writes calls with tokens of its own."""

    num_forgotten = 0

    async def find(self, source: Source, *_: Any) -> tuple[ResponseForm, str]:
        marks = {"<tool_call>": 300, "</tool_call>": 301}
        return ResponseForm(load_template(dict(BUNDLED["hermes"])), "", ACTIVE, marks), source.digest or ACTIVE

    def forget(self, source: Source) -> bool:
        self.num_forgotten += 1
        return super().forget(source)


class Server:
    """Refuses grammars but for those of the versions in `takes`."""

    def __init__(self, *takes: str) -> None:
        self.takes = takes
        self.named: list[str] = []

    async def begin(self, source: Source, options: GenerateOptions) -> AsyncGenerator[Any, None]:
        assert "<[300]>" in getattr(options["constraint"], "grammar", "")
        self.named.append(source.digest)
        if source.digest not in self.takes:
            raise InvalidArgument("no token 300", field_violations=(FieldViolation("constraint.lark", "no token 300"),))
        yield 0, SimpleNamespace(adapter_digest=source.digest, text="x"), "fp"


async def read(server: Server, source: Source) -> tuple[list[Any], OneForm]:
    given = {"model": "a", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required"}
    body, forms = msgspec.json.decode(json.dumps(given), type=ChatBody), OneForm()
    anything: Any = SimpleNamespace(read_with=lambda _: None)
    reading = Reading(body, tool_choice_of("required", TOOLS), source, forms, None)
    chunks = await reading.chunks(anything, server.begin, anything)
    return [item async for item in chunks], forms


async def test_a_canary_without_the_tokens_of_the_grammar_is_left_out() -> None:
    server = Server(ACTIVE)
    items, forms = await read(server, Source("legal"))
    assert server.named == ["", ACTIVE] and len(items) == 1 and forms.num_forgotten == 1


async def test_a_grammar_that_no_version_takes_is_refused() -> None:
    server = Server()
    with pytest.raises(Refusal, match="no token 300"):
        await read(server, Source("legal"))
    assert server.named == ["", ACTIVE]


async def test_a_version_that_the_request_names_gets_one_generation() -> None:
    server = Server()
    with pytest.raises(Refusal):
        await read(server, Source("legal", ACTIVE))
    assert server.named == [ACTIVE]

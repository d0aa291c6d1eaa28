"""How a client finds the form of a model's completions, with the blocking client and with asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import jinja2
import pytest
from motet import AsyncClient, Client, InvalidArgument
from motet.calls import UnaryCall
from motet.responses import Reasoning, ResponseForm, find_form, find_form_async
from motet.v1 import model_pb2

QWEN = (
    '{% if tools %}call with <tool_call>{"name": ...}</tool_call>{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if think is not defined or think %}<think>\n{% endif %}{% endif %}"
)


@dataclass
class Server:
    """Responds to calls with a chat template; a token is a character's number."""

    chat_template: str
    response_template: str = ""
    refuses_tools: bool = False
    sent: list[Any] = field(default_factory=list)

    def send(self, call: UnaryCall[Any]) -> Any:
        self.sent.append(call.request)
        return call.read(self._response(call.request))

    def _response(self, request: Any) -> Any:
        if isinstance(request, model_pb2.GetModelRequest):
            return model_pb2.GetModelResponse(
                adapter=f"adapters/{request.adapter}" if request.adapter else "",
                adapter_digest="d" * 64 if request.adapter else "",
                has_chat_template=bool(self.chat_template),
                response_template=self.response_template,
            )
        if isinstance(request, model_pb2.DetokenizeRequest):
            return model_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids.ids)))
        chat = request.chat
        if chat.tools and self.refuses_tools:
            raise InvalidArgument("roles must alternate")
        text = jinja2.Template(self.chat_template).render(
            messages=[{"role": message.role, "content": message.content} for message in chat.messages],
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            **(json.loads(chat.template_kwargs) if chat.template_kwargs else {}),
        )
        return model_pb2.TokenizeResponse(token_ids=map(ord, text))


class AsyncServer(Server):
    async def send(self, call: UnaryCall[Any]) -> Any:
        return Server.send(self, call)


Find: TypeAlias = Callable[..., ResponseForm | None]


def _blocking(server: Server, *args: Any, **options: Any) -> ResponseForm | None:
    return find_form(cast(Client, server), *args, **options)


def _asynchronous(server: Server, *args: Any, **options: Any) -> ResponseForm | None:
    other = AsyncServer(server.chat_template, server.response_template, server.refuses_tools, server.sent)
    return asyncio.run(find_form_async(cast(AsyncClient, other), *args, **options))


@pytest.fixture(params=[_blocking, _asynchronous], ids=["blocking", "asyncio"])
def find(request: pytest.FixtureRequest) -> Find:
    return cast(Find, request.param)


def test_marks_of_the_chat_template_name_a_bundled_form_and_its_prompt_is_read(find: Find) -> None:
    form = find(Server(QWEN))
    assert form is not None and form.generation_prompt == "<|im_start|>assistant\n<think>\n"
    assert form.parser().push("so</think>x")[0] == Reasoning("so")


def test_arguments_of_the_chat_template_change_what_the_prompt_begins_with(find: Find) -> None:
    form = find(Server(QWEN), template_kwargs={"think": False})
    assert form is not None and form.generation_prompt == "<|im_start|>assistant\n"


def test_all_calls_are_about_the_version_that_the_first_one_found(find: Find) -> None:
    server = Server(QWEN)
    form = find(server, "legal")
    assert form is not None and form.adapter_digest == "d" * 64
    rendered = [request for request in server.sent if isinstance(request, model_pb2.TokenizeRequest)]
    assert len(rendered) == 3 and all(request.adapter_digest == "d" * 64 for request in rendered)
    assert {request.adapter for request in server.sent[1:]} == {"adapters/legal"}


@pytest.mark.parametrize(
    "server",
    [Server(""), Server("{% for message in messages %}{{ message.role }}{% endfor %}"), Server(QWEN, "", True)],
)
def test_without_marks_there_is_no_form(find: Find, server: Server) -> None:
    assert find(server) is None


def test_a_template_of_its_own_needs_no_marks(find: Find) -> None:
    form = find(Server("", '{"fields": {"content": {}}}'))
    assert form is not None and list(form.template.fields) == ["content"]

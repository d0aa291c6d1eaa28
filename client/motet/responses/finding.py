"""Finds out from a server how a model's completions are written: a few calls, once for each version of an adapter."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from motet.calls import UnaryCall
from motet.errors import FailedPrecondition, InvalidArgument
from motet.model.calls import ModelFacts, TokenizeOptions, detokenize_call, facts_call, tokenize_call
from motet.responses.choice import choose_template
from motet.responses.parser import ResponseParser
from motet.responses.templates import ResponseTemplate
from motet.responses.written import texts_of_marks

if TYPE_CHECKING:
    from motet.aio import AsyncClient
    from motet.client import Client

# Chat templates write their marks of tool calls around this call, or into the text that introduces the tools.
_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
)
_QUESTION = {"role": "user", "content": "Look up."}
_CONVERSATION: tuple[Mapping[str, Any], ...] = (
    _QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "a"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "look_up", "content": "a letter"},
)

_Calls: TypeAlias = Generator[UnaryCall[Any], Any, "ResponseForm | None"]
_Rendering: TypeAlias = Generator[UnaryCall[Any], Any, str]


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """How the completions of one version of a model are read."""

    template: ResponseTemplate
    generation_prompt: str = ""  # what its chat template begins the assistant's turn with
    adapter_digest: str = ""  # of the version; empty for the base model
    mark_tokens: Mapping[str, int] = field(default_factory=dict)  # ids of what is one token, by text, within marks

    def parser(self, *, only_first_call: bool = False) -> ResponseParser:
        """Reads one completion of a conversation that the chat template ended with its generation prompt.

        `only_first_call`: what is called behind a complete call is left out.
        """
        return ResponseParser(self.template, prefix=self.generation_prompt, only_first_call=only_first_call)


def find_form(
    client: Client,
    adapter: str = "",
    *,
    adapter_digest: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
    override: str = "",
) -> ResponseForm | None:
    """How completions of the base model, or of `adapter`, are read; None: nothing is known, they are plain text.

    The adapter's own response template counts, else the checkpoint's, else a bundled one whose marks its chat template
    writes. `override`: the name of a bundled one instead. Raises TemplateError, MotetError.
    """
    calls = _calls(adapter, adapter_digest, template_kwargs or {}, override)
    try:
        call = next(calls)
        while True:
            try:
                result = client.send(call)
            except (InvalidArgument, FailedPrecondition) as error:
                call = calls.throw(error)
            else:
                call = calls.send(result)
    except StopIteration as end:
        return _found(end)


async def find_form_async(
    client: AsyncClient,
    adapter: str = "",
    *,
    adapter_digest: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
    override: str = "",
) -> ResponseForm | None:
    """find_form() with asyncio."""
    calls = _calls(adapter, adapter_digest, template_kwargs or {}, override)
    try:
        call = next(calls)
        while True:
            try:
                result = await client.send(call)
            except (InvalidArgument, FailedPrecondition) as error:
                call = calls.throw(error)
            else:
                call = calls.send(result)
    except StopIteration as end:
        return _found(end)


def _found(end: StopIteration) -> ResponseForm | None:
    form: ResponseForm | None = end.value
    return form


def _calls(adapter: str, adapter_digest: str, template_kwargs: Mapping[str, Any], override: str) -> _Calls:
    """The calls to send one after the other; each is resumed with its result, or with its refusal."""
    facts: ModelFacts = yield facts_call(adapter, adapter_digest)
    rendered, generation_prompt = "", ""
    if facts.has_chat_template:
        version = facts.adapter_digest

        def render(conversation: Sequence[Mapping[str, Any]], *, has_prompt: bool, tools: bool = False) -> _Rendering:
            options: TokenizeOptions = {"template_kwargs": template_kwargs, "adapter_digest": version}
            options["add_generation_prompt"] = has_prompt
            if tools:
                options["tools"] = _TOOLS
            return _render(list(conversation), facts.adapter, options)

        try:
            rendered = yield from render(_CONVERSATION, has_prompt=False, tools=True)
        except (InvalidArgument, FailedPrecondition):
            rendered = ""  # a chat template that knows no tools
        try:
            without = yield from render([_QUESTION], has_prompt=False)
            whole = yield from render([_QUESTION], has_prompt=True)
        except (InvalidArgument, FailedPrecondition):
            without = whole = ""  # one that refuses so short a conversation
        generation_prompt = whole.removeprefix(without) if whole.startswith(without) else ""
    template = choose_template(facts.response_template, rendered, override=override)
    if template is None:
        return None
    tokens = yield from _mark_tokens(template, facts)
    return ResponseForm(template, generation_prompt, facts.adapter_digest, tokens)


def _mark_tokens(template: ResponseTemplate, facts: ModelFacts) -> Generator[UnaryCall[Any], Any, dict[str, int]]:
    """Special tokens within the marks, and other tokens that are named as such: grammars know neither as a text."""
    marks = texts_of_marks(template)
    found = {text: token_id for token_id, text in facts.special_tokens.items() if any(text in mark for mark in marks)}
    if facts.has_tokenizer and marks:
        options = TokenizeOptions(adapter_digest=facts.adapter_digest, add_special_tokens=False, return_tokens=True)
        tokenized = yield tokenize_call("\n".join(marks), facts.adapter, options)
        for token, token_id in zip(tokenized.tokens, tokenized.token_ids, strict=True):
            text = token.decode(errors="replace").strip()
            if len(text) > 2 and text.startswith("<") and text.endswith(">"):
                found[text] = token_id
    return found


def _render(conversation: list[Mapping[str, Any]], adapter: str, options: TokenizeOptions) -> _Rendering:
    tokens = yield tokenize_call(conversation, adapter, options)
    text: str = yield detokenize_call(tokens.token_ids, adapter, False, options["adapter_digest"])
    return text

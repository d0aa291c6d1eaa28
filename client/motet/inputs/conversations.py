"""Conversations: what callers give, and the messages of the protocol made of it.

A turn is a ChatMessage, or a mapping as OpenAI's API has it. Refuses what the protocol cannot carry; the server judges
everything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from motet.errors import invalid_field
from motet.inputs.scalars import text_of
from motet.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the assistant made."""

    name: str  # of the function
    arguments: str = "{}"  # the text of a JSON object
    id: str = ""  # names the call for its result


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str  # such as "system", "user", "assistant", "tool": what the checkpoint's chat template knows
    content: str | Sequence[str] = ""  # text, or the texts of its parts
    tool_calls: Sequence[ToolCall] = ()  # that the assistant's turn made
    tool_call_id: str = ""  # for the result of a call: the call's id
    name: str = ""  # who speaks among those of one role, or the function whose result this is
    reasoning: str = ""  # what the assistant's turn thought before it spoke


ChatTurn: TypeAlias = ChatMessage | Mapping[str, Any]


class ConversationOptions(TypedDict, total=False):
    """Keyword arguments for prompts that are conversations. Left out or None: the server's default."""

    tools: Sequence[Mapping[str, Any]]  # {"type": "function", "function": {...}} each, for the chat template
    template_kwargs: Mapping[str, Any]  # further variables of the chat template, {"enable_thinking": False}
    add_generation_prompt: bool | None  # end the prompt with the beginning of the assistant's turn; default true
    continue_final_message: bool  # the completion goes on within the last message


def set_conversation(chat: types_pb2.ChatMessages, turns: Sequence[ChatTurn], options: Mapping[str, Any]) -> None:
    """Fill `chat`. `options` may hold more than ConversationOptions."""
    chat.messages.extend(_message(turn, f"prompt[{position}]") for position, turn in enumerate(turns))
    if options.get("tools"):
        chat.tools = _json("tools", list(options["tools"]))
    if options.get("template_kwargs"):
        chat.template_kwargs = _json("template_kwargs", dict(options["template_kwargs"]))
    if options.get("add_generation_prompt") is not None:
        chat.add_generation_prompt = options["add_generation_prompt"]
    chat.continue_final_message = bool(options.get("continue_final_message"))


def refuse_conversation_options(options: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if an option of conversations is given with a prompt of another kind."""
    for name in ConversationOptions.__annotations__:
        if options.get(name):
            raise invalid_field(name, "is for conversations; give a list of ChatMessage as the prompt, or leave it out")


def _message(turn: object, place: str) -> types_pb2.ChatMessage:
    if isinstance(turn, Mapping):
        turn = _turn_of(turn, place)
    if not isinstance(turn, ChatMessage):
        raise invalid_field(place, f'is {turn!r}; give {{"role": ..., "content": ...}}')
    message = types_pb2.ChatMessage(
        role=text_of(f"{place}.role", turn.role),
        tool_call_id=text_of(f"{place}.tool_call_id", turn.tool_call_id),
        name=text_of(f"{place}.name", turn.name),
        reasoning=text_of(f"{place}.reasoning", turn.reasoning),
    )
    if isinstance(turn.content, str) or not isinstance(turn.content, Sequence):
        message.content = text_of(f"{place}.content", turn.content)
    else:
        for index, text in enumerate(turn.content):
            message.parts.add(text=text_of(f"{place}.content[{index}]", text))
    for index, call in enumerate(turn.tool_calls):
        path = f"{place}.tool_calls[{index}]"
        message.tool_calls.add(
            id=text_of(f"{path}.id", call.id),
            name=text_of(f"{path}.name", call.name),
            arguments=text_of(f"{path}.arguments", call.arguments),
        )
    return message


_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content"))


def _is_left_out(value: object) -> bool:
    """Whether a field has no value. LiteLLM adds one with {"refusal": null} to the messages of responses."""
    if isinstance(value, Mapping):
        return all(_is_left_out(each) for each in value.values())
    return value in (None, [], "")


def _turn_of(given: Mapping[str, Any], place: str) -> ChatMessage:
    """A turn in the form of OpenAI's API. Responses have further fields, which are null or empty: these count as left
    out, so that a response can be sent back."""
    unknown = sorted(name for name in set(given) - _KEYS if not _is_left_out(given[name]))
    if unknown or "role" not in given or not {"content", "tool_calls"} & set(given):
        what = f"has {', '.join(map(repr, unknown))}" if unknown else "lacks 'role', or both 'content' and 'tool_calls'"
        raise invalid_field(place, f"{what}; give some of {', '.join(sorted(_KEYS))}")
    content = given.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = [_part(part, f"{place}.content[{index}]") for index, part in enumerate(content)]
    return ChatMessage(
        given["role"],
        "" if content is None else content,
        [_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(given.get("tool_calls") or ())],
        given.get("tool_call_id") or "",
        given.get("name") or "",
        given.get("reasoning") or given.get("reasoning_content") or "",
    )


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise invalid_field(place, 'is not {"type": "text", "text": ...}; only text parts are served')
    return text_of(f"{place}.text", part.get("text"))


def _call(call: object, place: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise invalid_field(
            place, 'is not {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        )
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, Mapping):
        arguments = _json(f"{place}.function.arguments", dict(arguments))
    return ToolCall(function.get("name", ""), arguments, call.get("id") or "")


def _json(field: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise invalid_field(field, f"cannot be written as JSON: {error}; give plain values") from None

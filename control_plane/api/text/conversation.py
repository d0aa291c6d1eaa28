"""A conversation of a client as plain values, in the form that chat templates take. Nothing is rendered here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from motet.v1 import types_pb2

from control_plane.checks import Violations, quoted

MAX_MESSAGES = 1024
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = 256
MAX_PARTS = 4096  # of a conversation
MAX_TOOL_CALLS = 1024  # of a conversation
MAX_ARGUMENTS_BYTES = 1024 * 1024  # of all calls of a conversation
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024
MAX_JSON_DEPTH = 64
# What the conversation itself, or the server, gives to a template.
_OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders."""

    messages: Sequence[Mapping[str, Any]]  # as templates take them; `content` may be a list of parts
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    size_bytes: int = 0  # of all texts, about: what they are counted as while they wait

    def to_json(self, time_s: float | None) -> bytes:
        """The conversation for the process that renders it. `time_s`: when that is, seconds since 1970; None: now."""
        return json.dumps(
            {
                "messages": self.messages,
                "tools": self.tools,
                "template_kwargs": self.template_kwargs,
                "add_generation_prompt": self.add_generation_prompt,
                "continue_final_message": self.continue_final_message,
                "time_s": time_s,
            },
            ensure_ascii=False,
        ).encode()


def check_conversation(chat: types_pb2.ChatMessages, violations: Violations) -> Conversation | None:
    """The conversation; None where it is too wrong to be read further. Adds everything that is wrong with it."""
    if not chat.messages:
        violations.add("chat.messages", "is empty; a conversation needs at least one message")
    if len(chat.messages) > MAX_MESSAGES:
        violations.add("chat.messages", f"has {len(chat.messages)} messages; use at most {MAX_MESSAGES}")
        return None
    # Counted before anything is read: a message of 4 MiB may hold a million parts or calls.
    for name, most in (("parts", MAX_PARTS), ("tool_calls", MAX_TOOL_CALLS)):
        if (count := sum(len(getattr(message, name)) for message in chat.messages)) > most:
            violations.add(f"chat.messages.{name}", f"are {count} in all messages; use at most {most}")
            return None
    num_bytes = sum(len(call.arguments.encode()) for message in chat.messages for call in message.tool_calls)
    if num_bytes > MAX_ARGUMENTS_BYTES:
        violations.add(
            "chat.messages", f"have {num_bytes} bytes of arguments of tool calls; use at most {MAX_ARGUMENTS_BYTES}"
        )
        return None
    messages = [
        _checked_message(message, f"chat.messages[{index}]", violations) for index, message in enumerate(chat.messages)
    ]
    tools = _checked_tools(chat.tools, violations)
    template_kwargs = _checked_kwargs(chat.template_kwargs, violations)
    adds = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    if chat.continue_final_message:
        if adds:
            violations.add(
                "chat.add_generation_prompt",
                "is set with chat.continue_final_message: a prompt ends in the last message or after it; set only one",
            )
        if messages and not messages[-1]["content"]:
            violations.add("chat.continue_final_message", "is set, and the last message has no text to go on from")
    return Conversation(
        messages=messages,
        tools=tools,
        template_kwargs=template_kwargs,
        add_generation_prompt=adds,
        continue_final_message=chat.continue_final_message,
        size_bytes=chat.ByteSize(),
    )


def _checked_message(message: types_pb2.ChatMessage, place: str, violations: Violations) -> dict[str, Any]:
    _check_length(message.role, f"{place}.role", violations, longest=MAX_ROLE_CHARS)
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        plain["content"] = _checked_parts(message, place, violations)
    if message.name:
        _check_length(message.name, f"{place}.name", violations)
        plain["name"] = message.name
    if message.tool_call_id:
        _check_length(message.tool_call_id, f"{place}.tool_call_id", violations)
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        # The names that templates know it by: `thinking` is gpt-oss's.
        plain["reasoning_content"] = plain["thinking"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            _checked_call(call, f"{place}.tool_calls[{index}]", violations)
            for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _checked_parts(message: types_pb2.ChatMessage, place: str, violations: Violations) -> str | list[dict[str, str]]:
    """The text of one part; several as templates take them."""
    if message.content:
        violations.add(f"{place}.parts", f"is set together with {place}.content; send one of them")
    for index, part in enumerate(message.parts):
        if part.WhichOneof("part") is None:
            violations.add(f"{place}.parts[{index}]", "is not set; send text")
    if len(message.parts) == 1:
        return message.parts[0].text
    return [{"type": "text", "text": part.text} for part in message.parts]


def _checked_call(call: types_pb2.ToolCall, place: str, violations: Violations) -> dict[str, Any]:
    _check_length(call.name, f"{place}.name", violations)
    if call.id:
        _check_length(call.id, f"{place}.id", violations)
    arguments = _json(call.arguments, f"{place}.arguments", violations) if call.arguments else {}
    if not isinstance(arguments, dict | None):
        violations.add(f"{place}.arguments", f"is {_kind(arguments)}; give the text of a JSON object")
    plain: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **plain} if call.id else plain


def _checked_tools(text: str, violations: Violations) -> list[dict[str, Any]]:
    if not text:
        return []
    if not _check_size(text, "chat.tools", MAX_TOOLS_BYTES, violations):
        return []
    tools = _json(text, "chat.tools", violations)
    if tools is None:
        return []
    if not isinstance(tools, list):
        violations.add("chat.tools", f"is {_kind(tools)}; give the text of a JSON array of functions")
        return []
    if len(tools) > MAX_TOOLS:
        violations.add("chat.tools", f"has {len(tools)} functions; use at most {MAX_TOOLS}")
        return []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or tool.get("type") != "function":
            violations.add(
                f"chat.tools[{index}]",
                'is not {"type": "function", "function": {"name": ...}}; send functions in that form',
            )
        else:
            _check_length(name, f"chat.tools[{index}].function.name", violations)
    return tools


def _checked_kwargs(text: str, violations: Violations) -> dict[str, Any]:
    place = "chat.template_kwargs"
    if not text or not _check_size(text, place, MAX_TEMPLATE_KWARGS_BYTES, violations):
        return {}
    kwargs = _json(text, place, violations)
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        violations.add(place, f"is {_kind(kwargs)}; give the text of a JSON object")
        return {}
    for name in kwargs:
        if name in _OWN_VARIABLES:
            violations.add(place, f"has {quoted(name)}, which is not a variable of its own; leave it out")
        elif not name.isidentifier():
            violations.add(place, f"has {quoted(name)}, which is not the name of a variable; rename it")
    return kwargs


def _check_length(text: str, place: str, violations: Violations, *, longest: int = MAX_NAME_CHARS) -> None:
    if not 1 <= len(text) <= longest:
        violations.add(place, f"has {len(text)} characters; use 1 to {longest}")


def _check_size(text: str, place: str, most_bytes: int, violations: Violations) -> bool:
    num_bytes = len(text.encode())
    if num_bytes > most_bytes:
        violations.add(place, f"has {num_bytes} bytes; use at most {most_bytes}")
    return num_bytes <= most_bytes


def _json(text: str, place: str, violations: Violations) -> Any:
    """The value of a JSON text; None, with a violation, where it has none, or null."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if value is None:
            violations.add(place, "is null; leave the field out instead")
        elif _depth(value) > MAX_JSON_DEPTH:
            raise RecursionError
        elif "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        violations.add(place, f"is nested deeper than {MAX_JSON_DEPTH} levels; make it flatter")
    except UnicodeEncodeError:
        violations.add(place, "has half of a surrogate pair, which is not a character; send whole characters")
    except json.JSONDecodeError as error:
        violations.add(place, f"is not JSON at character {error.pos}: {error.msg}; send the text of a JSON value")
    except ValueError as error:  # NaN, or a number of thousands of digits
        violations.add(place, f"is not JSON: {str(error)[:100]}; send the text of a JSON value")
    else:
        return value
    return None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a value of JSON")


def _depth(value: Any) -> int:
    """How deep lists and objects are nested in it."""
    deepest, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        deepest += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return deepest


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return f"JSON for {kinds.get(type(value), 'a number')}"

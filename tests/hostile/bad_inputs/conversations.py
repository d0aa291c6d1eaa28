"""Conversations of GenerationService.Generate: tools, variables of the template, parts, calls and open ends."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from motet.v1 import types_pb2

from tests.hostile.bad_inputs.case import OK, Case

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER: dict[str, Any] = {"role": "user", "content": "x"}
CALL: dict[str, Any] = {"name": "look", "arguments": "{}"}
DEEP = "[" * 65 + "]" * 65

# What a conversation has beside one user's turn; the field at fault; what the message says.
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools that are not JSON": ({"tools": "{"}, "chat.tools", "not JSON"),
    "tools of 257 KiB": ({"tools": '["' + "x" * 257 * 1024 + '"]'}, "chat.tools", "262144"),
    "tools that are an object": ({"tools": "{}"}, "chat.tools", "array"),
    "tools that are null": ({"tools": "null"}, "chat.tools", "leave the field out"),
    "tools with NaN": ({"tools": "[NaN]"}, "chat.tools", "NaN"),
    "tools of 65 levels": ({"tools": DEEP}, "chat.tools", "64"),
    "tools of 100 000 levels": ({"tools": "[" * 100_000}, "chat.tools", "64"),
    "tools with half a surrogate pair": ({"tools": '["\\ud800"]'}, "chat.tools", "whole characters"),
    "a number of 5000 digits": ({"tools": "[" + "1" * 5000 + "]"}, "chat.tools", "not JSON"),
    "129 tools": ({"tools": json.dumps([TOOL] * 129)}, "chat.tools", "128"),
    "a tool that is a string": ({"tools": '["look"]'}, "chat.tools[0]", "function"),
    "a tool without a name": ({"tools": '[{"type": "function", "function": {}}]'}, "chat.tools[0]", "name"),
    "a tool of another type": ({"tools": json.dumps([TOOL, {**TOOL, "type": "web"}])}, "chat.tools[1]", "function"),
    "a tool of an empty name": (
        {"tools": '[{"type": "function", "function": {"name": ""}}]'},
        "chat.tools[0].function.name",
        "256",
    ),
    "variables that are an array": ({"template_kwargs": "[]"}, "chat.template_kwargs", "object"),
    "variables of 65 KiB": ({"template_kwargs": '{"a": "' + "x" * 65 * 1024 + '"}'}, "chat.template_kwargs", "65536"),
    "a variable of the conversation": ({"template_kwargs": '{"messages": []}'}, "chat.template_kwargs", "messages"),
    "a variable of the server": ({"template_kwargs": '{"strftime_now": 1}'}, "chat.template_kwargs", "strftime_now"),
    "a variable without a name": ({"template_kwargs": '{"": 1}'}, "chat.template_kwargs", "rename"),
    "an open end and a new turn": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "chat.add_generation_prompt",
        "continue_final_message",
    ),
}
BAD_TURNS: dict[str, tuple[dict[str, Any], str, str]] = {
    "content and parts": ({**USER, "parts": [{"text": "y"}]}, "chat.messages[0].parts", "content"),
    "a part of nothing": ({"role": "user", "parts": [{}]}, "chat.messages[0].parts[0]", "text"),
    "4097 parts": ({"role": "user", "parts": [{"text": "y"}] * 4097}, "chat.messages.parts", "4096"),
    "a name of 257 characters": ({**USER, "name": "n" * 257}, "chat.messages[0].name", "256"),
    "an id of 257 characters": ({**USER, "tool_call_id": "n" * 257}, "chat.messages[0].tool_call_id", "256"),
    "1025 calls": ({"role": "assistant", "tool_calls": [CALL] * 1025}, "chat.messages.tool_calls", "1024"),
    "a call without a name": (
        {"role": "assistant", "tool_calls": [{"arguments": "{}"}]},
        "chat.messages[0].tool_calls[0].name",
        "256",
    ),
    "a call's id of 257 characters": (
        {"role": "assistant", "tool_calls": [{**CALL, "id": "i" * 257}]},
        "chat.messages[0].tool_calls[0].id",
        "256",
    ),
    "arguments that are an array": (
        {"role": "assistant", "tool_calls": [{**CALL, "arguments": "[]"}]},
        "chat.messages[0].tool_calls[0].arguments",
        "object",
    ),
    "arguments of more than 1 MiB": (
        {"role": "assistant", "tool_calls": [{**CALL, "arguments": '{"a": "' + "x" * 2**20 + '"}'}]},
        "chat.messages",
        "1048576",
    ),
}
GOOD: dict[str, dict[str, Any]] = {
    "128 tools": {"tools": json.dumps([TOOL] * 128)},
    "64 levels": {"template_kwargs": '{"a": ' + "[" * 63 + "]" * 63 + "}"},
    "an open end": {"continue_final_message": True},
    "no new turn": {"add_generation_prompt": False},
}
GOOD_TURNS: dict[str, dict[str, Any]] = {
    "two parts": {"role": "user", "parts": [{"text": "a"}, {"text": "b"}]},
    "a call": {"role": "assistant", "tool_calls": [{**CALL, "id": "i" * 256}], "reasoning": "\0"},
    "a call of nothing": {"role": "assistant", "tool_calls": [{"name": "n" * 256}]},
    "a result": {"role": "tool", "content": "x", "tool_call_id": "\U0001f642" * 256, "name": "n" * 256},
}


def chats() -> Iterator[tuple[str, types_pb2.ChatMessages, str, str]]:
    """Name, conversation, field at fault and what the message says; both empty for one that is taken."""
    for name, (more, field, says) in BAD.items():
        yield name, types_pb2.ChatMessages(messages=[USER], **more), field, says
    for name, (turn, field, says) in BAD_TURNS.items():
        yield name, types_pb2.ChatMessages(messages=[turn]), field, says
    empty = types_pb2.ChatMessages(messages=[USER, {"role": "assistant"}], continue_final_message=True)
    yield "an open end of no text", empty, "chat.continue_final_message", "no text"
    for name, more in GOOD.items():
        yield name, types_pb2.ChatMessages(messages=[USER], **more), "", ""
    for name, turn in GOOD_TURNS.items():
        yield name, types_pb2.ChatMessages(messages=[turn]), "", ""


def cases(method: str, message_with: Any, *, without: Collection[str] = ()) -> Iterator[Case]:
    """`message_with`: the message of the method for a conversation. `without`: names of what the method refuses so."""
    for name, chat, field, says in chats():
        if name in without:
            continue
        messages = (message_with(chat).SerializeToString(),)
        name = f"{method.rpartition('/')[2]} {name}"
        if field:
            yield Case(name=name, method=method, messages=messages, fields=(field,), says=says)
        else:
            yield Case(name=name, method=method, messages=messages, code=OK)

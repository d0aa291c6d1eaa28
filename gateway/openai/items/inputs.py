"""A request of `/v1/responses` as a chat: items become messages, functions and formats get the form of chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.openai.errors import refused
from gateway.openai.items.messages import ResponsesBody
from gateway.openai.messages import ChatBody, Generated
from gateway.openai.options import check_names

_NOTHING_IS_KEPT = "the gateway keeps no responses; send the items of the conversation as input"
_REFUSED: Mapping[str, str] = {
    "previous_response_id": f"is not served: {_NOTHING_IS_KEPT}",
    "conversation": f"is not served: {_NOTHING_IS_KEPT}",
    "store": "is served as false only, which it is if left out: the gateway keeps no responses",
    "background": "is not served: the gateway keeps no responses; stream instead",
    "prompt": "is not served; give instructions and input",
    "max_tool_calls": "is for tools that the server runs, which are not served",
    "truncation": "is served as 'disabled' only: an input that does not fit is refused",
    "service_tier": "is not served at this value; leave it out",
    "reasoning": "is not served; give chat_template_kwargs that the checkpoint's template knows",
}
# Values at which one of them changes nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
}
_LOGPROBS = "message.output_text.logprobs"
# Fields of the same meaning.
_OTHERS = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
# What a field of the chat is called in the request that it was made from.
_FIELDS: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}
_PARTS = ("input_text", "output_text", "text")


def chat_of(body: ResponsesBody) -> ChatBody:
    """The same request as a chat. Raises Refusal."""
    check_names(body)
    for name, why in _REFUSED.items():
        value = getattr(body, name)
        is_empty = isinstance(value, Mapping) and not any(each is not None for each in value.values())
        if value is not None and not is_empty and value not in _NEUTRAL.get(name, ()):
            raise refused(name, why)
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        raise refused("stream_options", "has include_usage, which is for chats: the last event has the usage")
    has_logprobs = _LOGPROBS in (body.include or ())
    if unknown := [name for name in body.include or () if name != _LOGPROBS]:
        raise refused("include", f"has {unknown[0][:64]!r}; {_LOGPROBS!r} is served")
    if body.top_logprobs is not None and not has_logprobs:
        raise refused("top_logprobs", f"needs {_LOGPROBS!r} in include")
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    chat = ChatBody(
        model=body.model,
        messages=messages + _messages(body.input),
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if has_logprobs else None,
        top_logprobs=body.top_logprobs,
        tools=[_tool(tool, f"tools[{position}]") for position, tool in enumerate(body.tools or ())] or None,
        response_format=_format(body.text),
    )
    for name in (*Generated.__struct_fields__, *_OTHERS):
        setattr(chat, name, getattr(body, name))
    return chat


def field_of(param: str) -> str:
    """What the request calls a field of the chat that it became."""
    head = param.partition("[")[0].partition(".")[0]
    if head == "tools":
        return param.replace(".function.", ".", 1)
    return _FIELDS.get(head, param)


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise refused("input", "is empty; give a text or at least one item")
    messages: list[dict[str, Any]] = []
    for position, item in enumerate(given):
        _add(messages, item, f"input[{position}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """Add an item. What the assistant thought, said and called in one turn is one message."""
    kind = item.get("type")
    if kind in (None, "message"):
        role, content = item.get("role"), _content(item.get("content"), f"{place}.content")
        if not isinstance(role, str):
            raise refused(f"{place}.role", "is not a text, such as 'user'")
        if role != "assistant":
            messages.append({"role": role, "content": content})
            return
        turn = _turn(messages, is_open=lambda last: last["content"] is None and "tool_calls" not in last)
        turn["content"] = content
    elif kind == "reasoning":
        if item.get("encrypted_content") is not None:
            raise refused(f"{place}.encrypted_content", "is not served; leave it out")
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise refused(f"{place}.content", "is not a list of parts with a text")
        if texts:
            turn = _turn(messages, is_open=lambda _last: False)
            turn["reasoning_content"] = "".join(str(text) for text in texts)
    elif kind == "function_call":
        function = {"name": _text(item, "name", place), "arguments": _arguments(item, place)}
        turn = _turn(messages, is_open=lambda _last: True)
        calls = turn.setdefault("tool_calls", [])
        calls.append({"id": _text(item, "call_id", place), "type": "function", "function": function})
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": output})
    else:
        raise refused(f"{place}.type", "is not message, reasoning, function_call or function_call_output")


def _turn(messages: list[dict[str, Any]], *, is_open: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The assistant's message that ends the conversation, if it goes on with the item; else another one."""
    if not messages or messages[-1]["role"] != "assistant" or not is_open(messages[-1]):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refused(f"{place}.{name}", "is not a text")
    return value


def _arguments(item: Mapping[str, Any], place: str) -> str:
    text = _text(item, "arguments", place)
    try:
        json.loads(text.strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise refused(f"{place}.arguments", f"is not JSON: {error}") from error
    return text


def _content(given: object, place: str) -> Any:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise refused(place, "is neither a text nor a list of parts")
    texts = []
    for position, part in enumerate(given):
        is_text = isinstance(part, Mapping) and part.get("type") in _PARTS and isinstance(part.get("text"), str)
        if not is_text:
            raise refused(f"{place}[{position}]", "is not a part with text; input_text and output_text are served")
        texts.append({"type": "text", "text": part["text"]})
    return texts


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise refused(f"{place}.type", "is not function; other tools are not served")
    known = ("type", "name", "description", "parameters", "strict")
    if unknown := [name for name in tool if name not in known and tool[name] is not None]:
        raise refused(f"{place}.{unknown[0][:64]}", f"is not served; {', '.join(known)} are")
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _format(text: Mapping[str, Any] | None) -> Any:
    if text is None:
        return None
    unknown = [name for name in text if name not in ("format", "verbosity")]
    if unknown or text.get("verbosity") not in (None, "medium"):
        raise refused(f"text.{(unknown or ['verbosity'])[0][:64]}", "is not served, or not at this value; leave it out")
    given = text.get("format")
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return given
    if not isinstance(given.get("schema"), Mapping):
        raise refused("text.format.schema", "is missing or not an object; give a JSON schema")
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}

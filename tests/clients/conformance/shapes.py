"""What of a response can be compared between servers: status, kind of content, keys with types, order of chunks.

A shape is a list of lines. Values that differ from run to run, such as ids, times and texts, are not in it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx

from tests.clients.conformance.cases import Case

_TYPES = {str: "text", bool: "truth", int: "number", float: "number", type(None): "null", list: "list", dict: "object"}
# Objects whose keys are data: {token: log-probability}.
_TABLES = ("top_logprobs",)


def shape_of(client: httpx.Client, case: Case) -> list[str]:
    """Send the request, and describe the response."""
    if case.body is None:
        response = client.get(case.path)
    else:
        content = case.body if isinstance(case.body, str) else json.dumps(case.body)
        response = client.post(case.path, content=content, headers={"content-type": "application/json"})
    kind = response.headers.get("content-type", "none").partition(";")[0]
    lines = [f"status {response.status_code}", f"content {kind if response.content else 'none'}"]
    if kind == "text/event-stream":
        return lines + _stream_shape(response.text)
    if kind == "application/json" and response.content:
        return lines + _keys([response.json()]) + _values(response.json())
    return lines


def _stream_shape(text: str) -> list[str]:
    """The order of its events, where equal ones in a row count as one, and the keys of all of them."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    order = [_event(json.loads(line)) if line != "[DONE]" else "[DONE]" for line in data]
    return [f"order {event}" for event, _ in itertools.groupby(order)] + _keys(events)


def _event(event: dict[str, Any]) -> str:
    """What an event is for: its type, or the parts of it that have a value."""
    if "type" in event:
        return str(event["type"])
    choices = [part for choice in event.get("choices", ()) for part in _parts(choice)]
    return " ".join([*choices, *(["usage"] if event.get("usage") else []), *(["error"] if "error" in event else [])])


def _parts(choice: dict[str, Any]) -> Iterator[str]:
    for key, value in sorted(choice.get("delta", {}).items()):
        if value is not None and key != "tool_calls":
            yield key if value or key == "content" else f"empty-{key}"
        for call in value or () if key == "tool_calls" else ():
            yield "call" if call.get("id") else "arguments"
    if choice.get("text"):
        yield "text"
    if choice.get("finish_reason"):
        yield f"finish={choice['finish_reason']}"


def _values(body: dict[str, Any]) -> list[str]:
    """The few values that are words of the interface."""
    found = [f"object is {body['object']}"] if isinstance(body.get("object"), str) else []
    for choice in body.get("choices", ()):
        found.append(f"finish_reason is {choice['finish_reason']}")
    if isinstance(body.get("error"), dict):
        found += [f"{name} is {body['error'].get(name)}" for name in ("type", "param", "code")]
    return list(dict.fromkeys(found))


def _keys(bodies: list[Any]) -> list[str]:
    types: dict[str, set[str]] = {}
    for body in bodies:
        for path, kind in _walk(body, ""):
            types.setdefault(path, set()).add(kind)
    return [f"{path}: {'|'.join(sorted(kinds))}" for path, kinds in sorted(types.items())]


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if path:
        yield path, _TYPES[type(value)]
    if isinstance(value, dict) and path.rpartition(".")[2].removesuffix("[]") not in _TABLES:
        for key, inner in value.items():
            yield from _walk(inner, f"{path}.{key}" if path else key)
    if isinstance(value, list):
        for inner in value:
            yield from _walk(inner, f"{path}[]")

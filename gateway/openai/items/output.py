"""One response as it comes: its items, and the events of a stream that report them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from motet import Chunk

from gateway.http.errors import Refusal
from gateway.openai.items.messages import ResponsesBody
from gateway.openai.replies import Choice, Reply

Event: TypeAlias = dict[str, Any]


class ResponseOutput:
    """The response to `body`, whose completion `reply` has. `add` takes its chunks."""

    def __init__(self, body: ResponsesBody, reply: Reply) -> None:
        self._body = body
        self._reply = reply
        self._created_s = int(time.time())
        self._completed_s: int | None = None
        self._status = "in_progress"
        self._error: Event | None = None
        self._items: list[Event] = []
        self._logprobs: list[Event] = []  # of tokens whose text has not come yet
        self._broken: set[str] = set()  # ids of calls that broke off
        self._sequence_number = 0

    def begin(self) -> Iterator[Event]:
        """The events before the first item."""
        yield self._event("response.created", response=self.whole())
        yield self._event("response.in_progress", response=self.whole())

    def add(self, choice: Choice, chunk: Chunk) -> Iterator[Event]:
        """The events of a chunk."""
        if chunk.logprobs:
            self._logprobs += self._reply.logprobs_of(choice, chunk.logprobs)["content"]
        self._broken = choice.turn.broken if choice.turn is not None else set()
        for delta in choice.deltas:
            yield from self._added(delta)
        if chunk.finish_reason is not None:
            is_whole = choice.finish_reason != "length"
            yield from self._close("completed" if is_whole else "incomplete")
            self._status = "completed" if is_whole else "incomplete"
            self._completed_s = int(time.time()) if is_whole else None
            yield self._event(f"response.{self._status}", response=self.whole())

    def fail(self, refusal: Refusal) -> Iterator[Event]:
        """The events that end a stream that has begun."""
        self._status = "failed"
        code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
        self._error = {"code": code, "message": refusal.message}
        yield self._event("response.failed", response=self.whole())

    def whole(self) -> Event:
        """The response as it is at present."""
        body = self._body
        has_ended = self._status in ("completed", "incomplete")
        return {
            "id": self._reply.id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": self._completed_s,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if has_ended else None,
            "user": body.user,
        }

    def _usage(self) -> Event:
        usage = self._reply.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": usage["total_tokens"],
        }

    def _added(self, delta: Event) -> Iterator[Event]:
        if (text := delta.get("content")) is not None:
            yield from self._open_text("message", "output_text")
            part = self._items[-1]["content"][0]
            logprobs, self._logprobs = self._logprobs, []
            part["text"] += text
            part["logprobs"] += logprobs
            yield self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)
            return
        self._logprobs = []
        if (text := delta.get("reasoning_content")) is not None:
            yield from self._open_text("reasoning", "reasoning_text")
            self._items[-1]["content"][0]["text"] += text
            yield self._of_part("response.reasoning_text.delta", delta=text)
            return
        [call] = delta["tool_calls"]
        if "id" in call:
            yield from self._close("completed")
            item = {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"]}
            yield from self._open({**item, "name": call["function"]["name"], "arguments": ""})
        elif piece := call["function"]["arguments"]:
            self._items[-1]["arguments"] += piece
            yield self._of_item("response.function_call_arguments.delta", delta=piece)

    def _open_text(self, kind: str, part_kind: str) -> Iterator[Event]:
        """Begin a message or reasoning, unless the last item is one that goes on."""
        if self._items and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress":
            return
        yield from self._close("completed")
        item: Event = {"type": kind, "id": _new_id("msg" if kind == "message" else "rs"), "content": []}
        item[{"message": "role", "reasoning": "summary"}[kind]] = "assistant" if kind == "message" else []
        yield from self._open(item)
        part: Event = {"type": part_kind, "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item = self._items[-1]
        item["content"].append(part)
        yield self._of_part("response.content_part.added", part=_copy(part))

    def _open(self, item: Event) -> Iterator[Event]:
        self._items.append({**item, "status": "in_progress"})
        shown = dict(self._items[-1])
        if "content" in item:
            shown["content"] = []
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self, status: str) -> Iterator[Event]:
        """End the item that is under way, if one is."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = "incomplete" if item.get("call_id") in self._broken else status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            text = {"text": part["text"]}
            if item["type"] == "message":
                yield self._of_part("response.output_text.done", **text, logprobs=part["logprobs"])
            else:
                yield self._of_part("response.reasoning_text.done", **text)
            yield self._of_part("response.content_part.done", part=_copy(part))
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1, **fields}


def _copy(part: Event) -> Event:
    return {name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for name, value in part.items()}  # fmt: skip


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"

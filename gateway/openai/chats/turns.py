"""One completion of a chat as it is read: content, reasoning and tool calls, as deltas and as a whole message."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from motet.responses import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, ResponseParser


class Turn:
    """Reads one completion.

    `is_named`: the request names the function to call; such a call is not a reason why the completion ends.
    """

    def __init__(self, parser: ResponseParser, *, is_named: bool = False) -> None:
        self.ends_with_calls = False  # at least one that is complete
        self.broken: set[str] = set()  # ids of calls that broke off
        self._is_named = is_named
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments

    def read(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The deltas of further text. `is_last`: nothing follows it."""
        events = self._parser.push(text) if text else []
        if is_last:
            events += self._parser.finish()
        return [delta for event in _joined(events) if (delta := self._delta(event)) is not None]

    def message(self) -> dict[str, Any]:
        """Fields of the whole message, without its role."""
        content = "".join(self._content)
        message: dict[str, Any] = {"content": content if content or not self._calls else None, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for call_id, name, arguments in self._calls
            ]
        return message

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Content):
            self._content.append(event.text)
            return {"content": event.text}
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            return {"reasoning_content": event.text}
        call: dict[str, Any]
        match event:
            case CallStart(index, call_id, name):
                self._calls.append((call_id, name, []))
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                self._calls[index][2].append(text)
                call = {"index": index, "function": {"arguments": text}}
            case CallEnd(index, is_complete):
                if not is_complete:
                    self.broken.add(self._calls[index][0])
                self.ends_with_calls = self.ends_with_calls or (is_complete and not self._is_named)
                return None
        return {"tool_calls": [call]}


def _joined(events: list[Event]) -> Iterator[Event]:
    """The same events with texts that follow each other as one: a parser may report each character by itself."""
    for _, run in itertools.groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        first, *others = run
        if isinstance(first, CallStart | CallEnd):
            yield from (first, *others)
        else:
            texts = [each.text for each in (first, *others) if not isinstance(each, CallStart | CallEnd)]
            yield dataclasses.replace(first, text="".join(texts))

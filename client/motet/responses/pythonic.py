"""Reads calls that are written as a Python list: `[get_weather(city="Bern", days=2), now()]`."""

from __future__ import annotations

import ast
import json
import re
import warnings

from motet.responses.calls import MAX_NAME_CHARS, CallCounter
from motet.responses.events import CallArguments, CallEnd, Event
from motet.responses.json_pieces import MalformedError

_MAX_DEPTH = 32
_MAX_VALUE_CHARS = 1 << 16
# An escape at the end that may go on, behind pairs of backslashes.
_CUT_ESCAPE = re.compile(
    r"(?<!\\)((?:\\\\)*)\\(?:[0-7]{1,2}|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|N(?:\{[^}]*)?)?\Z"
)
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_KEYWORD = re.compile(r"[A-Za-z_]\w*")
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
_CLOSING = {")": "(", "]": "[", "}": "{"}


class PythonicCallReader:
    """A list of calls with keyword arguments that are literals. Each argument is given once it is whole."""

    def __init__(self, calls: CallCounter) -> None:
        self.is_done = False
        self.num_read = self.num_reported = 0
        self._calls = calls
        self._state = "list"  # "list", "name", "keyword", "value", "call" or "done"
        self._held: list[str] = []  # characters of the name, keyword or value that is read
        self._keyword = ""
        self._keywords: set[str] = set()
        self._index: int | None = None
        self._num_calls = 0
        self._nesting: list[str] = []
        self._quote = ""
        self._is_escaped = False

    def push(self, text: str, events: list[Event]) -> None:
        for char in "" if self.is_done else text:
            num_events = len(events)
            if self._state != "value":
                self._mark(char, events)
            elif self._is_value_char(char):
                self._held.append(char)
            else:
                self._end_value(char, events)
            if len(self._held) > (_MAX_VALUE_CHARS if self._state == "value" else MAX_NAME_CHARS):
                raise MalformedError
            self.num_read += 1
            if len(events) > num_events:
                self.num_reported = self.num_read
            if self.is_done:
                return

    def finish(self, events: list[Event]) -> None:  # noqa: ARG002 - as the other reader
        if not self.is_done:
            raise MalformedError

    def cut(self, events: list[Event]) -> None:
        if self._index is None:
            if not self._num_calls or self._held:
                raise MalformedError
            return  # between two calls
        if self._state == "value" and (text := self._cut_string()):
            events.append(CallArguments(self._index, text))
        self.abandon(events)

    def abandon(self, events: list[Event]) -> None:
        if self._index is not None:
            events.append(CallEnd(self._index, is_complete=False))
            self._index = None

    def _mark(self, char: str, events: list[Event]) -> None:
        state, held = self._state, "".join(self._held)
        if char.isspace() and not held:
            return
        if state == "list" and char == "[":
            self._state = "name"
        elif state == "name" and char == "(":
            if not _NAME.fullmatch(held.rstrip()):
                raise MalformedError
            start = self._calls.start(held.rstrip())
            events.append(start)
            self._index, self._keywords, self._state, self._held = start.index, set(), "keyword", []
        elif state == "name" and char == "]" and not held and not self._num_calls:
            raise MalformedError  # an empty list is a text
        elif state == "keyword" and char == ")" and not held:
            self._end_call(events)
        elif state == "keyword" and char == "=":
            self._keyword = held.rstrip()
            if not _KEYWORD.fullmatch(self._keyword) or self._keyword in self._keywords:
                raise MalformedError
            self._state, self._held = "value", []
        elif state in ("name", "keyword") and self._is_name_char(held, char):
            self._held.append(char)
        elif state == "call" and char in ",]":
            self._state = "name" if char == "," else "done"
            self.is_done = char == "]"
        else:
            raise MalformedError

    def _is_name_char(self, held: str, char: str) -> bool:
        if held[-1:].isspace():
            return char.isspace()
        return char.isspace() or char == "." or char == "_" or char.isalnum()

    def _is_value_char(self, char: str) -> bool:
        """Whether it belongs to the value. Brackets and strings are followed, so that a comma in them does."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
            return True
        if char in "\"'":
            self._quote = char
        elif char in "([{":
            if len(self._nesting) == _MAX_DEPTH:
                raise MalformedError
            self._nesting.append(char)
        elif self._nesting:
            if char in _CLOSING and self._nesting.pop() != _CLOSING[char]:
                raise MalformedError
        elif char in ",)":
            return False
        return True

    def _end_value(self, char: str, events: list[Event]) -> None:
        assert self._index is not None
        events.append(CallArguments(self._index, self._before_value() + _as_json("".join(self._held))))
        self._keywords.add(self._keyword)
        self._state, self._held = "keyword", []
        if char == ")":
            self._end_call(events)

    def _cut_string(self) -> str:
        """What came of a value that is a string; empty for other values. Raises MalformedError."""
        if not self._quote or self._nesting:
            return ""
        value = json.loads(_as_json(_CUT_ESCAPE.sub(r"\1", "".join(self._held)) + self._quote))
        return f"{self._before_value()}{json.dumps(value)[:-1]}" if isinstance(value, str) else ""

    def _before_value(self) -> str:
        return f"{', ' if self._keywords else '{'}{json.dumps(self._keyword)}: "

    def _end_call(self, events: list[Event]) -> None:
        assert self._index is not None
        events.append(CallArguments(self._index, "}" if self._keywords else "{}"))
        events.append(self._calls.complete(self._index))
        self._index, self._state = None, "call"
        self._num_calls += 1


def _as_json(text: str) -> str:
    """A literal of Python, or one of JSON's words, as JSON. Raises MalformedError."""
    stripped = text.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(_JSON_WORDS.get(stripped, stripped))
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _json_itself(stripped)


def _json_itself(text: str) -> str:
    """A value that is JSON and no literal of Python, such as `[true]`. Raises MalformedError."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError from error
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

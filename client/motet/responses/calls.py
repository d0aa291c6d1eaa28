"""Reads the tool calls in a field's text while they are generated.

A reader gives the name as soon as it is known and then the arguments as they come. Text is held back
only until the name is known; where it turns out to be no call, the reader gives it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from motet.responses.events import CallArguments, CallEnd, CallStart, Event
from motet.responses.json_pieces import JsonPieces, MalformedError, State
from motet.responses.templates import CallForm

MAX_NAME_CHARS = 256
_SPACE = " \t\n\r"  # what JSON has between its parts
_HALF_PAIR = re.compile("[\ud800-\udbff]\\Z")  # of which the other half may follow
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, by an escape: no text in UTF-8 has it


@dataclass(slots=True)
class CallCounter:
    """Numbers and names the calls of a completion."""

    new_id: Callable[[], str]
    count: int = 0
    first_complete: int | None = None  # number of the first call that is complete

    def start(self, name: str) -> CallStart:
        self.count += 1
        return CallStart(self.count - 1, self.new_id(), name)

    def complete(self, index: int) -> CallEnd:
        if self.first_complete is None:
            self.first_complete = index
        return CallEnd(index, is_complete=True)


class CallReader(Protocol):
    """Reads one field. What was read and not reported is content if no call comes of it."""

    is_done: bool  # the value is over; only space may follow
    num_read: int  # characters of the field
    num_reported: int  # of these, up to the last one that an event reported

    def push(self, text: str, events: list[Event]) -> None:
        """Read until the value is over, and append events. Raises MalformedError, having read what is before it."""

    def finish(self, events: list[Event]) -> None:
        """The field is over. Raises MalformedError."""

    def cut(self, events: list[Event]) -> None:
        """The completion ends here: report what came of the call that began. Raises MalformedError if it has no name.

        A key is lost, and so is a value that cannot be reported in part.
        """

    def abandon(self, events: list[Event]) -> None:
        """What follows is malformed: end the call that began, if one did."""


class JsonCallReader:
    """A call as a JSON object, or an array of them, or the arguments alone."""

    def __init__(self, form: CallForm, calls: CallCounter, name: str | None) -> None:
        """`name`: from the opening mark."""
        self.is_done = False
        self.num_read = self.num_reported = 0
        self._form, self._calls = form, calls
        self._json = JsonPieces()
        self._level = 1 + form.is_list  # how deep the keys of a call lie
        self._given_name = name
        self._reset()

    def _reset(self) -> None:
        self._index: int | None = None  # of the call that began
        self._key: list[str] | None = None  # pieces of the key that is read
        self._value: list[str] | None = None  # pieces of the value that is read and held
        self._wanted: str | None = None  # the key whose value is read
        self._seen: set[str] = set()
        self._is_streaming = False
        self._arguments: str | None = None  # whole, before the name is known

    def push(self, text: str, events: list[Event]) -> None:
        index = 0
        while index < len(text) and not self.is_done:
            state, depth, num_events = self._json.state, self._json.depth, len(events)
            after = self._json.advance(text, index)
            if self._form.arguments_key is None:
                self._bare(text[index:after], events)
            else:
                self._keyed(state, depth, text[index:after], events)
            self.num_read += after - index
            if len(events) > num_events:
                self.num_reported = self.num_read
            index = after
            self.is_done = self._json.state is State.DONE

    def finish(self, events: list[Event]) -> None:
        self._json.finish()
        if not self.is_done and self._form.arguments_key is None:
            self._end(events)
        self.is_done = True

    def cut(self, events: list[Event]) -> None:
        if self._index is None and self._form.arguments_key is None:
            assert self._given_name is not None
            self._start(self._given_name, events)
        if self._index is None:
            if not self.num_reported or self._json.depth >= self._level:
                raise MalformedError
            return  # between the calls of an array
        if self._value is not None and self._wanted == self._form.arguments_key:
            num_broken = self._json.num_escape_chars
            text = "".join(self._value)
            if text := _of_string(text[: len(text) - num_broken] + '"', is_cut=True):
                events.append(CallArguments(self._index, text))
        self.abandon(events)

    def abandon(self, events: list[Event]) -> None:
        if self._index is not None:
            events.append(CallEnd(self._index, is_complete=False))
            self._index = None

    def _bare(self, piece: str, events: list[Event]) -> None:
        """The whole value is the arguments."""
        if self._index is None and self._json.state is not State.VALUE:
            assert self._given_name is not None
            self._start(self._given_name, events)
        if self._index is not None and piece:
            events.append(CallArguments(self._index, piece))
        if self._json.state is State.DONE:
            self._end(events)

    def _keyed(self, before: State, depth: int, piece: str, events: list[Event]) -> None:
        json_, level = self._json, self._level
        if (
            depth < level
            and before in (State.VALUE, State.FIRST_VALUE)
            and json_.depth == depth
            and json_.state != before
        ):
            raise MalformedError  # a number or a text where a call should be
        if json_.depth > depth and json_.depth <= level and json_.is_in_object != (json_.depth == level):
            raise MalformedError  # an array where an object should be, or the other way
        if depth == level and before in (State.KEY, State.FIRST_KEY) and json_.state is State.STRING:
            self._key = []
        if self._key is not None:
            self._key.append(piece)
            if json_.state is State.COLON:
                self._wanted, self._key = self._key_of("".join(self._key)), None
        elif depth == level and before is State.VALUE and json_.state is not State.VALUE:
            self._begin_value(piece, events)
        elif self._value is not None or self._is_streaming:
            self._go_on(piece, events)
        if json_.depth == level and json_.state is State.AFTER and (depth > level or before is not State.AFTER):
            self._end_value(events)
        elif json_.depth < level and depth == level:
            self._end_object(events)

    def _key_of(self, text: str) -> str:
        key = json.loads(text)
        if key in (self._form.name_key, self._form.arguments_key):
            if key in self._seen:
                raise MalformedError  # twice: neither of them can be taken back
            self._seen.add(key)
        return str(key)

    def _begin_value(self, piece: str, events: list[Event]) -> None:
        is_arguments = self._wanted == self._form.arguments_key
        self._is_streaming = is_arguments and self._index is not None and not piece.startswith('"')
        self._value = None if self._is_streaming else []
        self._go_on(piece, events)

    def _go_on(self, piece: str, events: list[Event]) -> None:
        if self._is_streaming:
            assert self._index is not None
            if piece:
                events.append(CallArguments(self._index, piece))
        elif self._value is not None and self._wanted in (self._form.name_key, self._form.arguments_key):
            self._value.append(piece)

    def _end_value(self, events: list[Event]) -> None:
        text = None if self._value is None else "".join(self._value)
        self._value, self._is_streaming = None, False
        if text is None:
            return
        if self._wanted == self._form.name_key:
            name = json.loads(text)
            if not isinstance(name, str):
                raise MalformedError
            self._start(name, events)
            if self._arguments is not None and self._index is not None:
                events.append(CallArguments(self._index, self._arguments))
        elif self._wanted == self._form.arguments_key:
            text = _of_string(text) if text.startswith('"') else text
            if self._index is None:
                self._arguments = text
            else:
                events.append(CallArguments(self._index, text))

    def _end_object(self, events: list[Event]) -> None:
        if self._index is None:
            raise MalformedError  # no name
        if self._form.arguments_key not in self._seen:
            events.append(CallArguments(self._index, "{}"))
        self._end(events)

    def _start(self, name: str, events: list[Event]) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS or _SURROGATE.search(name):
            raise MalformedError
        start = self._calls.start(name)
        self._index = start.index
        events.append(start)

    def _end(self, events: list[Event]) -> None:
        assert self._index is not None
        events.append(self._calls.complete(self._index))
        self._reset()


def _of_string(text: str, *, is_cut: bool = False) -> str:
    """The JSON text in a string that stands for a call's arguments. Raises MalformedError if it has another text.

    An empty string stands for no arguments. `is_cut`: the string has the beginning of its text.
    """
    string = str(json.loads(text))
    if is_cut:
        string = _HALF_PAIR.sub("", string)
    # Half of a surrogate pair cannot be sent as UTF-8; within a text of the JSON its escape is the same.
    given = string.encode("utf-8", "backslashreplace").decode()
    value = given.strip(_SPACE)
    if not value:
        return "" if is_cut else "{}"
    pieces, index = JsonPieces(), 0
    while index < len(value):
        if pieces.state is State.DONE:
            raise MalformedError  # something follows the value
        index = pieces.advance(value, index)
    if not is_cut:
        pieces.finish()
    return given

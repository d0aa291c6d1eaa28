"""Strict JSON that arrives in pieces: where keys, values and objects begin and end."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 128
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_RUN = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_MAX_NUMBER_CHARS = 4096


class MalformedError(Exception):
    """The text is not a call; the reader knows from which character on."""


class State(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_VALUE = auto()  # or the end of the array
    FIRST_KEY = auto()  # or the end of the object
    KEY = auto()
    COLON = auto()
    AFTER = auto()  # a value ended: comma or the end of what it lies in
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    WORD = auto()
    DONE = auto()


class JsonPieces:
    """One JSON value. `advance` reads a few characters; `state` and `depth` say where it is."""

    def __init__(self) -> None:
        self.state = State.VALUE
        self._stack: list[str] = []
        self._is_key = False
        self._number = ""
        self._num_hex = 0
        self._word = ""

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._stack)

    @property
    def is_in_object(self) -> bool:
        """The innermost open one is an object."""
        return bool(self._stack) and self._stack[-1] == "{"

    @property
    def num_escape_chars(self) -> int:
        """How many characters of an escape were read that is not over."""
        return {State.ESCAPE: 1, State.HEX: 2 + self._num_hex}.get(self.state, 0)

    def advance(self, text: str, index: int) -> int:
        """Read from `index` on, and return up to where. May read nothing where a number ends. Raises MalformedError."""
        state = self.state
        if state is State.STRING:
            return self._string(text, index)
        if state is State.ESCAPE:
            return self._escape(text, index)
        if state is State.HEX:
            return self._hex(text, index)
        if state is State.NUMBER:
            return self._digits(text, index)
        if state is State.WORD:
            return self._letter(text, index)
        after = _SPACE.match(text, index).end()  # type: ignore[union-attr]  # matches always
        if after > index:
            return after
        self._token(text[index])
        return index + 1

    def finish(self) -> None:
        """The text is over. Raises MalformedError if the value is not."""
        if self.state is State.NUMBER:
            self._end_number()
        if self.state is not State.DONE:
            raise MalformedError

    def _token(self, char: str) -> None:
        state = self.state
        if state in (State.VALUE, State.FIRST_VALUE) and not (char == "]" and state is State.FIRST_VALUE):
            self._begin_value(char)
        elif char == '"' and state in (State.KEY, State.FIRST_KEY):
            self.state, self._is_key = State.STRING, True
        elif char == ":" and state is State.COLON:
            self.state = State.VALUE
        elif char == "," and state is State.AFTER:
            self.state = State.KEY if self.is_in_object else State.VALUE
        elif (char == "}" and self.is_in_object and state in (State.AFTER, State.FIRST_KEY)) or (
            char == "]" and self._stack and not self.is_in_object and state in (State.AFTER, State.FIRST_VALUE)
        ):
            self._stack.pop()
            self._end_value()
        else:
            raise MalformedError

    def _begin_value(self, char: str) -> None:
        if char in "{[":
            if len(self._stack) == MAX_DEPTH:
                raise MalformedError
            self._stack.append(char)
            self.state = State.FIRST_KEY if char == "{" else State.FIRST_VALUE
        elif char == '"':
            self.state, self._is_key = State.STRING, False
        elif char in "-0123456789":
            self.state, self._number = State.NUMBER, char
        elif char in _WORDS:
            self.state, self._word = State.WORD, _WORDS[char][1:]
        else:
            raise MalformedError

    def _end_value(self) -> None:
        self.state = State.AFTER if self._stack else State.DONE

    def _string(self, text: str, index: int) -> int:
        end = _STRING_RUN.match(text, index).end()  # type: ignore[union-attr]  # matches always
        if end > index or end == len(text):
            return end  # a mistake after it is met with the next call: it is not part of what was read
        if text[end] == "\\":
            self.state = State.ESCAPE
        elif text[end] != '"':
            raise MalformedError
        elif self._is_key:
            self.state = State.COLON
        else:
            self._end_value()
        return end + 1

    def _escape(self, text: str, index: int) -> int:
        if text[index] == "u":
            self.state, self._num_hex = State.HEX, 0
        elif text[index] in '"\\/bfnrt':
            self.state = State.STRING
        else:
            raise MalformedError
        return index + 1

    def _hex(self, text: str, index: int) -> int:
        if text[index] not in _HEX:
            raise MalformedError
        self._num_hex += 1
        if self._num_hex == 4:
            self.state = State.STRING
        return index + 1

    def _digits(self, text: str, index: int) -> int:
        end = _NUMBER_RUN.match(text, index).end()  # type: ignore[union-attr]  # matches always
        end = min(end, index + _MAX_NUMBER_CHARS - len(self._number))
        if end == index:
            self._end_number()
        self._number += text[index:end]
        return end

    def _end_number(self) -> None:
        if not _NUMBER.fullmatch(self._number):
            raise MalformedError
        self._end_value()

    def _letter(self, text: str, index: int) -> int:
        if text[index] != self._word[0]:
            raise MalformedError
        self._word = self._word[1:]
        if not self._word:
            self._end_value()
        return index + 1

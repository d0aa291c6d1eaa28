"""Reads a completion while it is generated: content, reasoning and tool calls as events, however the text is cut.

Nothing raises, and nothing is lost: text with a malformed call comes out as content. There is one exception: where the
completion ends within a call whose name was reported, the keys, punctuation and marks of its rest are left out, and so
is an incomplete value of Python that is not a string. Time is linear in the text. What is held back is bounded
(MAX_MARK_CHARS, MAX_HELD_CHARS, MAX_SPACE_CHARS).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from motet.responses.calls import CallCounter, CallReader, JsonCallReader
from motet.responses.events import Content, Event, Reasoning
from motet.responses.json_pieces import MalformedError
from motet.responses.patterns import Match, Pattern, Search
from motet.responses.pythonic import PythonicCallReader
from motet.responses.templates import Field, Kind, ResponseTemplate

# Space at the end of content is held until other text follows; more of it is not an end.
MAX_SPACE_CHARS = 1024
# Text before a name, or between the parts of a call: with more of it, it is not a call.
MAX_HELD_CHARS = 1 << 18
# A push is read in parts, so that a mark found in it costs no second look at all that follows.
_PART_CHARS = 256


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _Channel:
    """Content or reasoning: without the space around all of it."""

    def __init__(self, make: Callable[[str], Event]) -> None:
        self._make = make
        self._has_text = False
        self._is_bare = True  # space that comes next is left out
        self._space = ""

    def join(self, text: str) -> None:
        """Another field begins: this goes between the two."""
        if self._has_text and text:
            self._space, self._is_bare = text, True

    def drop_space(self) -> None:
        """Forget the space that is held."""
        self._space = ""

    def write(self, text: str, events: list[Event]) -> None:
        if self._is_bare:
            text = text.lstrip()
            self._is_bare = not text
        body = text.rstrip()
        if body or len(self._space) + len(text) > MAX_SPACE_CHARS:
            body = body or text
            events.append(self._make(self._space + body))
            self._space, self._has_text = text[len(body) :], True
        else:
            self._space += text


class ResponseParser:
    """Parses the text of one completion."""

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        prefix: str = "",
        only_first_call: bool = False,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        """`prefix`: the prompt. What it has of the completion, such as a mark, is read without events.

        `only_first_call`: of the fields with calls, nothing is reported behind a complete call.
        """
        self._template = template
        self._only_first_call = only_first_call
        self._content, self._reasoning = _Channel(Content), _Channel(Reasoning)
        self._calls = CallCounter(new_id)
        self._buffer = ""  # what is not read yet
        self._base = 0  # where the buffer begins in the completion
        self._fed = 0  # up to where the searches have seen the completion
        self._is_over = False
        self._enter(None, 0, is_beginning=True)
        if prefix:
            self.skip(_after_anchor(prefix, template.start_anchor))

    def skip(self, text: str) -> None:
        """Read what the prompt has of the completion: nothing of it is reported."""
        self.push(text)
        self._content.drop_space()
        self._reasoning.drop_space()

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._field is not None and self._field.kind is Kind.REASONING

    def push(self, text: str) -> list[Event]:
        """What further text reports."""
        events: list[Event] = []
        for start in range(0, len(text), _PART_CHARS):
            self._buffer += text[start : start + _PART_CHARS]
            self._process(events, at_end=False)
        return self._wanted(events)

    def finish(self) -> list[Event]:
        """What the end of the completion reports."""
        events: list[Event] = []
        if not self._is_over:
            self._is_over = True
            self._process(events, at_end=True)
            self._close_calls("", events)
        return self._wanted(events)

    def _wanted(self, events: list[Event]) -> list[Event]:
        last = self._calls.first_complete
        if not self._only_first_call or last is None:
            return events
        return [event for event in events if isinstance(event, Content | Reasoning) or event.index <= last]

    def _enter(self, match: tuple[Field, str, str | None] | None, position: int, *, is_beginning: bool = False) -> None:
        """Begin a field after its opening mark, or for None go back to the text outside of all fields."""
        template = self._template
        self._field = template.implicit if match is None else match[0]
        self._reader: CallReader | None = None
        self._unreported: list[str] = []  # what is content if no call comes of it
        self._num_unreported = 0
        self._is_broken = False
        marks: list[tuple[int, Field, Pattern]] = []
        if match is None:
            marks += [(0, field, field.open) for field in template.fields.values() if field.open is not None]
            if template.implicit is not None and template.implicit.close is not None:
                marks.append((1, template.implicit, template.implicit.close))
        else:
            field, mark, name = match
            if field.close is not None:
                marks.append((1, field, field.close))
            if field.call is not None:
                self._unreported.append(mark)
                is_pythonic = field.call.syntax == "pythonic"
                json_reader = None if is_pythonic else JsonCallReader(field.call, self._calls, name)
                self._reader = json_reader or PythonicCallReader(self._calls)
            else:
                self._channel(field).join(field.join)
        self._is_outside = match is None
        self._searches = [
            (rank, field, Search(pattern, position, is_beginning=is_beginning)) for rank, field, pattern in marks
        ]
        self._fed = position

    def _process(self, events: list[Event], *, at_end: bool) -> None:
        while True:
            unseen = self._buffer[self._fed - self._base :]
            self._fed = self._base + len(self._buffer)
            for _, _, search in self._searches:
                search.push(unseen)
            found, hold = self._found()
            if at_end:
                found = self._found_at_end(hold)
                hold = self._fed
            end = min(hold, self._fed) if found is None else found[2].start
            read = self._read(self._buffer[: end - self._base], events)
            self._forget(read)
            if self._reader is not None and self._has_ended(self._reader):
                self._enter(None, self._base)
                continue
            if found is None:
                return
            rank, field, match = found
            mark = self._buffer[: match.end - self._base]
            name = None
            if field.call is not None and field.call.name_group is not None and rank == 0:
                start, stop = match.captures.get(field.call.name_group, (match.start, match.start))
                name = mark[start - self._base : stop - self._base]
            self._forget(len(mark))
            if rank == 1 and not self._is_outside:
                self._close_calls(mark, events)
            self._enter((field, mark, name) if rank == 0 else None, match.end)

    def _found(self) -> tuple[tuple[int, Field, Match] | None, int]:
        """The mark that comes next, and from where on text may still be a part of another."""
        hold = min(
            (at for _, _, search in self._searches if (at := search.pending_from) is not None), default=self._fed
        )
        found = [(rank, field, match) for rank, field, search in self._searches if (match := search.found) is not None]
        best = min(found, key=lambda one: (one[2].start, one[2].start - one[2].end, one[0], one[1].name), default=None)
        if best is None:
            return None, hold
        is_pending = any(search.pending_from is not None for _, _, search in self._searches)
        return (None if is_pending and best[2].start >= hold else best), hold

    def _found_at_end(self, pending_from: int) -> tuple[int, Field, Match] | None:
        """The mark that comes next; none follows. `pending_from`: where text begins that might have become one."""
        for _, _, search in self._searches:
            search.finish()
        found, _ = self._found()
        if found is None and self._reader is not None and self._reader.is_done and not self._is_broken:
            self._buffer = self._buffer[: pending_from - self._base]  # a part of the closing mark, behind a whole call
            self._fed = self._base + len(self._buffer)
        return found

    def _forget(self, num_chars: int) -> None:
        self._buffer = self._buffer[num_chars:]
        self._base += num_chars

    def _channel(self, field: Field | None) -> _Channel:
        return self._reasoning if field is not None and field.kind is Kind.REASONING else self._content

    def _read(self, text: str, events: list[Event]) -> int:
        """Read text of the field, and return how much of it is the field's."""
        if not text:
            return 0
        if self._reader is None:
            if self._field is not None:
                self._channel(self._field).write(text, events)
            return len(text)
        if self._is_broken:
            self._write_back(text, events)
            return len(text)
        return self._read_calls(self._reader, text, events)

    def _has_ended(self, reader: CallReader) -> bool:
        """The field has no closing mark, and its value is over or malformed."""
        return self._field is not None and self._field.close is None and (reader.is_done or self._is_broken)

    def _read_calls(self, reader: CallReader, text: str, events: list[Event]) -> int:
        before, reported = reader.num_read, reader.num_reported
        try:
            reader.push(text, events)
            if reader.is_done and not self._has_ended(reader):
                self._is_broken = bool(text[reader.num_read - before :].strip())
        except MalformedError:
            self._is_broken = True
        num_read = reader.num_read - before
        if reader.num_reported > reported:
            self._unreported, self._num_unreported = [text[reader.num_reported - before : num_read]], 0
        else:
            self._unreported.append(text[:num_read])
        self._num_unreported += len(self._unreported[-1])
        if self._num_unreported > MAX_HELD_CHARS:
            self._is_broken = True
        if self._is_broken:
            self._give_back(reader, events)
        if self._has_ended(reader):
            return num_read
        if self._is_broken:
            self._write_back(text[num_read:], events)
        else:
            self._unreported.append(text[num_read:])
        return len(text)

    def _give_back(self, reader: CallReader, events: list[Event]) -> None:
        """The text is not a call: what no event has reported is content."""
        self._is_broken = True
        reader.abandon(events)
        self._write_back("".join(self._unreported), events)
        self._unreported = []

    def _write_back(self, text: str, events: list[Event]) -> None:
        """Text of a field with calls is content."""
        if not (self._only_first_call and self._calls.first_complete is not None):
            self._content.write(text, events)

    def _close_calls(self, mark: str, events: list[Event]) -> None:
        """The field is over: by its closing mark, or with the completion."""
        reader = self._reader
        if reader is None:
            return
        if not self._is_broken:
            try:
                reader.finish(events)
            except MalformedError:
                self._cut(reader, events) if not mark else self._give_back(reader, events)
        if self._is_broken:
            self._write_back(mark, events)
        self._reader = None

    def _cut(self, reader: CallReader, events: list[Event]) -> None:
        """The completion ends within the field."""
        try:
            reader.cut(events)
        except MalformedError:
            self._give_back(reader, events)


def _after_anchor(prefix: str, anchor: Pattern | None) -> str:
    """The beginning of the completion that the prompt has already; empty if the anchor is not in the prompt."""
    position, end = 0, len(prefix)
    while anchor is not None:
        search = Search(anchor, position)
        search.push(prefix[position:])
        search.finish()
        if search.found is None or search.found.end <= position:
            break
        position = end = search.found.end
    return prefix[end:]

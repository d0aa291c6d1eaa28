"""Finds the marks of a response template in text that arrives in pieces, in time linear in the text.

`Pattern` is compiled from a literal or from an expression in a subset of Python's syntax. `Search` looks for the first
match, as a backtracking matcher of the whole text would find it. There is no backtracking: an expression costs at most
`MAX_INSTRUCTIONS` operations a character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_INSTRUCTIONS = 512
# A longer mark is not a mark: its text is not held back any further.
MAX_MARK_CHARS = 4096
_MAX_EXPRESSION_CHARS = 1024
_MAX_REPEAT = 64
_MAX_NESTING = 16
_CLASS_ESCAPES = "sSwWdD"
_CHAR_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_Captures = tuple[tuple[str, int], ...]  # positions of "name(" and "name)"
_Thread = tuple[int, int, _Captures]  # instruction, where the match begins, captures


class PatternError(ValueError):
    """An expression is malformed, too large, or has syntax beyond the subset; the message says which."""


@dataclass(frozen=True, slots=True)
class Match:
    """Where a pattern was found; positions count from the beginning of the completion."""

    start: int
    end: int
    captures: dict[str, tuple[int, int]]


@dataclass(slots=True)
class _Instruction:
    op: str  # "char", "split", "jump", "begin", "end", "save" or "match"
    char: re.Pattern[str] | None = None  # of "char": matches one
    source: str = ""  # of "char": as an expression of its own; of "save": the name
    targets: list[int] = field(default_factory=list)  # of "split" and "jump", the preferred one first


class Pattern:
    """What to look for."""

    def __init__(self, program: Sequence[_Instruction], names: frozenset[str], source: str) -> None:
        """Use `literals` and `expression`. `names`: of the groups."""
        self.program = program
        self.names = names
        self.source = source  # the expression
        inner = _closure(program, [(0, 1, ())], 1)
        if any(program[pc].op == "match" for pc, _, _ in inner):
            raise PatternError("matches the empty text; a mark needs a character")
        first = [program[pc].source for pc, _, _ in inner if program[pc].op == "char"]
        # None: only the beginning of the completion can match, or its end.
        self.first = re.compile("|".join(first), re.DOTALL) if first else None

    @classmethod
    def literals(cls, texts: Iterable[str]) -> Pattern:
        """One of several texts, the longest at a place."""
        ordered = sorted(dict.fromkeys(texts), key=len, reverse=True)
        return cls.expression("|".join(re.escape(text) for text in ordered), max_chars=8 * _MAX_EXPRESSION_CHARS)

    @classmethod
    def expression(cls, source: str, *, max_chars: int = _MAX_EXPRESSION_CHARS) -> Pattern:
        r"""Alternatives, groups, classes, `.`, `\s\w\d`, quantifiers, `\A`, `\Z` and `$`. Raises PatternError."""
        if len(source) > max_chars:
            raise PatternError(f"has {len(source)} characters; at most {max_chars}")
        compiler = _Compiler(source)
        return cls(compiler.program, frozenset(compiler.names), source)


class Search:
    """Looks for one pattern from a position on. Fed with the text from there, in any pieces."""

    def __init__(self, pattern: Pattern, position: int, *, is_beginning: bool = False) -> None:
        r"""`is_beginning`: the text begins at this position, where `\A` matches."""
        self._pattern = pattern
        self._position = position
        self._is_beginning = is_beginning
        self._threads: list[_Thread] = []  # the preferred one first; the first begins leftmost
        self._match: Match | None = None

    @property
    def found(self) -> Match | None:
        """The first match, once no further text can change it."""
        return None if self._threads else self._match

    @property
    def pending_from(self) -> int | None:
        """Where a match begins that further text decides; None without one."""
        return self._threads[0][1] if self._threads else None

    def push(self, text: str) -> None:
        """Take further text."""
        index, first = 0, self._pattern.first
        while index < len(text):
            if not self._threads:
                if self._match is not None:
                    break
                if not self._is_beginning:
                    near = first.search(text, index) if first is not None else None
                    skipped = (len(text) if near is None else near.start()) - index
                    index, self._position = index + skipped, self._position + skipped
                    if near is None:
                        break
            self._step(text[index])
            index += 1
        self._position += len(text) - index

    def finish(self) -> None:
        """No further text comes."""
        for index, thread in enumerate(self._threads):
            ended = _closure(self._pattern.program, [thread], self._position, at_end=True)
            match = next((found for found in ended if self._pattern.program[found[0]].op == "match"), None)
            if match is not None:
                self._keep(match)
                self._threads = self._threads[:index]
                break
        self._threads = []

    def _step(self, char: str) -> None:
        program, position = self._pattern.program, self._position
        threads = self._threads
        if self._match is None:
            threads = _closure(program, [*threads, (0, position, ())], position, at_beginning=self._is_beginning)
            threads = self._without_matches(threads)
        following = []
        for pc, start, captures in threads:
            instruction = program[pc]
            if instruction.char is not None and instruction.char.match(char) and position - start < MAX_MARK_CHARS:
                following.append((pc + 1, start, captures))
        self._position, self._is_beginning = position + 1, False
        self._threads = self._without_matches(_closure(program, following, position + 1))

    def _without_matches(self, threads: list[_Thread]) -> list[_Thread]:
        """The threads that are preferred to the first match, which is kept."""
        for index, thread in enumerate(threads):
            if self._pattern.program[thread[0]].op == "match":
                self._keep(thread)
                return threads[:index]
        return threads

    def _keep(self, thread: _Thread) -> None:
        _, start, saved = thread
        places = dict(saved)
        names = [name[:-1] for name in places if name.endswith(")")]
        captures = {name: (places[name + "("], places[name + ")"]) for name in names}
        self._match = Match(start, self._position, captures)


def _closure(
    program: Sequence[_Instruction],
    threads: Iterable[_Thread],
    position: int,
    *,
    at_beginning: bool = False,
    at_end: bool = False,
) -> list[_Thread]:
    """The threads at instructions that take a character, wait for the end, or are a match; the preferred one first."""
    seen: set[int] = set()
    reached: list[_Thread] = []
    stack = list(threads)[::-1]
    while stack:
        pc, start, captures = stack.pop()
        if pc in seen:
            continue
        seen.add(pc)
        instruction = program[pc]
        if instruction.op in ("split", "jump"):
            stack.extend((target, start, captures) for target in reversed(instruction.targets))
        elif instruction.op == "save":
            others = tuple(saved for saved in captures if saved[0] != instruction.source)
            stack.append((pc + 1, start, (*others, (instruction.source, position))))
        elif instruction.op == "begin":
            if at_beginning:
                stack.append((pc + 1, start, captures))
        elif instruction.op == "end" and at_end:
            stack.append((pc + 1, start, captures))
        else:
            reached.append((pc, start, captures))
    return reached


class _Compiler:
    """Recursive descent over an expression."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0
        self.names: list[str] = []
        self.program: list[_Instruction] = []
        code = self._alternatives()
        if self._at < len(source):
            raise PatternError(f"has an unmatched ')' at character {self._at}")
        self.program = [*code, _Instruction("match")]
        self._check_size(self.program)

    def _peek(self, text: str) -> bool:
        return self._source.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if self._peek(text):
            self._at += len(text)
            return True
        return False

    def _alternatives(self) -> list[_Instruction]:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        code = branches.pop()
        while branches:
            before = branches.pop()
            code = [
                _split(1, len(before) + 2),
                *_shifted(before, 1),
                _Instruction("jump", targets=[len(before) + 2 + len(code)]),
                *_shifted(code, len(before) + 2),
            ]
            self._check_size(code)
        return code

    def _sequence(self) -> list[_Instruction]:
        code: list[_Instruction] = []
        while self._at < len(self._source) and not self._peek("|") and not self._peek(")"):
            code += _shifted(self._repeated(self._atom()), len(code))
            self._check_size(code)
        return code

    def _repeated(self, code: list[_Instruction]) -> list[_Instruction]:
        bounds = self._bounds()
        if bounds is None:
            return code
        low, high = bounds
        is_lazy = self._take("?")
        if self._peek("+") or self._peek("*") or self._peek("?"):
            raise PatternError(f"has a quantifier that is not supported at character {self._at}")
        if any(part.op in ("begin", "end") for part in code):
            raise PatternError("repeats the beginning or the end of the text")
        if (low + (high or 1)) * len(code) > MAX_INSTRUCTIONS:
            raise PatternError("is too large")
        result: list[_Instruction] = []
        for _ in range(low):
            result += _shifted(code, len(result))
        if high is None:
            loop = [_split(1, len(code) + 2, is_lazy=is_lazy), *_shifted(code, 1), _Instruction("jump", targets=[0])]
            result += _shifted(loop, len(result))
        else:
            optional: list[_Instruction] = []
            for _ in range(high - low):
                inner = [*_shifted(code, 1), *_shifted(optional, 1 + len(code))]
                optional = [_split(1, len(inner) + 1, is_lazy=is_lazy), *inner]
            result += _shifted(optional, len(result))
        return result

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        counted = re.compile(r"\{(\d{1,3})(,(\d{0,3}))?\}").match(self._source, self._at)
        if counted is None:
            return None
        self._at = counted.end()
        low = int(counted[1])
        high = (int(counted[3]) if counted[3] else None) if counted[2] else low
        if max(low, high or 0) > _MAX_REPEAT or (high is not None and high < low):
            raise PatternError(f"repeats {counted[0]}; at most {_MAX_REPEAT} times")
        return low, high

    def _atom(self) -> list[_Instruction]:
        at = self._at
        char = self._source[at]
        if char == "(":
            return self._group()
        self._at += 1
        if char == "[":
            return self._class(at)
        if char == ".":
            return [_char(".")]
        if char == "$":
            return [_Instruction("end")]
        if char == "\\":
            return self._escape()
        if char in "*+?^":
            raise PatternError(f"has {char!r} at character {at}, which is not supported there")
        return [_char(re.escape(char))]

    def _group(self) -> list[_Instruction]:
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise PatternError(f"nests groups deeper than {_MAX_NESTING}")
        named = re.compile(r"\(\?P<([A-Za-z_]\w*)>").match(self._source, self._at)
        name = None
        if named is not None:
            name, self._at = named[1], named.end()
            if name in self.names:
                raise PatternError(f"has the group {name!r} twice")
            self.names.append(name)
        elif not self._take("(?:"):
            if self._peek("(?"):
                raise PatternError(f"has {self._source[self._at : self._at + 4]!r}, which is not supported")
            self._at += 1
        code = self._alternatives()
        if not self._take(")"):
            raise PatternError("has an unmatched '('")
        self._depth -= 1
        if name is None:
            return code
        return [_Instruction("save", source=name + "("), *_shifted(code, 1), _Instruction("save", source=name + ")")]

    def _class(self, start: int) -> list[_Instruction]:
        end = start + 1
        end += self._source.startswith("^", end)
        end += self._source.startswith("]", end)
        while end < len(self._source) and self._source[end] != "]":
            end += 2 if self._source[end] == "\\" else 1
        source = self._source[start : end + 1]
        self._at = end + 1
        try:
            return [_char(source)]
        except re.error as error:
            raise PatternError(f"has a malformed class at character {start}: {error}") from error

    def _escape(self) -> list[_Instruction]:
        if self._at == len(self._source):
            raise PatternError("ends with a backslash")
        char = self._source[self._at]
        self._at += 1
        if char in _CLASS_ESCAPES:
            return [_char("\\" + char)]
        if char == "A":
            return [_Instruction("begin")]
        if char == "Z":
            return [_Instruction("end")]
        if char in _CHAR_ESCAPES:
            return [_char(re.escape(_CHAR_ESCAPES[char]))]
        if char.isalnum():
            raise PatternError(f"has \\{char}, which is not supported")
        return [_char(re.escape(char))]

    def _check_size(self, code: Sequence[_Instruction]) -> None:
        if len(code) > MAX_INSTRUCTIONS:
            raise PatternError(f"is too large: more than {MAX_INSTRUCTIONS} instructions")


def _char(source: str) -> _Instruction:
    return _Instruction("char", re.compile(source, re.DOTALL), source)


def _split(first: int, second: int, *, is_lazy: bool = False) -> _Instruction:
    return _Instruction("split", targets=[second, first] if is_lazy else [first, second])


def _shifted(code: Sequence[_Instruction], by: int) -> list[_Instruction]:
    """The code at another place: its targets count from the beginning of the whole."""
    return [_Instruction(part.op, part.char, part.source, [target + by for target in part.targets]) for part in code]

"""Which modules of the base model the names in a configuration mean.

PEFT reads some of these names as regular expressions. Motet never runs a client's expression: it could take forever.
What is decided here needs only comparisons of text. Where an expression would decide, these classes say that they do
not know, and the tensors of the adapter's file decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")
# PEFT writes `.*\.name` for parameters that it joins: any path before the name, but not none.
_ANY_PATH, _BEHIND = r".*\.", ".*."
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z")


def suffixes(module: str) -> list[str]:
    """The names in a configuration that fit a module: "a.b.c" gives "a.b.c", "b.c" and "c"."""
    parts = module.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def is_plain(name: str) -> bool:
    """Whether a name is a dotted name and nothing more, so that it means the same as an expression."""
    return _PLAIN_NAME.match(name) is not None


@dataclass(frozen=True)
class LayerChoice:
    """`layers_to_transform` and `layers_pattern`: the decoder layers whose modules are adapted."""

    indices: frozenset[int]
    paths: tuple[str, ...]  # `layers_pattern`: the names before a layer's index; empty: any name

    def has(self, module: str) -> bool:
        """Whether PEFT finds the index of one of these layers in the module's name: the first index that fits."""
        parts = module.split(".")
        places = [place for place, part in enumerate(parts[:-1]) if part.isdecimal()]
        if not self.paths:
            found = next((place for place in places if place >= 2), None)
            return found is not None and int(parts[found]) in self.indices
        for path in self.paths:
            for place in places:
                before = ".".join(parts[:place])
                if before == path or before.endswith("." + path):
                    return int(parts[place]) in self.indices
        return False


class NamePattern(Generic[_T]):
    """`rank_pattern` and `alpha_pattern`: values by module name. The first key that fits a module counts.

    Keys that are read: names and suffixes, ".*\\.name" for a suffix, "^full.name" for one exact module, with "$" at the
    end or with "\\." for a dot. Every other key is an expression, which may fit any module. A look-up costs the same
    whatever their number.
    """

    def __init__(self, entries: Iterable[tuple[str, _T]]) -> None:
        self._by_name: dict[str, tuple[int, _T]] = {}  # by name: the key's place in the configuration, and the value
        # Of the expressions: the first place of each value.
        self._first_place: dict[_T, int] = {}
        self.expression = ""  # one of them, for messages
        for place, (key, value) in enumerate(entries):
            name = _name_of(key)
            if name is None:
                self.expression = self.expression or key
                self._first_place.setdefault(value, place)
            else:
                self._by_name.setdefault(name, (place, value))
        self._has_behind = any(name.startswith(_BEHIND) for name in self._by_name)
        # The values that come first among the expressions; a third one makes no difference.
        self._earliest = list(self._first_place.items())[:2]

    def known(self, module: str, default: _T) -> _T | None:
        """The module's value, or None if that depends on an expression."""
        place, value = self._named(module, default)
        if any(other != value and other_place < place for other, other_place in self._earliest):
            return None
        return value

    def may_be(self, module: str, value: _T, default: _T) -> bool:
        """Whether the module may have this value."""
        place, named = self._named(module, default)
        return value == named or self._first_place.get(value, place) < place

    def _named(self, module: str, default: _T) -> tuple[int, _T]:
        """Place and value of the first name that fits; the default after all keys."""
        names = ["^" + module, *suffixes(module)]
        if self._has_behind:
            names += [_BEHIND + end for end in names[2:]]
        found = [entry for name in names if (entry := self._by_name.get(name)) is not None]
        return min(found, key=lambda entry: entry[0]) if found else (1 << 62, default)


def _name_of(key: str) -> str | None:
    """The name that a key of a pattern stands for, "^" before it if it is exact; None for an expression."""
    name = key.replace("\\.", ".").removesuffix("$")
    bare = name.removeprefix(_BEHIND) if key.startswith(_ANY_PATH) else name.removeprefix("^")
    return name if is_plain(bare) else None

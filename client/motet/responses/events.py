"""What a parser reports of a completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the completion."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its completion."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Calls count from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further text of a call's arguments. Joined, they are one JSON value if the call is complete.

    The parser knows no schemas of tools and takes any value; a model that follows its tools writes an object.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is over. Not complete: what followed was malformed, or the completion ended within the call."""

    index: int
    is_complete: bool


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments | CallEnd
